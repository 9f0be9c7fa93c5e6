"""Sessions: input in segments, the closing update, late updates, barge-in. Over simulated stages, on virtual time."""

from __future__ import annotations

import pytest
import trio

from omni_trio.bridges import BridgeContext, bridge
from omni_trio.errors import (
    BridgeFailed,
    DeadlineExceeded,
    InvalidRequest,
    RequestAborted,
    SessionClosed,
    ShutDown,
    StageFailed,
)
from omni_trio.messages import Output, StageInput, StageOutput
from omni_trio.pipeline import Pipeline, StageSpec
from omni_trio.testing import Chunk, Error, Finish, LateChunk, SimStage, Stall, Wait
from support import P1, P3, assert_empty, run, simulated, stage


def echo(request):
    """Answers a segment with its own tokens, one by one, and closes without a word."""
    return (*(Chunk((token,)) for token in request.input.token_ids or ()), Finish())


def slow_echo(request):
    return (*(verb for token in request.input.token_ids or () for verb in (Wait(1.0), Chunk((token,)))), Finish())


def by_segment(events):
    """All tokens of each segment."""
    tokens = {}
    for event in events:
        if event.token_ids:
            tokens[event.segment] = tokens.get(event.segment, ()) + tuple(event.token_ids)
    return tokens


def of(stage_name, events):
    return [event for event in events if isinstance(event, Output) and event.stage == stage_name]


async def collect(stream):
    return [event async for event in stream]


def test_segments_are_answered_in_order_and_the_session_ends_when_it_is_closed():
    async def main():
        async with simulated(P1, SimStage(script=echo)) as runtime:
            async with runtime.open_stream(request_id="s") as stream:
                assert stream.id == "s"
                await stream.send([1, 2])
                await stream.send([3])
                await stream.aclose()
                events = await collect(stream)
            assert_empty(runtime)
        assert [t for e in events for t in e.token_ids] == [1, 2, 3]
        assert [(e.segment, e.segment_end) for e in events if e.token_ids] == [(0, True), (1, True)]
        assert [e.finished for e in events] == [False] * (len(events) - 1) + [True]
        assert {e.turn for e in events} == {0}

    run(main)


def test_the_stage_sees_the_session_as_new_once_then_updates_then_the_closing_update():
    requests = []

    def note(request):
        requests.append(request)
        return echo(request)

    async def main():
        sim = SimStage(script=note)
        async with simulated(P1, sim) as runtime, runtime.open_stream() as stream:
            await stream.send([1])
            await stream.send([2])
            await stream.aclose()
            await stream.result()
        assert [what for what, *_ in sim.log] == ["submit", "update", "update"]

    run(main)
    assert [(r.last, r.segment_end, r.input.token_ids) for r in requests] == [
        (False, True, (1,)),
        (False, True, (2,)),
        (True, True, None),
    ]
    assert len({r.request_id for r in requests}) == 1


def test_a_last_segment_closes_without_a_closing_update():
    async def main():
        sim = SimStage(script=echo)
        async with simulated(P1, sim) as runtime, runtime.open_stream() as stream:
            await stream.send([1])
            await stream.send([2], last=True)
            result = await stream.result()
        assert list(result["only"].token_ids) == [1, 2]
        assert [what for what, *_ in sim.log] == ["submit", "update"]

    run(main)


def test_every_segment_walks_the_whole_pipeline():
    async def main():
        sims = [SimStage(script=echo), SimStage(script=echo), SimStage(script=echo)]
        async with simulated(P3, *sims) as runtime:
            async with runtime.open_stream() as stream:
                for segment in ([1, 2], [3], [4, 5, 6]):
                    await stream.send(segment)
                await stream.aclose()
                events = await collect(stream)
            assert_empty(runtime)
        last = P3.stages[-1].name
        answers = of(last, events)
        assert [t for e in answers for t in e.token_ids] == [1, 2, 3, 4, 5, 6]
        assert by_segment(answers) == {0: (1, 2), 1: (3,), 2: (4, 5, 6)}
        for sim in sims:
            assert [what for what, *_ in sim.log] == ["submit", "update", "update", "update"]

    run(main)


