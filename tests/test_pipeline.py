"""What makes a pipeline valid, and what it derives from its stages."""

from __future__ import annotations

import math

import attrs
import pytest

from omni_trio.bridges import BUILTIN, bridge
from omni_trio.errors import ConfigError
from omni_trio.pipeline import Pipeline, StageSpec, nearest
from pipelines import decode, diffusion, length, llm, no_companions, pooling, prefill, refusal, sim, worker

# What is derived


def test_each_stage_is_fed_by_the_one_before_it():
    pipeline = Pipeline((sim("a"), sim("b"), sim("c")))
    assert pipeline.sources == (None, 0, 1)
    assert pipeline.children == ((1,), (2,), ())
    assert pipeline.finals == (False, False, True)
    assert [pipeline.path_to(index) for index in range(3)] == [(0,), (0, 1), (0, 1, 2)]


def test_stages_may_share_a_source():
    pipeline = Pipeline((sim("a"), sim("b"), sim("c", source="a"), sim("d", source="b"), sim("e")))
    assert pipeline.sources == (None, 0, 0, 1, 3)
    assert pipeline.children == ((1, 2), (3,), (), (4,), ())
    assert pipeline.finals == (False, False, True, False, True)
    assert pipeline.path_to(4) == (0, 1, 3, 4)


def test_a_stage_in_the_middle_can_be_final_too():
    assert Pipeline((sim("a", final_output=True), sim("b"))).finals == (True, True)
    assert Pipeline((sim("a", final_output=False), sim("b"))).finals == (False, True)


def test_bridges_by_default_and_by_name():
    @bridge(reads=("tokens",), run_in="thread")
    def own(context):
        return context.prompt

    def plain(context):
        return context.prompt

    stages = (llm("a"), llm("b"), pooling("c"), worker("d"), sim("e"))
    pipeline = Pipeline((*stages, llm("f", bridge="original_prompt"), sim("g", bridge=own), sim("h", bridge=plain)))
    names = [spec and spec.name for spec in pipeline.bridges]
    assert names[:6] == [None, "tokens", "tokens", "output", "output", "original_prompt"]
    assert pipeline.bridges[1] is BUILTIN["tokens"]
    assert pipeline.bridges[6].function is own
    assert (pipeline.bridges[6].reads, pipeline.bridges[6].run_in) == ({"tokens"}, "thread")
    assert pipeline.bridges[7].function is plain
    assert pipeline.bridges[7].reads == {"tokens", "text", "data"}


def test_where_no_bridge_is_named_and_none_is_asked_the_prompt_is_passed_on():
    pipeline = Pipeline((llm("a"), diffusion("b"), llm("c", source="a", feed="connector"), worker("d", source="c")))
    assert [spec and spec.name for spec in pipeline.bridges] == [None, "original_prompt", "original_prompt", "output"]
    assert pipeline.reads_text == (False, False, True, False)
    assert Pipeline((prefill(), decode())).bridges[1] is BUILTIN["original_prompt"]


def test_the_pair_is_found():
    assert Pipeline((prefill(), decode())).pair == (0, 1)
    assert Pipeline((sim("p", role="prefill"), sim("d", role="decode"), worker("w"))).pair == (0, 1)
    assert Pipeline((llm("a"), llm("b"))).pair is None


def test_functions_by_name_and_as_they_are():
    named = Pipeline((sim("a"), sim("b", feed="connector", placeholder="math:ceil")))
    assert (named.expander, named.placeholders) == (None, (None, math.ceil))
    assert Pipeline((sim("a"), sim("b")), expand="math:floor").expander.function is math.floor
    assert Pipeline((sim("a"), sim("b")), expand="math:floor").expander.name == "math:floor"
    given = Pipeline((sim("a"), sim("b"), sim("c", feed="connector", placeholder=length)), expand=no_companions)
    assert given.expander.function is no_companions
    assert given.expander.name == "no_companions"
    assert given.placeholders == (None, None, length)


def test_modalities_by_default_and_by_name():
    stages = (llm("a"), pooling("b"), worker("c"), sim("d"), diffusion("e"), worker("f"))
    last = attrs.evolve(stages[-1], modality="audio")
    assert Pipeline((*stages[:-1], last)).modalities == ("text", "embedding", "data", "text", "image", "audio")


def test_text_is_read_by_users_and_bridges_only():
    pipeline = Pipeline(
        (
            llm("tokens-only"),
            llm("to-text", bridge="tokens"),
            llm("to-nobody", bridge="text"),
            llm("final", bridge="original_prompt"),
        )
    )
    assert pipeline.reads_text == (False, True, False, True)
    assert Pipeline((llm("a", modality="tokens"),)).reads_text == (False,)
    assert Pipeline((llm("a", final_output=True), llm("b"))).reads_text == (True, True)


def test_reads_text_asks_every_receiver():
    pipeline = Pipeline((llm("a"), llm("b"), llm("c", source="a", bridge="text")))
    assert pipeline.reads_text[0] is True


