"""Faults that users of such systems met, by their number: terminals, bookkeeping and order. Over simulated stages.

The other groups have files of their own: companions, prefill/decode, early forwards, sessions, control.
"""

from __future__ import annotations

import gc
import math
import random
from collections import Counter

import pytest
import trio

from omni_trio.bridges import BridgeContext, Companion
from omni_trio.errors import (
    BridgeFailed,
    DeadlineExceeded,
    EngineDied,
    InvalidRequest,
    RequestAborted,
    RequestError,
    StageFailed,
)
from omni_trio.messages import Output, StageInput, StageOutput
from omni_trio.pipeline import Pipeline
from omni_trio.runtime import Result
from omni_trio.testing import Chunk, Die, Error, Finish, LateChunk, SimStage, Stall, Wait
from support import P1, P3, assert_empty, run, simulated, stage


@pytest.mark.parametrize("fault", ["error", "die", "bridge", "stall"])
@pytest.mark.parametrize("at", [0, 1, 2])
def test_u1_what_is_accepted_ends(fault, at):
    """U1: twenty requests, one fault at a random step of one of them at one stage; every request ends, and once."""
    rng = random.Random(f"{fault}{at}")
    victim, step = rng.randrange(20), rng.randrange(4)

    def number(request_id):
        return int(request_id.removeprefix("r").split("-")[0])

    def script(request):
        body = [verb for _ in range(4) for verb in (Wait(1), Chunk((1,)))]
        if number(request.request_id) == victim:
            body[2 * step :] = {"error": [Error()], "die": [Die()], "stall": [Stall()]}.get(fault, body[2 * step :])
        return (*body, Finish())

    def bridge(context: BridgeContext) -> StageInput:
        if fault == "bridge" and number(context.request_id) == victim:
            raise ValueError("bad")
        return StageInput(token_ids=(1,))

    async def main():
        ends: Counter[int] = Counter()
        outcomes: dict[int, object] = {}

        async def ask(runtime, index):
            try:
                outcomes[index] = await runtime.generate([1], request_id=f"r{index}", deadline=500)
            except RequestError as error:
                outcomes[index] = error
            ends[index] += 1

        pipe = Pipeline([stage("a", final_output=True), stage("b", bridge=bridge), stage("c", bridge=bridge)])
        faulty = {at: SimStage(script=script)}
        sims = [faulty.get(index, SimStage(tokens=3, token_time=1)) for index in range(3)]
        async with simulated(pipe, *sims, on_engine_death="isolate") as runtime, trio.open_nursery() as nursery:
            for index in range(20):
                nursery.start_soon(ask, runtime, index)
        assert ends == dict.fromkeys(range(20), 1)
        failed = {index for index, outcome in outcomes.items() if isinstance(outcome, RequestError)}
        if fault == "die":  # all that the only replica had in hand, or that came to it later
            assert failed == set(range(20))
        elif fault == "bridge" and at == 0:
            assert failed == {victim}
        else:
            assert failed == {victim}
        kind = {"error": StageFailed, "bridge": BridgeFailed, "stall": DeadlineExceeded}.get(fault)
        if kind is not None:
            assert isinstance(outcomes[victim], kind)

    run(main)


def test_u2_a_stage_error_in_a_batch_call_is_counted():
    """U2: of three requests asked together one fails; the call returns, once, with all three."""

    async def main():
        sim = SimStage(script=lambda r: (Error("oh"),) if r.input.token_ids == (2,) else (Chunk((1,)), Finish()))
        results: dict[int, object] = {}

        async def ask(runtime, token):
            try:
                results[token] = await runtime.generate([token])
            except StageFailed as error:
                results[token] = error

        async with simulated(Pipeline([stage("ar"), stage("dit")]), sim) as runtime:
            async with trio.open_nursery() as nursery:
                for token in (1, 2, 3):
                    nursery.start_soon(ask, runtime, token)
            assert_empty(runtime)
        assert [type(results[token]) for token in (1, 2, 3)] == [Result, StageFailed, Result]
        assert results[2].stage_id == 0

    run(main)