def test_a_bridge_sees_what_its_segment_ended_with_even_if_it_runs_later():
    seen = []

    def look(context: BridgeContext) -> StageInput | None:
        seen.append((context.segment, context.segment_end, tuple(context.token_ids), context.finished))
        tokens, _ = context.new()
        return StageInput(token_ids=tokens) if tokens else None

    async def main():
        pipeline = Pipeline([stage("a"), stage("b", bridge=look)])
        # Handing over to "b" takes so long that "a" has worked off everything in the meantime.
        async with simulated(pipeline, SimStage(script=echo), SimStage(script=echo, submit_time=10)) as runtime:
            async with runtime.open_stream() as stream:
                await stream.send([1, 2])
                await stream.send([3])
                await stream.send([4], last=True)
                result = await stream.result()
        assert list(result["b"].token_ids) == [1, 2, 3, 4]

    run(main)
    assert seen == [(0, True, (1, 2), False), (1, True, (1, 2, 3), False), (2, True, (1, 2, 3, 4), True)]


def test_pieces_and_segments_together():
    """A stage fed at each output gets pieces within a segment, and is told where the segment ends."""
    requests = []

    def note(request):
        requests.append((tuple(request.input.token_ids or ()), request.segment_end, request.last))
        return echo(request)

    async def main():
        pipeline = Pipeline([stage("a"), stage("b", feed="output")])
        async with simulated(pipeline, SimStage(script=slow_echo), SimStage(script=note)) as runtime:
            async with runtime.open_stream() as stream:
                await stream.send([1, 2])
                await stream.send([3])
                await stream.aclose()
                events = await collect(stream)
        assert [t for e in of("b", events) for t in e.token_ids] == [1, 2, 3]
        assert by_segment(of("b", events)) == {0: (1, 2), 1: (3,)}

    run(main)
    assert [ids for ids, _, _ in requests if ids] == [(1,), (2,), (3,)]
    # The end of a segment comes with its last piece or by itself, and once.
    assert [last for _, end, last in requests if end] == [False, False, True]


def test_a_final_only_stage_is_forwarded_to_once_at_the_end():
    """W-23: the seed sent the last output through the bridge twice."""
    calls = []

    def count(context: BridgeContext) -> StageInput | None:
        tokens, _ = context.new()
        calls.append(tokens)
        return StageInput(token_ids=tokens) if tokens else None

    async def main():
        pipeline = Pipeline([stage("a"), stage("b", bridge=count)])
        async with simulated(pipeline, SimStage(script=echo), SimStage(script=echo)) as runtime:
            async with runtime.open_stream() as stream:
                await stream.send([1], last=True)
                result = await stream.result()
            assert list(result["b"].token_ids) == [1]

    run(main)
    assert calls == [(1,)]


def test_late_updates_are_refused_and_make_no_state():
    """U68, U70, W-24: an update after the end, or after closing, revives nothing."""

    async def main():
        sim = SimStage(script=echo)
        async with simulated(P1, sim) as runtime:
            async with runtime.open_stream(request_id="s") as stream:
                await stream.send([1])
                await stream.aclose()
                with pytest.raises(SessionClosed, match="closed by its caller") as caught:
                    await stream.send([2])
                assert caught.value.request_id == "s"
                await stream.aclose()  # twice is harmless
                await stream.result()
                with pytest.raises(SessionClosed):
                    await stream.send([2])
            with pytest.raises(SessionClosed):
                await stream.send([3])
            assert_empty(runtime)
        assert [what for what, *_ in sim.log] == ["submit", "update"]

    run(main)


def test_an_update_after_an_abort_is_refused_with_the_reason():
    async def main():
        async with simulated(P1, SimStage(script=echo)) as runtime:
            with pytest.raises(RequestAborted):
                async with runtime.open_stream(request_id="s") as stream:
                    await stream.send([1])
                    await runtime.abort("s")
                    with pytest.raises(SessionClosed, match="aborted") as caught:
                        await stream.send([2])
                    assert isinstance(caught.value.__cause__, RequestAborted)
                    await stream.result()
            assert_empty(runtime)

    run(main)


def test_leaving_a_session_with_updates_under_way_lets_go_of_it_everywhere():
    """U68."""

    async def main():
        sims = [SimStage(script=slow_echo), SimStage(script=slow_echo), SimStage(script=slow_echo)]
        async with simulated(P3, *sims) as runtime:
            async with runtime.open_stream() as stream:
                await stream.send([1])
                await stream.send([2, 3])
                await trio.sleep(1.5)
            assert_empty(runtime)
            assert [what for what, *_ in sims[0].log] == ["submit", "update", "abort"]
            assert (await runtime.generate([7]))["vocoder"].token_ids == (7,)

    run(main)


def test_a_session_that_was_never_sent_anything_can_be_left_and_closed():
    async def main():
        sim = SimStage(script=echo)
        async with simulated(P1, sim) as runtime:
            async with runtime.open_stream():
                pass
            async with runtime.open_stream() as stream:
                await stream.aclose()
                assert (await stream.result())["only"].token_ids == ()
            assert_empty(runtime)
        assert [what for what, *_ in sim.log] == ["submit"]

    run(main)