def test_stage_ids():
    pipeline = Pipeline((sim("thinker"), sim("talker")))
    assert [pipeline.stage_id("thinker"), pipeline.stage_id("talker")] == [0, 1]
    with pytest.raises(KeyError, match=r"no stage is called 'talkr'; did you mean 'talker'\?"):
        pipeline.stage_id("talkr")


def test_pipelines_are_equal_by_value():
    assert Pipeline((sim("a", options={"x": [1]}),)) == Pipeline([sim("a", options={"x": [1]})])
    assert Pipeline((sim("a"),)) != Pipeline((sim("b"),))


def test_nothing_can_be_changed_afterwards():
    options = {"x": 1}
    stage = sim("a", options=options, devices=["0"])
    options["x"] = 2
    assert stage.options == {"x": 1}
    assert stage.devices == ("0",)
    with pytest.raises(TypeError):
        stage.options["x"] = 3
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        stage.name = "b"
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        Pipeline((stage,)).name = "b"


def test_nearest():
    assert nearest("talkr", ["thinker", "talker"]) == "; did you mean 'talker'?"
    assert nearest("xyz", ["thinker", "talker"]) == ""
    assert nearest("x", []) == ""


# Devices


@pytest.mark.parametrize(
    ("replicas", "size", "devices", "groups"),
    [
        (2, 1, (), [(), ()]),
        (2, 1, ("3", "5"), [("3",), ("5",)]),
        (2, 2, ("0", "1", "MIG-7", "x"), [("0", "1"), ("MIG-7", "x")]),
        (3, 2, ("0", "1"), [("0", "1"), ("2", "3"), ("4", "5")]),
        (3, 1, ("4",), [("4",), ("5",), ("6",)]),
        (1, 2, ("7", "3"), [("7", "3")]),
    ],
)
def test_device_groups(replicas, size, devices, groups):
    (stage,) = Pipeline((sim("a", replicas=replicas, devices_per_replica=size, devices=devices),)).stages
    assert [stage.device_group(replica) for replica in range(replicas)] == groups


# What is refused


@pytest.mark.parametrize("name", ["a", "A-1", "_a_", "thinker_2", "стадия"])
def test_names(name):
    assert Pipeline((sim(name),)).stages[0].name == name


@pytest.mark.parametrize("name", ["", "-", "__", "a b", "a.b", "a/b", "a\n", '"', " a", "a:b"])
def test_what_is_no_name(name):
    with pytest.raises(ConfigError, match="is not a name") as caught:
        Pipeline((sim(name),))
    assert caught.value.key == f"stages.{name or 0}.name"


