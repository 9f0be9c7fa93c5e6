"""The runtime over simulated stages: what a request goes through when nothing dies."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest
import trio
import trio.testing

from omni_trio.bridges import BridgeContext, bridge
from omni_trio.errors import (
    BridgeFailed,
    DeadlineExceeded,
    EngineDied,
    InvalidRequest,
    Overloaded,
    RequestAborted,
    ShutDown,
    StageFailed,
)
from omni_trio.messages import Output, StageInput, StageMetrics
from omni_trio.pipeline import Pipeline
from omni_trio.testing import (
    Chunk,
    Error,
    Finish,
    FinishSilently,
    LateChunk,
    Reject,
    SimStage,
    Stall,
    Wait,
    tokens,
)
from support import P1, P3, assert_empty, run, simulated, stage


async def collect(request) -> list:
    return [event async for event in request]


# ---- the plain way


def test_outputs_of_all_final_stages_come_and_the_metrics_of_the_others():
    async def main():
        async with simulated(P3, SimStage(tokens=3, token_time=1)) as runtime:
            async with runtime.request("one two") as request:
                events = await collect(request)
            assert_empty(runtime)
        texts = Counter()
        for event in events:
            if isinstance(event, Output):
                texts[event.stage] += len(event.token_ids)
        assert texts == {"thinker": 3, "vocoder": 8}
        assert [event.stage for event in events if isinstance(event, StageMetrics)] == ["talker"]
        last = [event for event in events if isinstance(event, Output) and event.finished]
        assert [event.stage for event in last] == ["thinker", "vocoder"]
        assert last[0].metrics.stage_gen_time_ms == 3000
        assert last[0].metrics.num_tokens_out == 3
        assert last[0].metrics.time_to_first_output_ms == 1000
        assert last[0].metrics.inter_output_latency_ms == 1000

    run(main)


def test_generate_returns_everything():
    async def main():
        async with simulated(P3, SimStage(tokens=2)) as runtime:
            result = await runtime.generate("one two three", request_id="mine")
            assert result.request_id == "mine"
            assert list(result.outputs) == ["thinker", "vocoder"]
            assert result["thinker"].token_ids == (3, 4)
            assert result.text == "w3 w4 "
            assert result.finish_reason == "length"
            assert [metrics.stage for metrics in result.metrics] == ["thinker", "talker", "vocoder"]
            assert runtime.stats().finished == 1

    run(main)


def test_streaming_and_waiting_for_the_result_are_the_same():
    async def main():
        async with simulated(P3, SimStage(tokens=5, token_time=0.5), SimStage(token_time=0.1)) as runtime:
            whole = await runtime.generate("a b c")
            async with runtime.request("a b c") as request:
                parts = [event for event in await collect(request) if isinstance(event, Output)]
        for name, output in whole.outputs.items():
            assert "".join(part.text for part in parts if part.stage == name) == output.text
            assert tuple(t for part in parts if part.stage == name for t in part.token_ids) == output.token_ids

    run(main)


def test_many_requests_at_once_each_get_their_own():
    async def main():
        results = {}
        async with simulated(P3, SimStage(tokens=4, token_time=0.1, capacity=3)) as runtime:

            async def one(size):
                results[size] = await runtime.generate("x " * size)

            async with trio.open_nursery() as nursery:
                for size in range(1, 51):
                    nursery.start_soon(one, size)
            assert_empty(runtime)
        assert {size: result["thinker"].token_ids[0] for size, result in results.items()} == {
            size: size for size in range(1, 51)
        }

    run(main)


def test_replicas_share_the_work_by_what_they_have_in_hand():
    async def main():
        pipeline = Pipeline([stage("only", replicas=3)])
        sim = SimStage(script=lambda request: (Wait(float(request.input.text)), Finish()))
        async with simulated(pipeline, sim) as runtime, trio.open_nursery() as nursery:
            for seconds in ("10", "1", "1", "1", "1", "1"):
                nursery.start_soon(runtime.generate, seconds)
                await trio.sleep(1.25)
        assert [entry[2] for entry in sim.log if entry[0] == "submit"] == [0, 1, 2, 1, 2, 1]

    run(main)


def test_branches_of_a_pipeline_run_side_by_side():
    async def main():
        pipeline = Pipeline([stage("a"), stage("b", source="a"), stage("c", source="a")])
        async with simulated(pipeline, SimStage(), SimStage(token_time=1), SimStage(token_time=1)) as runtime:
            start = trio.current_time()
            result = await runtime.generate("x")
            assert trio.current_time() - start == 8
        assert list(result.outputs) == ["b", "c"]

    run(main)


def test_final_stage_ends_the_request_there_and_touches_no_later_stage():
    async def main():
        sim = SimStage()
        async with simulated(P3, sim, sim, sim) as runtime:
            result = await runtime.generate("x", final_stage="talker")
        assert list(result.outputs) == ["thinker", "talker"]
        assert {entry[1] for entry in sim.log} == {"thinker", "talker"}

    run(main)


def test_a_stage_that_ends_without_any_output_still_ends_the_request():
    async def main():
        silent = SimStage(script=lambda _: (FinishSilently("stop"),))
        async with simulated(P1, silent) as runtime:
            result = await runtime.generate("x")
        assert result["only"].text == ""
        assert result.finish_reason == "stop"

    run(main)


def test_a_slow_consumer_gets_fewer_larger_deltas_and_delays_nobody():
    async def main():
        async with simulated(P1, SimStage(tokens=100, token_time=0.1)) as runtime, trio.open_nursery() as nursery:
            took = []

            async def quick():
                start = trio.current_time()
                await runtime.generate("x")
                took.append(trio.current_time() - start)

            async with runtime.request("x") as slow:
                nursery.start_soon(quick)
                events = []
                async for event in slow:
                    events.append(event)
                    await trio.sleep(3)
            assert took[0] == pytest.approx(10)
            assert len(events) < 10
            assert [t for event in events for t in event.token_ids] == list(range(1, 101))

    run(main)


# ---- streaming between stages


@bridge(reads=["tokens"])
def in_pairs(context: BridgeContext) -> StageInput | None:
    sent = context.state.get("sent", 0)
    end = len(context.token_ids) if context.finished else len(context.token_ids) // 2 * 2
    if end == sent:
        return None
    context.state["sent"] = end
    return StageInput(token_ids=tuple(context.token_ids[sent:end]))


def test_a_streaming_edge_hands_pieces_on_as_they_come():
    async def main():
        pipeline = Pipeline([stage("a"), stage("b", feed="output", bridge=in_pairs)])
        inputs = []

        def echo(request):
            inputs.append((trio.current_time(), request.input.token_ids, request.last))
            return (Chunk(request.input.token_ids or ()), Finish())

        async with simulated(pipeline, SimStage(tokens=5, token_time=1), SimStage(script=echo)) as runtime:
            result = await runtime.generate("x")
            assert_empty(runtime)
        assert inputs == [(2.0, (1, 2), False), (4.0, (3, 4), False), (5.0, (5,), True)]
        assert result["b"].token_ids == (1, 2, 3, 4, 5)

    run(main)


def test_an_edge_that_streams_makes_the_same_of_it_as_one_that_does_not():
    async def outputs(*, feed):
        pipeline = Pipeline([stage("a"), stage("b", feed=feed, bridge=in_pairs)])

        def echo(request):
            return (Chunk(request.input.token_ids or ()), Finish())

        async with simulated(pipeline, SimStage(tokens=7, token_time=1), SimStage(script=echo)) as runtime:
            return (await runtime.generate("x"))["b"].token_ids

    assert run(lambda: outputs(feed="output")) == run(lambda: outputs(feed="finish"))


def test_a_stage_that_has_enough_before_its_input_is_complete_may_end_early():
    async def main():
        pipeline = Pipeline([stage("a", final_output=True), stage("b", feed="output")])
        early = SimStage(script=lambda _: (Chunk((7,)), FinishSilently("enough")))
        async with simulated(pipeline, SimStage(tokens=5, token_time=1), early) as runtime:
            result = await runtime.generate("x")
            assert_empty(runtime)
        assert result["a"].token_ids == (1, 2, 3, 4, 5)
        assert result["b"].token_ids == (7,)
        assert result["b"].finish_reason == "enough"
        assert [entry[0] for entry in early.log] == ["submit"]

    run(main)


# ---- bad input: a clear error at the door, nobody else affected


@pytest.mark.parametrize(
    ("prompt", "options", "message"),
    [
        ("", {}, "empty"),
        ([], {}, "empty"),
        (StageInput(), {}, "empty"),
        ([1, -1], {}, "-1"),
        ([1, True], {}, "True"),
        (b"bytes", {}, "bytes"),
        (17, {}, "int"),
        ("x", {"request_id": ""}, "empty"),
        ("x", {"request_id": 7}, "string"),
        ("x", {"final_stage": "vocodr"}, "did you mean 'vocoder'"),
        ("x", {"final_stage": 3}, "no stage 3"),
        ("x", {"priority": "high"}, "priority"),
        ("x", {"sampling_params": {"thinkr": {}}}, "did you mean 'thinker'"),
        ("x", {"sampling_params": {"thinker": {}, "nope": {}}}, "nope"),
        ("x", {"sampling_params": {"temprature": 1}}, "did you mean 'temperature'"),
        ("x", {"sampling_params": {"talker": {"max_tokens": 0}}}, "max_tokens"),
        ("x", {"sampling_params": [{}, {}]}, "one entry per stage"),
        ("x", {"sampling_params": 5}, "mapping"),
        ("one two three four", {}, "4 tokens"),
    ],
)
def test_bad_input(prompt, options, message):
    async def main():
        sims = [SimStage(max_prompt_tokens=3, token_time=1), SimStage(), SimStage()]
        async with simulated(P3, *sims) as runtime, trio.open_nursery() as nursery:
            nursery.start_soon(runtime.generate, "fine")
            await trio.sleep(1.5)
            before = [list(sim.log) for sim in sims[1:]]
            with pytest.raises(InvalidRequest, match=message):
                async with runtime.request(prompt, **options):
                    pytest.fail("it must not get past the door")
            assert [sim.log for sim in sims[1:]] == before
            assert runtime.stats().rejected == 1
            assert runtime.stats().in_flight == 1
        assert runtime.stats().finished == 1

    run(main)


@pytest.mark.parametrize("deadline", [0, -1, math.nan])
def test_bad_deadlines(deadline):
    async def main():
        async with simulated(P1) as runtime:
            with pytest.raises(InvalidRequest, match="deadline"):
                await runtime.generate("x", deadline=deadline)

    run(main)


def test_sampling_params_for_the_first_stage_or_by_name_or_in_order():
    async def main():
        async with simulated(P3) as runtime:
            for params in ({"max_tokens": 2}, {"thinker": {"max_tokens": 2}}, [{"max_tokens": 2}, None, None]):
                result = await runtime.generate("x", sampling_params=params)
                assert len(result["thinker"].token_ids) == 2
                assert len(result["vocoder"].token_ids) == 8

    run(main)


def test_an_id_in_flight_is_refused_and_free_again_afterwards():
    async def main():
        async with simulated(P1, SimStage(token_time=1)) as runtime:
            async with runtime.request("x", request_id="same") as request:
                with pytest.raises(InvalidRequest, match="in flight") as caught:
                    await runtime.generate("y", request_id="same")
                assert caught.value.request_id == "same"
                assert (await request.result()).text
            assert (await runtime.generate("y", request_id="same")).text

    run(main)


def test_ids_are_made_up_where_left_out():
    async def main():
        async with simulated(P1) as runtime:
            assert len({(await runtime.generate("x")).request_id for _ in range(5)}) == 5

    run(main)


def test_a_limit_on_what_is_in_flight_is_told_at_once():
    async def main():
        sim = SimStage(token_time=1)
        async with simulated(P1, sim, max_in_flight=2) as runtime, trio.open_nursery() as nursery:
            nursery.start_soon(runtime.generate, "a")
            nursery.start_soon(runtime.generate, "b")
            await trio.sleep(0.5)
            with pytest.raises(Overloaded, match="2 requests"):
                await runtime.generate("c")
            assert len([entry for entry in sim.log if entry[0] == "submit"]) == 2

    run(main)


def test_a_stage_that_refuses_the_request_at_the_door():
    async def main():
        async with simulated(P1, SimStage(script=lambda _: (Reject("too spicy"),))) as runtime:
            with pytest.raises(InvalidRequest, match="too spicy") as caught:
                await runtime.generate("x", request_id="mine")
            assert (caught.value.request_id, caught.value.stage, caught.value.replica_id) == ("mine", "only", 0)
            assert_empty(runtime)

    run(main)


def test_a_later_stage_that_refuses_fails_the_request():
    async def main():
        async with simulated(P3, SimStage(), SimStage(script=lambda _: (Reject("no"),))) as runtime:
            with pytest.raises(InvalidRequest, match="no") as caught:
                await runtime.generate("x")
            assert caught.value.stage == "talker"
            assert_empty(runtime)
            assert runtime.stats().failed == 1

    run(main)


# ---- errors of bridges and stages fail one request only


def failing_bridge(context: BridgeContext) -> StageInput | None:
    if context.prompt.text == "raise":
        raise ValueError("no such phoneme")
    if context.prompt.text == "nothing":
        return None
    if context.prompt.text == "nonsense":
        return "not an input"  # type: ignore[return-value]
    return StageInput(token_ids=(1,))


@pytest.mark.parametrize(
    ("prompt", "message"),
    [("raise", "no such phoneme"), ("nothing", "returned nothing"), ("nonsense", "returned str")],
)
@pytest.mark.parametrize("run_in", ["inline", "thread"])
def test_a_bridge_that_fails(prompt, message, run_in):
    async def main():
        marked = bridge(run_in=run_in)(lambda context: failing_bridge(context))
        pipeline = Pipeline([stage("a"), stage("b", bridge=marked)])
        outcomes = {}

        async def one(runtime, index, text):
            try:
                outcomes[index] = await runtime.generate(text)
            except BridgeFailed as error:
                outcomes[index] = error

        async with simulated(pipeline) as runtime:
            async with trio.open_nursery() as nursery:
                for index, text in enumerate(["ok", prompt, "ok", "ok"]):
                    nursery.start_soon(one, runtime, index, text)
            assert_empty(runtime)
        error = outcomes.pop(1)
        assert isinstance(error, BridgeFailed)
        assert message in str(error)
        assert error.stage == "b"
        assert all(outcome.outputs for outcome in outcomes.values())

    trio.run(main)  # a real clock: virtual time does not wait for threads


def test_an_error_of_a_stage_fails_that_request_with_the_cause_and_tells_the_other_stages():
    async def main():
        def script(request):
            return (Wait(1), Error("out of luck")) if request.input.token_ids == (9,) else tokens(3)

        pipeline = Pipeline([stage("a"), stage("b", feed="output", bridge="output")])
        source = SimStage(script=lambda r: (Chunk(r.input.token_ids), Wait(5), Finish()))
        async with simulated(pipeline, source, SimStage(script=script)) as runtime, trio.open_nursery() as nursery:
            nursery.start_soon(runtime.generate, [4])
            with pytest.raises(StageFailed, match="out of luck") as caught:
                await runtime.generate([9], request_id="bad")
            assert trio.current_time() == 1
            assert (caught.value.stage, caught.value.replica_id) == ("b", 0)
            (abort,) = [entry for entry in source.log if entry[0] == "abort"]
            assert abort[3].startswith("bad-")

    run(main)


def test_a_client_that_raises_something_of_its_own_fails_that_request():
    async def main():
        def script(request):
            if request.input.text == "bad":
                raise ZeroDivisionError("bug in the stage")
            return tokens(2)

        async with simulated(P1, SimStage(script=script)) as runtime:
            with pytest.raises(StageFailed, match="ZeroDivisionError: bug in the stage"):
                await runtime.generate("bad")
            assert (await runtime.generate("good")).text
            assert_empty(runtime)

    run(main)


# ---- leaving, aborting, deadlines


def test_leaving_the_block_frees_the_request_everywhere_before_it_returns():
    async def main():
        sim = SimStage(tokens=100, token_time=1, abort_time=3)
        async with simulated(P1, sim) as runtime:
            async with runtime.request("x") as request:
                async for _ in request:
                    break
                assert runtime.stats().stages[0].replicas[0].client.running == 1
                left = trio.current_time()
            assert trio.current_time() - left == 3
            assert runtime.stats().stages[0].replicas[0].client.running == 0
            assert_empty(runtime)
            assert runtime.stats().aborted == 1

    run(main)


def test_a_caller_that_is_cancelled_leaves_nothing_behind():
    async def main():
        async with simulated(P3, SimStage(token_time=1)) as runtime:
            for moment in (0.5, 4.5, 9.0, 100.0):
                with trio.move_on_after(moment):
                    await runtime.generate("x")
                assert_empty(runtime)

    run(main)


def test_a_caller_that_is_cancelled_at_the_door_leaves_nothing_behind():
    async def main():
        async with simulated(P1, SimStage(submit_time=5)) as runtime:
            with trio.move_on_after(1):
                await runtime.generate("x")
            assert trio.current_time() == 1
            assert_empty(runtime)

    run(main)


def test_abort_tells_the_consumer_and_returns_when_every_stage_has_let_go():
    async def main():
        sim = SimStage(script=lambda _: (LateChunk((99,)), Chunk((1,)), Wait(50), Finish()), abort_time=3)
        async with simulated(P1, sim) as runtime, trio.open_nursery() as nursery:
            seen = []

            async def consume():
                async with runtime.request("x", request_id="r") as request:
                    with pytest.raises(RequestAborted) as caught:
                        async for event in request:
                            seen.append(event)
                    assert caught.value.request_id == "r"

            nursery.start_soon(consume)
            await trio.sleep(1)
            assert await runtime.abort("r") == ("r",)
            assert trio.current_time() == 4
            assert_empty(runtime)
            assert [t for event in seen for t in event.token_ids] == [1]
            assert runtime.stats().stages[0].replicas[0].stray_outputs == 1

    run(main)


def test_after_an_abort_a_slow_consumer_gets_nothing_of_what_had_been_waiting_for_it():
    async def main():
        async with simulated(P1, SimStage(tokens=100, token_time=1)) as runtime, trio.open_nursery() as nursery:
            seen = []

            async def consume():
                async with runtime.request("x", request_id="r") as request:
                    with pytest.raises(RequestAborted):
                        async for event in request:
                            seen.append(event)
                            await trio.sleep(10)

            nursery.start_soon(consume)
            await trio.sleep(5.5)
            await runtime.abort("r")
            await trio.sleep(100)
            assert [t for event in seen for t in event.token_ids] == [1]

    run(main)


def test_abort_of_what_is_over_or_never_was_is_harmless_and_reaches_no_stage():
    async def main():
        sim = SimStage()
        async with simulated(P1, sim) as runtime:
            await runtime.generate("x", request_id="r")
            assert await runtime.abort(["r", "never"]) == ()
            assert not [entry for entry in sim.log if entry[0] == "abort"]

    run(main)


def test_twice_aborted_is_aborted_once():
    async def main():
        sim = SimStage(token_time=1, abort_time=2)
        async with simulated(P1, sim) as runtime, trio.open_nursery() as nursery:

            async def consume():
                with pytest.raises(RequestAborted):
                    await runtime.generate("x", request_id="r")

            nursery.start_soon(consume)
            await trio.sleep(0.5)
            nursery.start_soon(runtime.abort, "r")
            await trio.sleep(0.5)
            assert await runtime.abort("r") == ()
            assert trio.current_time() == 2.5
            assert len([entry for entry in sim.log if entry[0] == "abort"]) == 1

    run(main)


def test_an_abort_storm_frees_every_slot():
    async def main():
        sim = SimStage(script=lambda _: (Chunk((1,)), Wait(100), Finish()), capacity=8)
        async with simulated(P1, sim) as runtime:
            for _ in range(200):
                async with runtime.request("x") as request:
                    async for _ in request:
                        break
            with trio.fail_after(101):
                await runtime.generate("x")
            assert_empty(runtime)

    run(main)


def test_abort_that_is_not_acknowledged_is_an_error_and_the_replica_counts_as_dead():
    async def main():
        async with simulated(
            P1, SimStage(tokens=100, token_time=1, abort_time=math.inf), on_engine_death="isolate", abort_timeout=7
        ) as runtime:
            async with trio.open_nursery() as nursery:

                async def consume():
                    with pytest.raises(RequestAborted):
                        await runtime.generate("x", request_id="r")

                nursery.start_soon(consume)
                await trio.sleep(1)
                with pytest.raises(EngineDied, match="did not acknowledge an abort within 7 s") as caught:
                    await runtime.abort("r")
                assert trio.current_time() == 8
                assert caught.value.stage == "only"
            assert runtime.health().status == "dead"
            assert_empty_tables(runtime)

    run(main)


def assert_empty_tables(runtime):
    assert not runtime._orchestrator.tasks
    assert all(not replica.legs and replica.load == 0 for replica in runtime._orchestrator.replicas())


def test_abort_that_raises_is_never_silently_done():
    async def main():
        sim = SimStage(tokens=100, token_time=1, abort_error="can not")
        async with simulated(P1, sim, on_engine_death="isolate") as runtime:
            async with trio.open_nursery() as nursery:

                async def consume():
                    with pytest.raises(RequestAborted):
                        await runtime.generate("x", request_id="r")

                nursery.start_soon(consume)
                await trio.sleep(1)
                with pytest.raises(EngineDied, match="its abort raised StageFailed: can not"):
                    await runtime.abort("r")

    run(main)


@pytest.mark.parametrize("deadline", [0.5, 5, 12, 20])
def test_a_deadline_ends_the_request_wherever_it_is_and_tells_the_stages(deadline):
    async def main():
        sims = [SimStage(token_time=1), SimStage(token_time=1), SimStage(script=lambda _: (Stall(),))]
        async with simulated(P3, *sims) as runtime:
            with pytest.raises(DeadlineExceeded) as caught:
                await runtime.generate("x", deadline=deadline)
            assert trio.current_time() == deadline
            assert caught.value.request_id
            assert_empty(runtime)
            assert runtime.stats().expired == 1

    run(main)


def test_a_deadline_ends_the_request_even_while_its_consumer_does_something_else():
    async def main():
        sim = SimStage(script=lambda _: (Stall(),))
        async with simulated(P1, sim) as runtime:
            async with runtime.request("x", deadline=5) as request:
                await trio.sleep(6)
                assert_empty(runtime)
                with pytest.raises(DeadlineExceeded):
                    await request.result()

    run(main)


def test_a_deadline_that_passes_inside_a_submit_ends_it_there():
    async def main():
        pipeline = Pipeline([stage("a"), stage("b")])
        async with simulated(pipeline, SimStage(), SimStage(submit_time=100)) as runtime:
            with pytest.raises(DeadlineExceeded):
                await runtime.generate("x", deadline=5)
            assert trio.current_time() == 5
            assert_empty(runtime)

    run(main)


def test_a_slow_submit_of_one_request_delays_no_other():
    async def main():
        pipeline = Pipeline([stage("a"), stage("b", replicas=2)])
        slow = SimStage(submit_time=100)
        async with simulated(pipeline, SimStage(), slow) as runtime, trio.open_nursery() as nursery:
            nursery.start_soon(runtime.generate, "x")
            await trio.sleep(1)
            start = trio.current_time()
            await runtime.generate("y", final_stage="a")
            assert trio.current_time() == start

    run(main)


# ---- handles


def test_a_request_is_entered_once():
    async def main():
        async with simulated(P1) as runtime:
            request = runtime.request("x")
            with pytest.raises(RuntimeError, match="not open"):
                await request.result()
            async with request:
                pass
            with pytest.raises(RuntimeError, match="once"):
                async with request:
                    pass

    run(main)


def test_iterating_on_after_the_end_ends():
    async def main():
        async with simulated(P1) as runtime, runtime.request("x") as request:
            assert await collect(request)
            assert await collect(request) == []

    run(main)


def test_result_after_some_events_gives_the_rest():
    async def main():
        async with simulated(P1, SimStage(token_time=1)) as runtime, runtime.request("x") as request:
            async for event in request:
                first = event
                break
            rest = await request.result()
            assert (*first.token_ids, *rest["only"].token_ids) == tuple(range(1, 9))

    run(main)


def test_a_closed_runtime_takes_no_requests():
    async def main():
        async with simulated(P1) as runtime:
            pass
        with pytest.raises(ShutDown):
            await runtime.generate("x")

    run(main)


# ---- rpc, statistics, health


def test_collective_rpc_asks_all_at_the_same_time_and_labels_each_answer():
    async def main():
        pipeline = Pipeline([stage("a", replicas=2), stage("b")])
        async with simulated(pipeline) as runtime:
            answers = await runtime.collective_rpc("echo", (1, 2))
            assert [(a.stage, a.replica_id, a.result) for a in answers] == [
                ("a", 0, [1, 2]),
                ("a", 1, [1, 2]),
                ("b", 0, [1, 2]),
            ]
            start = trio.current_time()
            await runtime.collective_rpc("wait", (5,), stages=["a"])
            assert trio.current_time() - start == 5
            late, missing = await runtime.collective_rpc("wait", (50,), timeout=3, stages=["a"])
            assert "within 3 s" in str(late.error)
            assert isinstance(missing.error, StageFailed)
            (unknown,) = await runtime.collective_rpc("nonsense", stages=["b"])
            assert "nonsense" in str(unknown.error)
            with pytest.raises(InvalidRequest, match="did you mean"):
                await runtime.collective_rpc("echo", stages=["bb"])

    run(main)


def test_statistics_equal_what_is():
    async def main():
        sim = SimStage(token_time=1, capacity=1)
        async with simulated(P1, sim) as runtime, trio.open_nursery() as nursery:
            for index in range(4):
                nursery.start_soon(swallow, runtime, f"r{index}")
            await trio.sleep(0.5)
            stats = runtime.stats()
            (replica,) = stats.stages[0].replicas
            assert (stats.in_flight, stats.admitted, replica.requests) == (4, 4, 4)
            assert (replica.client.running, replica.client.waiting) == (1, 3)
            await runtime.abort(["r2", "r3"])
            stats = runtime.stats()
            (replica,) = stats.stages[0].replicas
            assert (stats.in_flight, stats.aborted, replica.requests) == (2, 2, 2)
            assert (replica.client.running, replica.client.waiting) == (1, 1)
            await trio.sleep(20)
            stats = runtime.stats()
            assert (stats.in_flight, stats.finished, stats.aborted, stats.admitted) == (0, 2, 2, 4)
            assert runtime.health().status == "ok"

    run(main)


async def swallow(runtime, request_id):
    with trio.CancelScope():
        try:
            await runtime.generate("x", request_id=request_id)
        except RequestAborted:
            pass


# ---- what bridges are told


def test_what_a_bridge_is_told():
    seen = []

    def look(context: BridgeContext) -> StageInput:
        seen.append(context)
        return StageInput(token_ids=(1,))

    async def main():
        pipeline = Pipeline([stage("a"), stage("b", bridge=look, requires_multimodal_data=True)])
        script = (Chunk((1,), "one ", {"x": np.ones(2)}), Chunk((2,), "two", {"x": np.zeros(1)}), Finish("stop"))
        prompt = StageInput(text="hello", data={"image": 1})
        async with simulated(pipeline, SimStage(script=lambda _: script)) as runtime:
            await runtime.generate(prompt, request_id="r")
        (context,) = seen
        assert context.request_id == "r"
        assert context.prompt is prompt
        assert (context.source, context.stage) == ("a", "b")
        assert list(context.token_ids) == [1, 2]
        assert context.text == "one two"
        assert context.data["x"].tolist() == [1, 1, 0]
        assert context.finished
        assert context.finish_reason == "stop"
        assert context.requires_multimodal_data

    run(main)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("tokens", StageInput(token_ids=(1, 2))),
        ("text", StageInput(text="one two")),
        ("original_prompt", StageInput(text="hello")),
        ("output", StageInput(token_ids=(1, 2), text="one two", data={"k": 5})),
    ],
)
def test_built_in_bridges(name, expected):
    got = []

    def script(request):
        got.append(request.input)
        return (Finish(),)

    async def main():
        pipeline = Pipeline([stage("a"), stage("b", bridge=name)])
        first = (Chunk((1,), "one "), Chunk((2,), "two", {"k": 5}), Finish())
        async with simulated(pipeline, SimStage(script=lambda _: first), SimStage(script=script)) as runtime:
            await runtime.generate("hello")
        assert got == [expected]

    run(main)