def test_a_segment_that_the_stage_refuses_is_the_senders_alone():
    def picky(request):
        if request.input.token_ids == (9,):
            raise InvalidRequest("no nines")
        return echo(request)

    async def main():
        async with simulated(P1, SimStage(script=picky)) as runtime:
            async with runtime.open_stream() as stream:
                await stream.send([1])
                with pytest.raises(InvalidRequest, match="no nines"):
                    await stream.send([9])
                for wrong in ("", [], [-1], 3.5):
                    with pytest.raises(InvalidRequest):
                        await stream.send(wrong)
                await stream.send([2], last=True)
                assert (await stream.result())["only"].token_ids == (1, 2)
            assert_empty(runtime)

    run(main)


def test_a_first_segment_that_the_stage_refuses_ends_the_session():
    def picky(request):
        raise InvalidRequest("not this")

    async def main():
        async with simulated(P1, SimStage(script=picky)) as runtime:
            async with runtime.open_stream() as stream:
                with pytest.raises(InvalidRequest, match="not this"):
                    await stream.send([9])
                with pytest.raises(InvalidRequest, match="not this"):
                    await stream.result()
            assert_empty(runtime)

    run(main)


def test_sampling_params_can_change_between_segments():
    seen = []

    def note(request):
        seen.append(request.params.get("max_tokens"))
        return echo(request)

    async def main():
        async with simulated(P1, SimStage(script=note)) as runtime:
            async with runtime.open_stream(sampling_params={"max_tokens": 5}) as stream:
                await stream.send([1])
                await stream.send([2], sampling_params={"max_tokens": 6})
                with pytest.raises(InvalidRequest, match="max_tokens"):
                    await stream.send([3], sampling_params={"max_tokens": 0})
                await stream.aclose()
                await stream.result()

    run(main)
    assert seen == [5, 6, 6]


def test_barge_in_fences_what_the_old_turn_still_says():
    async def main():
        script = {(1,): (LateChunk((66,)), *(verb for _ in range(9) for verb in (Wait(1.0), Chunk((1,)))), Finish())}
        sim = SimStage(script=lambda r: script.get(r.input.token_ids, echo(r)), abort_time=2.0)
        async with simulated(P1, sim) as runtime:
            async with runtime.open_stream() as stream:
                await stream.send([1])
                await trio.sleep(3.5)  # three answers wait unread
                await stream.barge_in([2, 3])
                assert stream.turn == 1
                assert trio.current_time() >= 3.5 + 2.0  # the stage has let go of the old turn
                await stream.aclose()
                events = await collect(stream)
            assert_empty(runtime)
        assert [t for e in events for t in e.token_ids] == [2, 3]
        assert {e.turn for e in events} == {1}
        assert [what for what, *_ in sim.log] == ["submit", "abort", "submit", "update"]
        first, second = sim.log[0][3], sim.log[2][3]
        assert first != second

    run(main)


def test_barge_in_overtakes_segments_that_wait_to_be_handed_over():
    async def main():
        sim = SimStage(script=echo, submit_time=5.0)
        outcomes = []

        async def send(stream, segment):
            try:
                await stream.send(segment)
                outcomes.append((segment, "sent"))
            except SessionClosed:
                outcomes.append((segment, "overtaken"))

        async with simulated(P1, sim) as runtime:
            async with runtime.open_stream() as stream, trio.open_nursery() as nursery:
                nursery.start_soon(send, stream, [1])
                await trio.sleep(1)
                nursery.start_soon(send, stream, [2])
                await trio.sleep(1)
                await stream.barge_in([3])
                await stream.aclose()
                result = await stream.result()
            assert result["only"].token_ids == (3,)
            assert_empty(runtime)
        assert outcomes == [([2], "overtaken"), ([1], "overtaken")]

    run(main)


def test_barge_in_in_the_middle_of_a_pipeline_aborts_every_stage():
    async def main():
        sims = [SimStage(script=slow_echo), SimStage(script=slow_echo), SimStage(script=lambda _: (Stall(),))]
        async with simulated(P3, *sims) as runtime:
            async with runtime.open_stream() as stream:
                await stream.send([1])
                await trio.sleep(5)
                await stream.barge_in([2])
                await trio.sleep(5)
                assert [what for what, *_ in sims[2].log] == ["submit", "abort", "submit"]
                assert [what for what, *_ in sims[0].log] == ["submit", "abort", "submit"]
            assert_empty(runtime)

    run(main)