def test_u3_the_error_path_leaves_nothing_behind():
    """U3, I5: a thousand failures at random stages; the number of live objects stays."""
    rng = random.Random(3)

    async def main():
        fails_at = [0]

        def script(stage_id):
            return lambda _: (Error(),) if fails_at[0] == stage_id else (Chunk((1,)), Finish())

        async with simulated(P3, *(SimStage(script=script(index)) for index in range(3))) as runtime:
            for round_ in range(1000):
                fails_at[0] = rng.randrange(3)
                with pytest.raises(StageFailed):
                    await runtime.generate([1])
                assert_empty(runtime)
                if round_ == 100:
                    gc.collect()
                    before = len(gc.get_objects())
            gc.collect()
            # Each SimStage notes what it was asked; nothing else may grow.
            for replica in runtime._orchestrator.replicas():
                replica.client._stage.log.clear()
            gc.collect()
            assert len(gc.get_objects()) < before + 500

    run(main)


def test_u4_an_abort_frees_what_a_stage_and_the_runtime_have_gathered():
    """U4: aborted between chunks again and again; every layer that is keyed by the request is empty."""

    async def main():
        vocoder = SimStage(script=lambda _: (*(Chunk((i,), data={"audio": [i]}) for i in range(5)), Stall()))
        async with simulated(P3, SimStage(tokens=1), SimStage(tokens=1), vocoder) as runtime:
            for _ in range(50):
                async with runtime.request([1]) as request:
                    async for event in request:
                        if event.stage == "vocoder":
                            break
                assert_empty(runtime)
                assert not request.task.mailbox._entries
            assert runtime.stats().aborted == 50

    run(main)


def test_u6_duplicate_empty_and_missing_request_ids():
    """U6: nobody hangs, nothing crosses, and no stage has seen a refused one."""

    async def main():
        sim = SimStage(script=lambda r: (Wait(1), Chunk(r.input.token_ids), Finish()))
        async with simulated(P1, sim) as runtime:
            async with runtime.request([1], request_id="x") as first:
                with pytest.raises(InvalidRequest, match="in flight"):
                    await runtime.generate([2], request_id="x")
                with pytest.raises(InvalidRequest, match="empty"):
                    await runtime.generate([2], request_id="")
                results: dict[int, tuple[int, ...]] = {}

                async def ask(token):
                    results[token] = (await runtime.generate([token]))["only"].token_ids

                async with trio.open_nursery() as nursery:
                    for token in range(10, 20):
                        nursery.start_soon(ask, token)
                assert results == {token: (token,) for token in range(10, 20)}
                assert (await first.result())["only"].token_ids == (1,)
        assert len({request_id for _, _, _, request_id in sim.log}) == len(sim.log) == 11

    run(main)


async def ask(runtime, caught):
    try:
        await runtime.generate([1], request_id="r")
    except RequestAborted as error:
        caught.append(error)


def test_u8_an_abort_is_a_terminal_and_carries_what_was_made_where_that_is_asked_for():
    """U8: text at the first stage, audio at the last; seven tokens have come, none has been read."""

    async def main():
        thinker = SimStage(script=lambda _: (*(Chunk((i,)) for i in range(7)), Stall()))
        async with simulated(P3, thinker) as runtime:
            for keep in (True, False):
                caught = []
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(ask, runtime, caught)
                    await trio.sleep(1)
                    assert await runtime.abort("r", keep_partial=keep) == ("r",)
                (error,) = caught
                assert error.request_id == "r"
                if keep:
                    assert error.partial["thinker"].token_ids == tuple(range(7))
                    assert error.partial["thinker"].finish_reason is None
                else:
                    assert error.partial is None
                assert_empty(runtime)

    run(main)


def test_u9_an_abort_returns_when_the_stage_has_acknowledged_it():
    """U9: with a late chunk, a slow abort, one that is over its budget, and one that raises."""

    async def main():
        slow = SimStage(script=lambda _: (LateChunk(), Stall()), abort_time=3.0)
        async with simulated(P1, slow) as runtime, trio.open_nursery() as nursery:

            async def ask():
                with pytest.raises(RequestAborted):
                    async with runtime.request([1], request_id="r") as request:
                        events.extend([event async for event in request])

            events = []
            nursery.start_soon(ask)
            await trio.sleep(1)
            await runtime.abort("r")
            assert trio.current_time() == 4
            assert_empty(runtime)
            await trio.sleep(10)
            assert events == []
        for options in ({"abort_time": math.inf}, {"abort_error": "no"}):
            bad = SimStage(script=lambda _: (Stall(),), **options)
            async with simulated(P1, bad, on_engine_death="isolate", abort_timeout=5.0) as runtime:
                async with trio.open_nursery() as nursery:

                    async def ask_too(runtime=runtime):
                        with pytest.raises(RequestAborted):
                            await runtime.generate([1], request_id="r")

                    nursery.start_soon(ask_too)
                    await trio.sleep(1)
                    with pytest.raises(EngineDied, match="abort") as caught:
                        await runtime.abort("r")
                    assert caught.value.stage == "only"
                assert runtime.health().replicas[0].state == "dead"
                assert not runtime._orchestrator.tasks

    run(main)


