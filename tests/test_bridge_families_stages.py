"""The bridges of model families over simulated stages, and what checks bridges checked."""

from __future__ import annotations

import itertools

import attrs
import numpy as np
import pytest
import trio

from bridge_samples import ASSISTANT, PROMPT, START, USER, frames, info, rows, spoken, thought
from omni_trio.bridges import (
    BUILTIN,
)
from omni_trio.bridges.families.image import ar_to_image, cfg_expand
from omni_trio.bridges.families.qwen_omni import (
    talker_prompt_length,
    talker_to_code2wav,
    thinker_to_talker,
)
from omni_trio.errors import BridgeFailed, InvalidRequest
from omni_trio.messages import Output, StageInput
from omni_trio.pipeline import Pipeline
from omni_trio.testing import Chunk, Finish, SimStage
from support import simulated, stage
from support_bridges import check_bridge, context

# --------------------------------------------------------------------------------------------------------------
# Over simulated stages


def run_with_threads(function):
    """Run on the real clock: a virtual one would jump while a bridge is at work in its thread."""

    async def bounded():
        with trio.fail_after(60):
            await function()

    trio.run(bounded)


async def answered(stream):
    async for event in stream:
        if isinstance(event, Output) and event.stage == "vocoder" and event.segment_end:
            return


def noting(log, script):
    def play(request):
        log.append(request)
        return script(request) if callable(script) else script

    return SimStage(script=play)


def test_a_session_of_thinker_talker_and_vocoder():
    asked = {0: PROMPT, 1: [START, USER, 9, START, ASSISTANT]}
    turns = []
    at_row = 0

    def think(request):
        nonlocal at_row
        if not request.input.token_ids:
            return (Finish(),)
        prompt = asked[len(turns)]
        turns.append(prompt)
        first, middle, at_row = at_row, at_row + len(prompt), at_row + len(prompt) + 1
        return (
            Chunk((len(turns),), data=thought(prompt, first, middle)),
            Chunk((10,), data=thought([], middle, at_row)),
            Finish(),
        )

    talked, heard = [], []
    pipeline = Pipeline(
        [
            stage("thinker", final_output=True),
            stage("talker", bridge=thinker_to_talker),
            stage("vocoder", bridge=talker_to_code2wav),
        ]
    )

    async def main():
        talker = noting(
            talked,
            lambda request: (
                (Chunk((5, 2150), data={"codes.audio": frames(len(talked), 2150)}), Finish())
                if request.input.token_ids
                else (Finish(),)
            ),
        )
        async with simulated(pipeline, SimStage(script=think), talker, noting(heard, (Finish(),))) as runtime:
            async with runtime.open_stream() as stream:
                for segment in asked.values():
                    await stream.send(segment)
                    # One after the other: while a bridge is in its thread, its source's data can run ahead.
                    await answered(stream)
                await stream.aclose()
                await stream.result()

    run_with_threads(main)
    told = [info(request.input) for request in talked if request.input.data]
    assert [one["ids"]["prompt"] for one in told] == list(asked.values())
    assert [one["ids"]["all"][len(one["ids"]["prompt"]) :] for one in told] == [[1, 10], [2, 10]]
    together = np.concatenate([one["embed"]["prefill"] for one in told])
    np.testing.assert_array_equal(together, rows(0, at_row))
    assert [spoken(request.input)[0] for request in heard if request.input.token_ids] == [[1], [2]]


def test_a_refusal_names_the_stage_and_fails_that_request_alone():
    pipeline = Pipeline([stage("thinker"), stage("talker", bridge=thinker_to_talker)])

    async def main():
        async with simulated(pipeline, SimStage(script=lambda request: (Chunk((1,)), Finish()))) as runtime:
            with pytest.raises(InvalidRequest, match="gave no hidden states") as caught:
                await runtime.generate([1, 2], request_id="r")
            assert (caught.value.request_id, caught.value.stage) == ("r", "talker")

    run_with_threads(main)


def test_nothing_spoken_fails_the_request_by_name():
    pipeline = Pipeline([stage("talker"), stage("vocoder", bridge=talker_to_code2wav)])

    async def main():
        async with simulated(pipeline, SimStage(script=lambda request: (Finish(),))) as runtime:
            with pytest.raises(BridgeFailed, match="returned nothing"):
                await runtime.generate([1, 2])

    run_with_threads(main)


def test_a_guided_image():
    drawn = []
    pipeline = Pipeline(
        [stage("ar"), stage("dit", bridge=attrs.evolve(ar_to_image, made="text"))],
        expand=attrs.evolve(cfg_expand, negative="blurry"),
    )

    def write(request):
        return (Chunk((1,), text=f"<{request.input.text}>"), Finish())

    async def main():
        async with simulated(pipeline, SimStage(script=write), noting(drawn, (Finish(),))) as runtime:
            await runtime.generate("a cat")

    run_with_threads(main)
    (request,) = drawn
    assert (request.input.text, dict(request.input.data)) == ("<a cat>", {"negative_prompt": "<blurry>"})


def test_a_talker_that_is_fed_by_connector_gets_a_placeholder_of_the_right_length():
    given_to_talker = []
    pipeline = Pipeline([stage("thinker"), stage("talker", feed="connector", placeholder=talker_prompt_length)])

    async def main():
        sims = (SimStage(script=lambda request: (Finish(),)), noting(given_to_talker, (Finish(),)))
        async with simulated(pipeline, *sims) as runtime:
            await runtime.generate(PROMPT)

    run_with_threads(main)
    assert [request.input.token_ids for request in given_to_talker] == [(0,) * 13]


# --------------------------------------------------------------------------------------------------------------
# The checker itself finds what is wrong

CALLS = itertools.count()
CASES = {
    "it raised KeyError": lambda context: context.data["nothing"],
    "it returned int": lambda context: 3,
    "it changed what it was given": lambda context: context.data["list"].append(1),
    "a list that is not its own": lambda context: StageInput(data={"mine": context.data["list"]}),
    "an array whose memory": lambda context: StageInput(data={"mine": context.data["array"][1:]}),
    "it made something else": lambda context: StageInput(text=str(next(CALLS))),
}


@pytest.mark.parametrize("says", CASES)
def test_the_checker_finds(says):
    with pytest.raises(AssertionError, match=says):
        check_bridge(CASES[says], [context(data={"list": [1], "array": rows(0, 3)})])


@pytest.mark.parametrize("name", ["tokens", "text", "output"])
def test_the_built_in_ones_keep_the_contract_too(name):
    assert name in BUILTIN
    made = check_bridge(name, [context(token_ids=(1,), text="a", finished=False), context(token_ids=(1, 2), text="ab")])
    assert [one.token_ids for one in made] == ([None, None] if name == "text" else [(1,), (2,)])
