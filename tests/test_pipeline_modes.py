"""Which modes of a pipeline go together: the tables in `omni_trio.pipeline._modes`, rule by rule."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import attrs
import pytest

from omni_trio.pipeline import Pipeline
from pipelines import MAKERS, decode, diffusion, kv, length, llm, no_companions, pooling, prefill, refusal, sim, worker

# Ways of feeding

KV_SOURCES = {"llm", "simulated"}
ALL_BUT_POOLING = {"llm", "worker", "diffusion", "simulated"}
FEED_TABLE = {
    "finish": (set(MAKERS), set(MAKERS)),
    "output": (set(MAKERS), {"worker", "simulated"}),
    "kv": (KV_SOURCES, ALL_BUT_POOLING),
    "connector": (ALL_BUT_POOLING, ALL_BUT_POOLING),
}
EDGES = list(itertools.product(FEED_TABLE, MAKERS, MAKERS))


def is_legal(feed: str, source: str, receiver: str) -> bool:
    sources, receivers = FEED_TABLE[feed]
    return source in sources and receiver in receivers


@pytest.mark.parametrize(("feed", "source", "receiver"), [edge for edge in EDGES if is_legal(*edge)])
def test_legal_ways_of_feeding(feed, source, receiver):
    pipeline = Pipeline((MAKERS[source]("a"), MAKERS[receiver]("b", feed=feed)))
    assert pipeline.children[0] == (1,)
    assert pipeline.pair is None


@pytest.mark.parametrize(("feed", "source", "receiver"), [edge for edge in EDGES if not is_legal(*edge)])
def test_illegal_ways_of_feeding(feed, source, receiver):
    found, message = refusal((MAKERS[source]("a"), MAKERS[receiver]("b", feed=feed)))
    assert found == "stages.b.feed"
    if receiver not in FEED_TABLE[feed][1]:
        expected = "only worker and simulated stages take" if feed == "output" else "a pooling stage needs all"
    else:
        expected = f"its source 'a' is of kind {source!r}, which"
    assert expected in message


@pytest.mark.parametrize("feed", ["output", "kv", "connector"])
@pytest.mark.parametrize("kind", MAKERS)
def test_the_first_stage_is_fed_by_the_prompt(kind, feed):
    found, message = refusal((MAKERS[kind]("a", feed=feed), sim("b")))
    assert found == "stages.a.feed"
    assert "fed by the user's prompt" in message


PAIR = (prefill(), decode())
SIM_PAIR = (sim("p", role="prefill"), sim("d", role="decode"))


@pytest.mark.parametrize(
    ("stages", "fields"),
    [
        # One source may feed in several ways, and in the same way twice.
        ((llm("a"), diffusion("b", feed="kv"), diffusion("c", feed="kv", source="a")), {}),
        (
            (
                llm("a"),
                llm("b", feed="finish"),
                worker("c", feed="output", source="a"),
                diffusion("d", feed="kv", source="a"),
                llm("e", feed="connector", source="a", placeholder=length, chunk_timeout=1.0),
            ),
            {},
        ),
        # Each edge is on its own: before and behind it may be any other.
        ((llm("a"), llm("b", feed="connector"), llm("c", feed="connector"), worker("d", feed="connector")), {}),
        ((llm("a"), llm("b"), llm("c", feed="connector"), worker("d", feed="output")), {}),
        ((llm("a"), llm("b", feed="kv"), diffusion("c", feed="kv")), {}),
        ((llm("a"), llm("b", feed="connector"), diffusion("c", feed="kv")), {}),
        ((worker("a"), diffusion("b", feed="connector"), worker("c", feed="output")), {}),
        # The pair, and what the decode stage feeds.
        (PAIR, {}),
        (SIM_PAIR, {}),
        ((prefill(role="kv_both"), decode(role="kv_both")), {}),
        ((prefill(final_output=False), decode(final_output=True), worker("w")), {}),
        ((prefill(when_empty="skip", dispatch_timeout=5.0), decode(handoff="content", dispatch_timeout=0.5)), {}),
        ((*PAIR, llm("x"), pooling("y", source="d")), {}),
        ((*PAIR, worker("x", feed="output")), {}),
        ((*PAIR, diffusion("x", feed="kv")), {}),
        ((*PAIR, llm("x", feed="connector")), {}),
        ((prefill(), decode(source="p"), worker("x", source="d")), {}),
        # Companions, and what is behind the stages that the first one feeds.
        ((llm("a"), diffusion("b")), {"expand": no_companions, "bundle_timeout": 1.5}),
        ((llm("a"), diffusion("b", feed="kv")), {"expand": no_companions}),
        ((sim("a"), sim("b"), sim("c", feed="kv", source="a")), {"expand": no_companions}),
        ((llm("a"), diffusion("b"), worker("c", feed="output")), {"expand": no_companions}),
        ((llm("a"), llm("b"), worker("c", feed="connector")), {"expand": no_companions}),
        ((llm("a", replicas=3, final_output=True), diffusion("b", replicas=2)), {"expand": no_companions}),
    ],
)
def test_modes_that_go_together(stages, fields):
    assert len(Pipeline(stages, **fields).stages) == len(stages)


def engine_args(config=None, **more) -> dict:
    return {"engine_args": {**({} if config is None else {"kv_transfer_config": config}), **more}}


CONFIG = "engine_args.kv_transfer_config"


@pytest.mark.parametrize(
    ("stages", "key", "words"),
    [
        ((*PAIR, sim("x", role="prefill")), "stages.x.role", "one prefill/decode pair at most"),
        ((*PAIR, sim("x", role="decode")), "stages.x.role", "one prefill/decode pair at most"),
        ((*SIM_PAIR, sim("x", role="prefill"), sim("y", role="decode")), "stages.x.role", "one prefill/decode pair"),
        ((prefill(),), "stages.p.role", "needs a stage with role = 'decode'"),
        ((prefill(), llm("b")), "stages.p.role", "needs a stage with role = 'decode'"),
        ((decode(),), "stages.d.role", "needs a stage with role = 'prefill'"),
        ((llm("a"), decode()), "stages.d.role", "needs a stage with role = 'prefill'"),
        ((worker("a", role="prefill"), sim("b")), "stages.a.role", "only llm stages prefill or decode"),
        ((pooling("a", role="prefill"), sim("b")), "stages.a.role", "only llm stages prefill or decode"),
        ((prefill(), diffusion("b", role="decode")), "stages.b.role", "only llm stages prefill or decode"),
        ((sim("a"), *SIM_PAIR), "stages.p.role", "only the first stage can prefill"),
        ((SIM_PAIR[1], SIM_PAIR[0]), "stages.p.role", "only the first stage can prefill"),
        ((SIM_PAIR[0], sim("x"), SIM_PAIR[1]), "stages.d.source", "must be the prefill stage, 'p'"),
        ((*PAIR, sim("x", source="p")), "stages.x.source", "feeds its decode stage only; take 'd' as the source"),
        ((prefill(), sim("x", source="p"), decode(source="p")), "stages.x.source", "feeds its decode stage only"),
        ((prefill(final_output=True), decode()), "stages.p.final_output", "one token, which the decode stage makes"),
        ((prefill(), decode(bridge="tokens")), "stages.d.bridge", "the original prompt and the KV cache"),
        ((prefill(), decode(feed="connector")), "stages.d.feed", "starts when its prefill stage has ended"),
        ((prefill(), decode(feed="kv")), "stages.d.feed", "starts when its prefill stage has ended"),
        ((SIM_PAIR[0], sim("d", role="decode", feed="output")), "stages.d.feed", "when its prefill stage has ended"),
        ((prefill(handoff="content"), decode()), "stages.p.handoff", "only a stage with role = 'decode'"),
        ((sim("a"), sim("b", handoff="content")), "stages.b.handoff", "only a stage with role = 'decode'"),
        ((prefill(), decode(when_empty="skip")), "stages.d.when_empty", "only a prefill stage can be skipped"),
        ((sim("a", when_empty="skip"),), "stages.a.when_empty", "only a prefill stage can be skipped"),
        # What both halves need alike.
        ((prefill(), sim("d", role="decode")), "stages.d.kind", "has 'llm', this one 'simulated'; both need the same"),
        ((SIM_PAIR[0], decode()), "stages.d.kind", "has 'simulated', this one 'llm'"),
        ((prefill(), attrs.evolve(decode(), model="n")), "stages.d.model", "can not read another one's KV cache"),
        ((prefill(prompt_format="chat"), decode()), "stages.d.prompt_format", "a KV cache fits its own tokens only"),
        (
            (prefill(prompt_format="chat"), decode(prompt_format="chat", system="s")),
            "stages.d.system",
            "the prefill stage has none, this one 's'; both need the same",
        ),
        ((prefill(**engine_args()), decode()), f"stages.p.{CONFIG}", "kv_role = 'kv_producer' or 'kv_both'"),
        ((prefill(), decode(**engine_args())), f"stages.d.{CONFIG}", "kv_role = 'kv_consumer' or 'kv_both'"),
        ((prefill(**engine_args("{}")), decode()), f"stages.p.{CONFIG}", "expected a table with a kv_connector"),
        ((prefill(role="kv_consumer"), decode()), f"stages.p.{CONFIG}.kv_role", "not 'kv_consumer'"),
        ((prefill(), decode(role="kv_producer")), f"stages.d.{CONFIG}.kv_role", "not 'kv_producer'"),
        (
            (prefill(), decode(**engine_args({"kv_connector": "NixlConnector"}))),
            f"stages.d.{CONFIG}.kv_role",
            "expected 'kv_consumer' or 'kv_both', none is given",
        ),
        (
            (prefill(**engine_args({"kv_role": "kv_both"})), decode(**engine_args({"kv_role": "kv_both"}))),
            f"stages.p.{CONFIG}.kv_connector",
            "expected the name of a connector",
        ),
        (
            (prefill(), decode(engine_args=kv("kv_consumer", "ExampleConnector"))),
            f"stages.d.{CONFIG}.kv_connector",
            "the prefill stage has 'NixlConnector', this one 'ExampleConnector'; both need the same",
        ),
        (
            (
                prefill(engine_args=kv("kv_both", kv_buffer_device="cpu")),
                decode(engine_args=kv("kv_both", kv_buffer_device="cuda")),
            ),
            f"stages.d.{CONFIG}.kv_buffer_device",
            "has 'cpu', this one 'cuda'",
        ),
        (
            (
                prefill(engine_args=kv("kv_both", kv_buffer_size=1e9)),
                decode(engine_args=kv("kv_both", kv_buffer_size=2e9)),
            ),
            f"stages.d.{CONFIG}.kv_buffer_size",
            "has 1000000000.0, this one 2000000000.0",
        ),
        (
            (prefill(), decode(engine_args={**kv("kv_both"), "tensor_parallel_size": 2})),
            "stages.d.engine_args.tensor_parallel_size",
            "the prefill stage has 1, this one 2; both need the same",
        ),
    ],
)
def test_a_pair_that_is_refused(stages, key, words):
    found, message = refusal(stages)
    assert found == key
    assert words in message


def test_a_kv_transfer_config_may_be_an_object_and_leave_buffers_to_the_connector():
    config = SimpleNamespace(kv_connector="NixlConnector", kv_role="kv_both", kv_buffer_device="cuda", kv_buffer_size=1)
    assert Pipeline((prefill(**engine_args(config)), decode())).pair == (0, 1)
    other = SimpleNamespace(**{**vars(config), "kv_buffer_size": 2})
    found, _ = refusal((prefill(**engine_args(config)), decode(**engine_args(other))))
    assert found == f"stages.d.{CONFIG}.kv_buffer_size"


@pytest.mark.parametrize(
    ("stages", "key", "words"),
    [
        ((worker("a"), diffusion("b")), "expand", "the first stage is of kind 'worker'"),
        ((pooling("a"), diffusion("b")), "expand", "the first stage is of kind 'pooling'"),
        ((diffusion("a"), worker("b")), "expand", "the first stage is of kind 'diffusion'"),
        ((llm("a"),), "expand", "it feeds none"),
        (PAIR, "expand", "only a request's own KV cache is handed over"),
        ((*SIM_PAIR, diffusion("x")), "expand", "only a request's own KV cache is handed over"),
        ((llm("a"), worker("b", feed="output")), "stages.b.feed", "before all of them have ended: 'output'"),
        ((llm("a"), llm("b", feed="connector")), "stages.b.feed", "before all of them have ended: 'connector'"),
        ((llm("a"), diffusion("b"), worker("c", feed="output", source="a")), "stages.c.feed", "'output' does not go"),
    ],
)
def test_companions_that_are_refused(stages, key, words):
    Pipeline(stages)
    found, message = refusal(stages, expand=no_companions)
    assert found == key
    assert words in message


@pytest.mark.parametrize(
    ("expand", "words"),
    [
        ("math", "is not of the form"),
        ("math:", "is not of the form"),
        ("no.such:thing", "the expand function 'no.such:thing' can not be imported"),
        ("math:cel", "has no 'cel'; did you mean 'ceil'?"),
        ("math:pi", "expected a callable"),
        (3, "expected a callable, or 'package.module:function', not 3"),
    ],
)
def test_an_expand_function_that_can_not_be_had(expand, words):
    found, message = refusal((sim("a"), sim("b")), expand=expand)
    assert found == "expand"
    assert words in message
    found, message = refusal((sim("a"), sim("b", feed="connector", placeholder=expand)))
    assert found == "stages.b.placeholder"
    assert words.replace("expand", "placeholder") in message


@pytest.mark.parametrize(
    ("stages", "key", "words"),
    [
        ((sim("a", placeholder=length),), "stages.a.placeholder", "only a stage with feed = 'connector'"),
        ((sim("a"), sim("b", placeholder=length)), "stages.b.placeholder", "only a stage with feed = 'connector'"),
        (
            (sim("a"), worker("b", feed="connector", placeholder=length)),
            "stages.b.placeholder",
            "gets the user's prompt itself",
        ),
        (
            (sim("a"), diffusion("b", feed="connector", placeholder=length)),
            "stages.b.placeholder",
            "gets the user's prompt itself",
        ),
        ((sim("a"), sim("b", chunk_timeout=1.0)), "stages.b.chunk_timeout", "only a stage with feed = 'connector'"),
        ((sim("a"), sim("b", feed="connector", bridge="text")), "stages.b.bridge", "no bridge is asked"),
    ],
)
def test_what_does_not_belong_to_the_feed(stages, key, words):
    found, message = refusal(stages)
    assert found == key
    assert words in message


def test_a_bundle_timeout_needs_companions():
    found, message = refusal((sim("a"), sim("b")), bundle_timeout=5.0)
    assert found == "bundle_timeout"
    assert "there is no 'expand'" in message


@pytest.mark.parametrize(
    ("stages", "expand", "reason"),
    [
        (PAIR, None, "a prefill/decode pair hands one KV cache over, once"),
        ((sim("a"), sim("b")), no_companions, "companions are made of a whole prompt"),
        ((sim("a"), sim("b", feed="kv")), None, "stage 'b' starts once, when the KV cache of its source is ready"),
        ((sim("a"), pooling("b")), None, "stage 'b' is of kind 'pooling', which takes its input at once"),
        ((diffusion("a"),), None, "stage 'a' is of kind 'diffusion', which takes its input at once"),
        ((sim("a"), sim("b"), worker("c", feed="output"), llm("d", feed="connector")), None, None),
        ((worker("a"), llm("b")), None, None),
    ],
)
def test_why_there_are_no_sessions(stages, expand, reason):
    assert Pipeline(stages, expand=expand).no_sessions == reason