@pytest.mark.parametrize("seed", range(20))
def test_u10_aborts_at_any_moment_and_twice(seed):
    """U10: exactly one of completion and abort wins; a request that has ended is aborted at no stage."""
    rng = random.Random(seed)

    async def main():
        sim = SimStage(script=lambda _: (Wait(rng.choice((0, 1, 2))), Chunk((1,)), Finish()))
        ends: Counter[str] = Counter()
        async with simulated(P1, sim) as runtime, trio.open_nursery() as nursery:

            async def ask(name):
                await trio.sleep(rng.choice((0, 1)))
                try:
                    await runtime.generate([1], request_id=name)
                    ends[name + " finished"] += 1
                except RequestAborted:
                    ends[name + " aborted"] += 1

            async def abort(name):
                await trio.sleep(rng.choice((0, 1, 2, 3)))
                if await runtime.abort([name, "never was"]):
                    ends[name + " abort won"] += 1

            for index in range(6):
                nursery.start_soon(ask, f"r{index}")
                nursery.start_soon(abort, f"r{index}")
                nursery.start_soon(abort, f"r{index}")
        for index in range(6):
            assert ends[f"r{index} finished"] + ends[f"r{index} aborted"] == 1
            assert ends[f"r{index} abort won"] == ends[f"r{index} aborted"]
        aborted = [request_id for what, _, _, *ids in sim.log if what == "abort" for request_id in ids]
        assert len(aborted) == sum(count for name, count in ends.items() if name.endswith(" aborted"))

    run(main)


def test_u11_an_abort_storm_leaves_every_slot_free():
    """U11: capacity 8; fifty callers leave after a chunk, then a request completes."""

    async def main():
        storm = SimStage(
            script=lambda r: (Chunk((1,)), Stall()) if r.input.token_ids == (1,) else (Finish(),), capacity=8
        )
        async with simulated(P1, storm) as runtime:
            for _ in range(50):
                async with runtime.request([1]) as request:
                    await request.__anext__()
                assert runtime.stats().stages[0].replicas[0].requests == 0
            await runtime.generate([2])
            assert_empty(runtime)

    run(main)


def test_u12_an_abort_is_the_business_of_one_request():
    """U12: the third of ten is aborted; the others and a hundred later ones finish."""

    async def main():
        async with simulated(P3, SimStage(tokens=3, token_time=1)) as runtime:
            outcomes: Counter[str] = Counter()

            async def ask(name):
                try:
                    await runtime.generate([1], request_id=name)
                    outcomes["finished"] += 1
                except RequestAborted:
                    outcomes["aborted"] += 1

            async with trio.open_nursery() as nursery:
                for index in range(10):
                    nursery.start_soon(ask, f"r{index}")
                await trio.sleep(1)
                await runtime.abort("r3")
            for index in range(100):
                await ask(f"later{index}")
            assert outcomes == {"finished": 109, "aborted": 1}

    run(main)


def test_u16_counts_are_right_at_every_step():
    """U16, I11: capacity 1, ten asked, five cancelled while they queue, then the running one aborted."""

    async def main():
        sim = SimStage(script=lambda _: (Wait(10), Finish()), capacity=1)
        async with simulated(P1, sim) as runtime, trio.open_nursery() as nursery:
            scopes = [trio.CancelScope() for _ in range(10)]

            async def ask(index):
                with scopes[index]:
                    try:
                        await runtime.generate([1], request_id=f"r{index}")
                    except RequestAborted:
                        pass

            def counts():
                stats = runtime.stats()
                client = stats.stages[0].replicas[0].client
                return stats.in_flight, client.running, client.waiting, stats.aborted, stats.finished

            for index in range(10):
                nursery.start_soon(ask, index)
                await trio.testing.wait_all_tasks_blocked()
            assert counts() == (10, 1, 9, 0, 0)
            for index in range(5, 10):
                scopes[index].cancel()
            await trio.testing.wait_all_tasks_blocked()
            assert counts() == (5, 1, 4, 5, 0)
            await trio.sleep(11)
            assert counts() == (4, 1, 3, 5, 1)
            await runtime.abort("r1")
            await trio.testing.wait_all_tasks_blocked()
            assert counts() == (3, 1, 2, 6, 1)

    run(main)