def test_a_session_ends_with_the_error_of_a_stage_or_a_bridge():
    @bridge(reads=("tokens",))
    def bad(context):
        raise ValueError("bad")

    async def main():
        for pipeline, sims, expected in (
            (P1, [SimStage(script=lambda _: (Error("oh"),))], StageFailed),
            (Pipeline([stage("a"), stage("b", bridge=bad)]), [SimStage(script=echo), SimStage()], BridgeFailed),
        ):
            async with simulated(pipeline, *sims) as runtime:
                async with runtime.open_stream() as stream:
                    await stream.send([1])
                    with pytest.raises(expected):
                        await stream.result()
                assert_empty(runtime)

    run(main)


def test_deadline_and_shutdown_end_a_session_and_wake_its_sender():
    async def main():
        async with simulated(P1, SimStage(script=lambda _: (Stall(),), submit_time=100)) as runtime:
            async with runtime.open_stream(deadline=5) as stream:
                with pytest.raises(SessionClosed):
                    await stream.send([1])
                with pytest.raises(DeadlineExceeded):
                    await stream.result()
            assert_empty(runtime)
        seen = []

        async def use(runtime):
            try:
                async with runtime.open_stream() as stream:
                    await stream.send([1])
                    await stream.result()
            except ShutDown as error:
                seen.append(error)

        async with trio.open_nursery() as nursery:
            async with simulated(P1, SimStage(script=lambda _: (Stall(),))) as runtime:
                nursery.start_soon(use, runtime)
                await trio.sleep(1)
        assert len(seen) == 1

    run(main)


def test_a_pipeline_that_can_not_take_sessions_says_why():
    async def main():
        pipeline = Pipeline([stage("a"), StageSpec(name="b", kind="simulated", feed="kv")])
        async with simulated(pipeline, SimStage(), SimStage()) as runtime:
            with pytest.raises(InvalidRequest, match="'b' starts once"):
                async with runtime.open_stream():
                    pass
            with pytest.raises(InvalidRequest, match="open_stream"):
                runtime.request(None)

    run(main)


def test_a_first_stage_that_has_enough_takes_no_more_segments():
    async def main():
        enough = SimStage(script=echo)
        later = SimStage(script=lambda _: (Stall(),))
        pipe = Pipeline([stage("a"), stage("b")])
        async with simulated(pipe, enough, later) as runtime:
            async with runtime.open_stream(deadline=50) as stream:
                await stream.send([1])
                await trio.sleep(1)
                client = runtime._orchestrator.pools[0].replicas[0].client
                client._put(StageOutput(request_id=enough.log[0][3], finish_reason="stop"))
                await trio.sleep(1)
                with pytest.raises(SessionClosed, match="has enough"):
                    await stream.send([2])
            assert [what for what, *_ in enough.log if what != "abort"] == ["submit"]

    run(main)


def test_stages_by_connector_answer_as_many_segments_as_there_were():
    async def main():
        pipe = Pipeline([stage("a", final_output=True), stage("b"), stage("c", feed="connector")])
        sims = [SimStage(script=echo), SimStage(script=echo), SimStage(script=lambda _: (Chunk((7,)), Finish()))]
        async with simulated(pipe, *sims) as runtime:
            async with runtime.open_stream() as stream:
                for segment in ([1], [2], [3]):
                    await stream.send(segment)
                await stream.aclose()
                events = await collect(stream)
            assert_empty(runtime)
        assert by_segment(of("a", events)) == {0: (1,), 1: (2,), 2: (3,)}
        assert set(by_segment(of("c", events))) >= {0, 1, 2}

    run(main)


def test_a_bridge_sees_the_data_of_its_segment_and_those_before_it_only():
    seen = []

    def look(context: BridgeContext) -> StageInput | None:
        seen.append((context.segment, list(context.data.get("codes", ()))))
        tokens, _ = context.new()
        return StageInput(token_ids=tokens) if tokens else None

    def with_data(request):
        return (*(Chunk((token,), data={"codes": [token]}) for token in request.input.token_ids or ()), Finish())

    async def main():
        pipeline = Pipeline([stage("a"), stage("b", bridge=look)])
        # Handing over to "b" takes so long that "a" has worked off everything in the meantime.
        async with simulated(pipeline, SimStage(script=with_data), SimStage(script=echo, submit_time=10)) as runtime:
            async with runtime.open_stream() as stream:
                await stream.send([1, 2])
                await stream.send([3])
                await stream.send([4], last=True)
                await stream.result()

    run(main)
    assert seen == [(0, [1, 2]), (1, [1, 2, 3]), (2, [1, 2, 3, 4])]
