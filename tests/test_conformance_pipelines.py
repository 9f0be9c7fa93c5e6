"""The kit for pipelines runs whole pipelines of any mode, with faults, and finds what their own functions do wrong."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from omni_trio.bridges import Companion, bridge
from omni_trio.messages import StageInput
from omni_trio.pipeline import Pipeline, StageSpec
from omni_trio.testing import Chunk, Finish, Wait
from omni_trio.testing.conformance import (
    BRIDGE_RULES,
    PIPELINE_RULES,
    ConformanceError,
    check_pipeline,
    run_pipeline_round,
)
from support import stage

PROMPTS = ["hello", StageInput(token_ids=(1, 2, 3))]


def passes_on(context):
    tokens, _ = context.new()
    return StageInput(token_ids=tokens) if tokens else None


def two(function=passes_on, **fields):
    return Pipeline([StageSpec(name="thinker", model="any"), stage("talker", bridge=function, **fields)])


def guided(context):
    return [Companion(role="cfg", input=StageInput(text="nothing"))]


PIPELINES = {
    "finish": two(),
    "output": two(feed="output"),
    "two of a source": Pipeline([stage("a"), stage("b", bridge=passes_on), stage("c", source="a", replicas=2)]),
    "companions": Pipeline([stage("a"), stage("b")], expand=guided),
    "connector": Pipeline([stage("a"), stage("b", feed="connector", placeholder=lambda prompt: 5)]),
    "pair": Pipeline(
        [
            stage("p", role="prefill"),
            stage("d", role="decode", sampling={"top_p": 0.5}),
            stage("after", bridge=passes_on),
        ]
    ),
}


@pytest.mark.parametrize("pipeline", PIPELINES.values(), ids=PIPELINES)
def test_pipelines_of_all_modes_pass(pipeline):
    assert check_pipeline(pipeline, PROMPTS).kept == tuple(PIPELINE_RULES.values())


def test_a_pipeline_file_passes(tmp_path):
    file = tmp_path / "pipeline.toml"
    file.write_text('[[stages]]\nname = "a"\nmodel = "any"\n[[stages]]\nname = "b"\nmodel = "any"\nbridge = "text"\n')
    check_pipeline(file, PROMPTS)


def test_stages_can_be_given_what_bridges_look_at():
    @bridge(reads=["data"])
    def rows_of(context):
        rows = context.data["rows"]
        return StageInput(data={"rows": rows.copy()})

    def with_rows(request):
        return (Wait(1.0), Chunk((1,), data={"rows": np.ones((2, 3))}), Finish())

    check_pipeline(two(rows_of), PROMPTS, scripts={"thinker": with_rows})
    with pytest.raises(ConformanceError) as caught:
        check_pipeline(two(rows_of), PROMPTS)
    assert caught.value.rule is PIPELINE_RULES[4]
    assert "KeyError: 'rows'" in str(caught.value)


def fails_on_long(context):
    if len(context.token_ids) > 3:
        raise ValueError("too many")
    return StageInput(token_ids=tuple(context.token_ids))


def test_a_bridge_that_fails_is_found_and_the_example_fails_again():
    pipeline = two(fails_on_long)
    with pytest.raises(ConformanceError) as caught:
        check_pipeline(pipeline, PROMPTS)
    assert caught.value.rule is PIPELINE_RULES[4]
    scope = {"pipeline": pipeline, "run_pipeline_round": run_pipeline_round, "StageInput": StageInput}
    from omni_trio.testing.conformance import Visit

    with pytest.raises(ConformanceError) as again:
        exec(caught.value.example, {**scope, "Visit": Visit})
    assert str(again.value) == str(caught.value)


SHARED: list = []


def remembers_across_requests(context):
    """What is wrong only where several requests are in flight, or one after the other."""
    SHARED.append(context.request_id)
    return StageInput(token_ids=(len(SHARED),))


def test_a_bridge_that_remembers_across_requests_is_found():
    with pytest.raises(ConformanceError) as caught:
        check_pipeline(two(remembers_across_requests), PROMPTS)
    assert caught.value.rule is PIPELINE_RULES[6]
    assert "stage 'talker' was given StageInput(token_ids=(1,)), and the second time" in str(caught.value)


def hands_on(context):
    return StageInput(token_ids=tuple(context.token_ids), data={"prompt": context.prompt.data})


def test_what_the_bridges_were_given_is_used_to_check_them():
    with pytest.raises(ConformanceError) as caught:
        check_pipeline(two(hands_on), [StageInput(text="a", data={"list": [1]})])
    assert caught.value.rule is BRIDGE_RULES[4]


def test_streaming_bridges_have_to_add_up():
    def all_of_it(context):
        return StageInput(token_ids=tuple(context.token_ids))

    check_pipeline(two(passes_on, feed="output"), PROMPTS, streams=["talker"])
    with pytest.raises(ConformanceError) as caught:
        check_pipeline(two(all_of_it, feed="output"), PROMPTS, streams=["talker"])
    assert caught.value.rule is BRIDGE_RULES[8]


@pytest.mark.parametrize("length", [0, -1, True, 2.0, "x"])
def test_a_placeholder_of_no_length_is_found(length):
    pipeline = Pipeline([stage("a"), stage("b", feed="connector", placeholder=lambda prompt: length)])
    with pytest.raises(ConformanceError) as caught:
        check_pipeline(pipeline, PROMPTS)
    assert caught.value.rule is PIPELINE_RULES[5]


def test_an_expand_function_that_gives_two_the_same_role_is_found():
    pipeline = Pipeline([stage("a"), stage("b")], expand=lambda context: guided(context) * 2)
    with pytest.raises(ConformanceError) as caught:
        check_pipeline(pipeline, PROMPTS)
    assert caught.value.rule is PIPELINE_RULES[4]


def test_what_goes_wrong_in_some_rounds_only_is_made_small():
    calls = itertools.count()

    def fails_the_thirtieth_time(context):
        if next(calls) >= 30:
            raise ValueError("worn out")
        return StageInput(token_ids=tuple(context.token_ids))

    with pytest.raises(ConformanceError) as caught:
        check_pipeline(two(fails_the_thirtieth_time), PROMPTS)
    assert caught.value.rule is PIPELINE_RULES[4]
    assert caught.value.example.count("Visit(") == 1
    assert "faults" not in caught.value.example


def test_there_has_to_be_a_prompt():
    with pytest.raises(ValueError, match="prompts"):
        check_pipeline(two(), [])


def test_what_a_runtime_leaves_behind_is_found(monkeypatch):
    async def forgotten(turn, leg):
        leg.replica.let_go(leg)

    monkeypatch.setattr("omni_trio.runtime._turn.Turn._abort", forgotten)
    with pytest.raises(ConformanceError) as caught:
        check_pipeline(two(), PROMPTS)
    assert caught.value.rule is PIPELINE_RULES[3]