def test_u29_a_bridge_that_fails_for_one_fails_that_one_only():
    """U29, W-9: in the middle of a batch of eight."""

    def bridge(context: BridgeContext) -> StageInput:
        if context.request_id == "r7":
            raise ValueError("poison")
        return StageInput(token_ids=(1,))

    async def main():
        pipe = Pipeline([stage("a"), stage("b", bridge=bridge)])
        outcomes = {}
        async with simulated(pipe) as runtime, trio.open_nursery() as nursery:

            async def ask(name):
                try:
                    outcomes[name] = await runtime.generate([1], request_id=name)
                except BridgeFailed as error:
                    outcomes[name] = error

            for index in range(8):
                nursery.start_soon(ask, f"r{index}")
        failed = [name for name, outcome in outcomes.items() if isinstance(outcome, BridgeFailed)]
        assert failed == ["r7"]
        assert outcomes["r7"].stage == "b"
        assert "poison" in str(outcomes["r7"])

    run(main)


def test_u38_several_missing_hand_offs_share_one_deadline():
    """U38: three companions that never come cost one wait, not three."""

    def expand(context):
        return [Companion(role=f"c{index}", input=context.prompt) for index in range(3)]

    async def main():
        ar = SimStage(script=lambda r: (Stall(),) if ".c" in r.request_id else (Finish(),))
        pipe = Pipeline([stage("ar"), stage("dit", bridge="original_prompt")], expand=expand, bundle_timeout=32.0)
        async with simulated(pipe, ar) as runtime:
            with pytest.raises(DeadlineExceeded, match="'c0', 'c1', 'c2'"):
                await runtime.generate([1])
            assert trio.current_time() == 32

    run(main)


def test_u47_u48_each_output_keeps_its_reason_and_the_stream_ends_at_the_last_one():
    """U47, U48: text ends by length at once, audio by stop later; only the last event is the end."""

    async def main():
        thinker = SimStage(script=lambda _: (Chunk((1,)), Finish("length")))
        vocoder = SimStage(script=lambda _: (Wait(8), Chunk((2,)), Finish("stop")))
        async with simulated(P3, thinker, SimStage(tokens=1), vocoder) as runtime:
            async with runtime.request([1]) as request:
                events = [(trio.current_time(), e) async for e in request if isinstance(e, Output)]
            assert [(t, e.stage, e.finish_reason) for t, e in events if e.finished] == [
                (0, "thinker", "length"),
                (8, "vocoder", "stop"),
            ]
            assert all(e.finish_reason is None for _, e in events if not e.finished)
            result = await runtime.generate([1])
            assert result.finish_reason == "length"
            assert {name: out.finish_reason for name, out in result.outputs.items()} == {
                "thinker": "length",
                "vocoder": "stop",
            }

    run(main)


def test_u51_outputs_are_taken_from_the_replica_that_has_the_request_only():
    """U51, I10: an output of another replica is dropped and counted."""

    async def main():
        pipe = Pipeline([stage("a", replicas=4)])
        sim = SimStage(script=lambda _: (Wait(2), Chunk((1,)), Finish()))
        async with simulated(pipe, sim) as runtime:
            async with runtime.request([1]) as request:
                owner, internal = sim.log[0][2], sim.log[0][3]
                for replica in runtime._orchestrator.pools[0].replicas:
                    if replica.replica_id != owner:
                        replica.client._put(StageOutput(request_id=internal, token_ids=(66,), finish_reason="stop"))
                events = [e async for e in request]
            assert [t for e in events for t in e.token_ids] == [1]
            strays = [replica.stray_outputs for replica in runtime.stats().stages[0].replicas]
            assert strays == [0 if index == owner else 1 for index in range(4)]

    run(main)