@pytest.mark.parametrize(
    ("stages", "key", "words"),
    [
        ((), "stages", "at least one stage"),
        ((sim("a"), sim("b"), sim("a")), "stages.a.name", "two stages are called 'a'"),
        ((StageSpec(name="a", kind="lmm"),), "stages.a.kind", "did you mean 'llm'?"),
        ((StageSpec(name="a", kind="xyz"),), "stages.a.kind", "no such kind 'xyz' (kinds: llm, pooling"),
        ((sim("a", modality="audoi"),), "stages.a.modality", "did you mean 'audio'?"),
        ((StageSpec(name="a"),), "stages.a.model", "a stage of kind 'llm' needs a model"),
        ((StageSpec(name="a", kind="pooling", model=""),), "stages.a.model", "a stage of kind 'pooling' needs"),
        ((llm("a", target="x:y"),), "stages.a.target", "name the model with 'model'"),
        ((sim("a", target="x:y"),), "stages.a.target", "only worker and diffusion stages have a target"),
        ((StageSpec(name="a", kind="worker"),), "stages.a.target", "needs a target"),
        ((StageSpec(name="a", kind="worker", target="x.y"),), "stages.a.target", "not of the form"),
        ((StageSpec(name="a", kind="worker", target="x:y:z"),), "stages.a.target", "not of the form"),
        ((StageSpec(name="a", kind="worker", target="x:"),), "stages.a.target", "not of the form"),
        ((StageSpec(name="a", kind="worker", target=":y"),), "stages.a.target", "not of the form"),
        ((worker("a", model="m"),), "stages.a.model", "a worker stage takes 'options'"),
        ((StageSpec(name="a", kind="diffusion"),), "stages.a.target", "a diffusion stage needs a target"),
        ((StageSpec(name="a", kind="diffusion", target="x.y"),), "stages.a.target", "not of the form"),
        ((diffusion("a", model="m"),), "stages.a.model", "a diffusion stage takes 'options'"),
        ((diffusion("a", engine_args={"x": 1}),), "stages.a.engine_args", "a diffusion stage takes 'options'"),
        ((sim("a", system="s"),), "stages.a.system", "only llm stages have a system message"),
        ((pooling("a", system="s"),), "stages.a.system", "needs prompt_format = 'chat'"),
        ((sim("a", engine_args={"x": 1}),), "stages.a.engine_args", "takes 'options'"),
        ((llm("a", options={"x": 1}),), "stages.a.options", "takes 'engine_args', not 'options'"),
        ((llm("a", path=("/x",)),), "stages.a.path", "only worker and diffusion stages"),
        ((sim("a", prompt_format="chat"),), "stages.a.prompt_format", "only llm stages"),
        ((llm("a", system="s"),), "stages.a.system", "needs prompt_format = 'chat'"),
        ((sim("a", replicas=0),), "stages.a.replicas", "at least 1, not 0"),
        ((sim("a", devices_per_replica=0),), "stages.a.devices_per_replica", "at least 1, not 0"),
        ((sim("a", replicas=2, devices=("0", "1", "2")),), "stages.a.devices", "need 2 devices, or 1 as a template; 3"),
        ((sim("a", replicas=2, devices=("gpu",)),), "stages.a.devices", "must be numbers"),
        ((sim("a", replicas=2, devices=("²",)),), "stages.a.devices", "must be numbers"),
        ((sim("a", start_timeout=0.0),), "stages.a.start_timeout", "above 0, not 0.0"),
        ((sim("a", probe_interval=-1.0),), "stages.a.probe_interval", "above 0, not -1.0"),
        ((sim("a", probe_timeout=float("nan")),), "stages.a.probe_timeout", "above 0, not nan"),
        ((sim("a", source="b"), sim("b")), "stages.a.source", "can have no source"),
        ((sim("a", bridge="text"),), "stages.a.bridge", "can have no bridge"),
        ((sim("a"), sim("b", source="c"), sim("c")), "stages.b.source", "no earlier stage is called 'c'"),
        ((sim("a"), sim("b", source="b")), "stages.b.source", "(earlier stages: a)"),
        ((sim("ab"), sim("b", source="abb")), "stages.b.source", "did you mean 'ab'?"),
        ((sim("a"), sim("b", final_output=False)), "stages.b.final_output", "its output goes to nobody"),
        ((sim("a"), sim("b", bridge="txt")), "stages.b.bridge", "did you mean 'text'?"),
        ((sim("a"), sim("b", bridge="no.such:thing")), "stages.b.bridge", "can not be imported"),
        ((sim("a"), sim("b", bridge="math:sine")), "stages.b.bridge", "has no 'sine'; did you mean 'sin"),
        ((sim("a"), sim("b", bridge="math:pi")), "stages.b.bridge", "expected a callable"),
    ],
)
def test_what_is_refused(stages, key, words):
    found, message = refusal(stages)
    assert found == key
    assert words in message


@pytest.mark.parametrize(
    ("key", "word", "hint"),
    [
        ("kind", "difusion", "no such kind 'difusion'; did you mean 'diffusion'? (kinds: llm, "),
        ("modality", "imgae", "no such modality 'imgae'; did you mean 'image'? (modalities: text, "),
        ("feed", "outputs", "no such feed 'outputs'; did you mean 'output'? (expected one of: finish, output, "),
        ("role", "prefil", "no such role 'prefil'; did you mean 'prefill'? (expected one of: prefill, decode)"),
        ("handoff", "param", "no such handoff 'param'; did you mean 'params'? (expected one of: params, content)"),
        ("when_empty", "skipped", "no such when_empty 'skipped'; did you mean 'skip'? (expected one of: fail, skip)"),
        ("prompt_format", "xml", "no such prompt_format 'xml' (expected one of: raw, chat)"),
    ],
)
def test_unknown_words(key, word, hint):
    found, message = refusal((sim("a"), attrs.evolve(sim("b"), **{key: word})))
    assert found == f"stages.b.{key}"
    assert message.startswith(hint)


@pytest.mark.parametrize("value", [0.0, -1.0, math.nan, -math.inf])
@pytest.mark.parametrize("key", ["start_timeout", "probe_interval", "probe_timeout", "chunk_timeout"])
def test_seconds_that_bound_nothing(key, value):
    found, message = refusal((sim("a"), sim("b", feed="connector", **{key: value})))
    assert found == f"stages.b.{key}"
    assert message == f"expected a number of seconds above 0, not {value!r}"


@pytest.mark.parametrize("value", [-0.1, math.nan, -math.inf])
def test_seconds_that_nobody_can_wait(value):
    found, message = refusal((sim("a", dispatch_timeout=value),))
    assert found == "stages.a.dispatch_timeout"
    assert message == f"expected a number of seconds from 0 up, not {value!r}"


@pytest.mark.parametrize("value", [0.0, -1.0, math.nan, -math.inf])
@pytest.mark.parametrize("expand", [None, no_companions])
def test_seconds_for_companions(expand, value):
    found, message = refusal((sim("a"), sim("b")), expand=expand, bundle_timeout=value)
    assert found == "bundle_timeout"
    assert message == f"expected a number of seconds above 0, not {value!r}"
