"""Stages that start before their source has ended: when its KV cache is ready, or at admission by connector."""

from __future__ import annotations

import threading

import pytest
import trio

from omni_trio.bridges import BridgeContext, bridge
from omni_trio.errors import BridgeFailed, DeadlineExceeded, InvalidRequest, StageFailed
from omni_trio.messages import Output, Progress, StageInput, StageMetrics, StageOutput
from omni_trio.pipeline import Pipeline
from omni_trio.testing import Chunk, Error, Finish, FinishSilently, KvReady, SimStage, Stall, Step, Wait
from support import assert_empty, run, simulated, stage


def echo(request):
    return (Chunk(request.input.token_ids or ()), Finish())


# ---- KV ready


def test_the_next_stage_starts_when_the_kv_cache_is_ready_and_is_not_started_again_at_the_end():
    """S-5, W-21: and what is left of the text, which nobody gets, is not computed."""

    async def main():
        pipe = Pipeline([stage("ar", final_output=True), stage("dit", feed="kv", bridge="original_prompt")])
        ar = SimStage(script=lambda _: (Chunk((1,)), Wait(3), KvReady(), Wait(4), Chunk((2,)), KvReady(), Finish()))
        dit = SimStage(script=lambda r: (Wait(1), Chunk(r.input.token_ids), Finish()))
        async with simulated(pipe, ar, dit) as runtime:
            async with runtime.request([8]) as request:
                events = [(trio.current_time(), e) async for e in request]
            assert_empty(runtime)
        seen = [(t, e.stage, tuple(e.token_ids)) for t, e in events if isinstance(e, Output) and e.token_ids]
        assert seen == [(0, "ar", (1,)), (4, "dit", (8,)), (7, "ar", (2,))]
        assert [what for what, *_ in dit.log] == ["submit"]

    run(main)


def test_a_stage_whose_source_never_tells_starts_at_its_end():
    async def main():
        pipe = Pipeline([stage("ar"), stage("dit", feed="kv", bridge="original_prompt")])
        async with simulated(pipe, SimStage(tokens=2, token_time=1), SimStage(script=echo)) as runtime:
            assert list((await runtime.generate([8]))["dit"].token_ids) == [8]

    run(main)


@pytest.mark.parametrize("run_in", ["inline", "thread"])
def test_a_bridge_that_makes_nothing_of_a_ready_cache_is_asked_again_at_the_end(run_in):
    calls = []

    @bridge(run_in=run_in)
    def late(context: BridgeContext) -> StageInput | None:
        calls.append((context.finished, tuple(context.token_ids)))
        return StageInput(token_ids=context.token_ids) if context.finished else None

    async def main():
        pipe = Pipeline([stage("ar"), stage("dit", feed="kv", bridge=late)])
        asked = trio.Event()

        def instrument(event):
            if event.name == "bridge.finished":
                asked.set()

        ar = SimStage(script=lambda _: (KvReady(), Stall()))
        async with simulated(pipe, ar, SimStage(script=echo), instruments=[instrument]) as runtime:
            async with runtime.request([8]) as request:
                await asked.wait()
                client = runtime._orchestrator.pools[0].replicas[0].client
                client._put(StageOutput(request_id=ar.log[0][3], token_ids=(5,), finish_reason="stop"))
                assert list((await request.result())["dit"].token_ids) == [5]

    trio.run(main)  # not on the virtual clock, which would not wait for threads
    assert calls == [(False, ()), (True, (5,))]


def test_a_bridge_in_a_thread_that_the_end_overtakes_is_run_again():
    heard = threading.Event()
    calls = []

    async def main():
        def end_the_source():
            client = runtime._orchestrator.pools[0].replicas[0].client
            client._put(StageOutput(request_id=ar.log[0][3], token_ids=(5,), finish_reason="stop"))

        def instrument(event):
            if event.name == "leg.finished" and event.stage == "ar":
                heard.set()

        @bridge(run_in="thread")
        def slow(context: BridgeContext) -> StageInput | None:
            calls.append(context.finished)
            if context.finished:
                return StageInput(token_ids=(4,))
            trio.from_thread.run_sync(end_the_source)
            assert heard.wait(10)
            return None

        pipe = Pipeline([stage("ar"), stage("dit", feed="kv", bridge=slow)])
        ar = SimStage(script=lambda _: (KvReady(), Stall()))
        async with simulated(pipe, ar, SimStage(script=echo), instruments=[instrument]) as runtime:
            assert list((await runtime.generate([8]))["dit"].token_ids) == [4]

    trio.run(main)  # not on the virtual clock, which would not wait for threads
    assert calls == [False, True]


def test_kv_sender_info_of_the_replica_that_has_the_request_goes_to_the_next_stage():
    """Spec 8.8; W-47: never that of another replica."""
    seen = []

    def note(request):
        seen.append(dict(request.kv_senders))
        return (Finish(),)

    async def main():
        pipe = Pipeline([stage("ar"), stage("dit", feed="kv", bridge="original_prompt")])
        ar = SimStage(script=lambda _: (KvReady(), Finish()), kv_sender={"host": "10.0.0.1", "zmq_port": 50151})
        async with simulated(pipe, ar, SimStage(script=note)) as runtime:
            await runtime.generate([8])

    run(main)
    assert seen == [{"ar": {"host": "10.0.0.1", "zmq_port": 50151}}]


def test_what_tells_of_a_ready_cache_is_no_output():
    async def main():
        pipe = Pipeline([stage("ar", final_output=True), stage("dit", feed="kv", bridge="original_prompt")])
        ar = SimStage(script=lambda _: (KvReady(), Wait(1), Chunk((1,)), Finish()))
        async with simulated(pipe, ar, SimStage()) as runtime, runtime.request([8]) as request:
            outputs = [e async for e in request if isinstance(e, Output) and e.stage == "ar"]
        assert all(e.token_ids or e.finished for e in outputs)

    run(main)


# ---- by connector (async chunk)


def connected(*names, **fields):
    return Pipeline([stage(names[0]), *(stage(name, feed="connector", **fields) for name in names[1:])])


def test_every_later_stage_is_submitted_at_admission_with_a_placeholder():
    seen = []

    def note(request):
        seen.append((request.input, request.last))
        return (Wait(5), Chunk((1,)), Finish())

    async def main():
        pipe = connected("thinker", "talker", "vocoder")
        async with simulated(pipe, *(SimStage(script=note) for _ in range(3))) as runtime:
            await runtime.generate([4, 5, 6])
            assert trio.current_time() == 5  # all three at the same time
            assert_empty(runtime)

    run(main)
    zeros = StageInput(token_ids=(0, 0, 0))
    assert seen == [(StageInput(token_ids=(4, 5, 6)), True), (zeros, True), (zeros, True)]


def test_a_declared_function_says_how_long_the_placeholder_is():
    seen = []

    def note(request):
        seen.append(request.input)
        return (Finish(),)

    async def main():
        pipe = connected("a", "b", placeholder=lambda prompt: len(prompt.text) // 2)
        async with simulated(pipe, SimStage(), SimStage(script=note)) as runtime:
            await runtime.generate("hello you")

    run(main)
    assert seen == [StageInput(token_ids=(0, 0, 0, 0))]


def test_without_token_ids_and_without_a_function_the_request_is_refused():
    """W-14: the seed skipped the stage in silence."""

    def bad(prompt):
        raise KeyError("x")

    async def main():
        async with simulated(connected("a", "b"), SimStage(), SimStage()) as runtime:
            with pytest.raises(InvalidRequest, match="declare the stage's placeholder"):
                await runtime.generate("hello")
            assert_empty(runtime)
        async with simulated(connected("a", "b", placeholder=bad), SimStage(), SimStage()) as runtime:
            with pytest.raises(BridgeFailed, match="placeholder function raised KeyError"):
                await runtime.generate("hello")
            assert_empty(runtime)

    run(main)


def test_an_upstream_failure_cancels_downstream_with_the_cause():
    """U43, U44: the consumer had partial chunks, then one failure."""

    async def main():
        talker = SimStage(script=lambda _: (Chunk((1,)), Stall()))
        thinker = SimStage(script=lambda _: (Wait(2), Error("gave up")))
        async with simulated(connected("thinker", "talker"), thinker, talker) as runtime:
            seen = []
            with pytest.raises(StageFailed, match="gave up") as caught:
                async with runtime.request([1]) as request:
                    async for event in request:
                        seen.append(event)
            assert caught.value.stage == "thinker"
            assert trio.current_time() == 2
            assert [tuple(e.token_ids) for e in seen if isinstance(e, Output)] == [(1,)]
            assert_empty(runtime)
        assert [what for what, *_ in talker.log] == ["submit", "abort"]

    run(main)


def test_a_chunk_that_never_comes_ends_the_request_at_the_one_deadline():
    """U43: counted from the last sign of life of the stage or its source."""

    async def main():
        thinker = SimStage(script=lambda _: (Wait(3), Chunk((1,)), Wait(4), Chunk((2,)), Stall()))
        talker = SimStage(script=lambda _: (Stall(),))
        async with simulated(connected("thinker", "talker", chunk_timeout=5.0), thinker, talker) as runtime:
            with pytest.raises(DeadlineExceeded, match=r"sign of life for 5 s.*chunk_timeout") as caught:
                await runtime.generate([1], request_id="r")
            assert (caught.value.stage, caught.value.request_id) == ("talker", "r")
            assert trio.current_time() == 7 + 5
            assert_empty(runtime)

    run(main)


def test_a_slow_but_living_pair_is_not_cut_off():
    async def main():
        thinker = SimStage(script=lambda _: (*(v for i in range(9) for v in (Wait(4), Chunk((i,)))), Finish()))
        talker = SimStage(script=lambda _: (Wait(38), Chunk((1,)), Finish()))
        async with simulated(connected("thinker", "talker", chunk_timeout=5.0), thinker, talker) as runtime:
            await runtime.generate([1])
            assert trio.current_time() == 38

    run(main)


def test_the_end_is_told_when_the_sender_has_ended_as_well():
    """W-21: the vocoder may end before the talker's last word, whose usage and reason are wanted."""

    async def main():
        talker = SimStage(script=lambda _: (Chunk((1,)), Wait(9), Finish("length")))
        vocoder = SimStage(script=lambda _: (Wait(1), Chunk((2,)), Finish()))
        async with simulated(connected("talker", "vocoder"), talker, vocoder) as runtime:
            async with runtime.request([1]) as request:
                events = [e async for e in request]
            assert trio.current_time() == 9
            assert_empty(runtime)
        assert [m.stage for m in events if isinstance(m, StageMetrics)] == ["talker"]
        assert [tuple(e.token_ids) for e in events if isinstance(e, Output) and e.token_ids] == [(2,)]

    run(main)


def test_a_final_stage_cuts_the_stages_behind_it():
    async def main():
        later = SimStage()
        async with simulated(connected("a", "b"), SimStage(), later) as runtime:
            await runtime.generate([1], final_stage="a")
        assert not later.log

    run(main)


def test_a_stage_by_connector_behind_one_by_bridge_is_submitted_with_its_source():
    async def main():
        pipe = Pipeline([stage("a"), stage("b"), stage("c", feed="connector")])
        c = SimStage(tokens=1)
        trace = []
        async with simulated(pipe, SimStage(script=lambda _: (Wait(3), Chunk((1,)), Finish())), SimStage(tokens=1), c,
                             instruments=[trace.append]) as runtime:  # fmt: skip
            await runtime.generate([1])
        assert [(e.time, e.stage) for e in trace if e.name == "leg.submitted"] == [(0, "a"), (3, "b"), (3, "c")]

    run(main)


def test_connector_stages_in_a_session_are_told_of_each_segment_and_of_the_end():
    requests = []

    def note(request):
        requests.append((request.input.token_ids, request.segment_end, request.last))
        return (Chunk((len(requests),)), Finish())

    async def main():
        async with simulated(connected("a", "b"), SimStage(), SimStage(script=note)) as runtime:
            async with runtime.open_stream() as stream:
                await stream.send([1, 2])
                await stream.send([3], last=True)
                await stream.result()
            assert_empty(runtime)

    run(main)
    assert [(end, last) for _, end, last in requests] == [(True, False), (True, True)]


@pytest.mark.parametrize("feed", ["finish", "output", "connector"])
def test_however_the_vocoder_is_fed_the_final_outputs_are_the_same(feed):
    """U45 (metamorphic): the data that travels by connector is what the bridge would have carried."""

    async def main():
        got = []

        def vocoder(request):
            tokens = request.input.token_ids or ()
            if feed == "connector":
                tokens = (3, 4, 5)  # what the connector brings
            got.extend(tokens)
            return (Chunk(tokens), Finish())

        pipe = Pipeline([stage("talker", final_output=True), stage("vocoder", feed=feed)])
        talker = SimStage(script=lambda _: (Chunk((3,)), Wait(1), Chunk((4,)), Wait(1), Finish("length", (5,))))
        async with simulated(pipe, talker, SimStage(script=vocoder)) as runtime:
            return {
                name: (list(out.token_ids), out.finish_reason)
                for name, out in (await runtime.generate([1])).outputs.items()
            }

    assert run(main) == {"talker": ([3, 4, 5], "length"), "vocoder": ([3, 4, 5], "stop")}


# ---- progress, silence, batches


def test_progress_of_a_stage_that_works_in_steps():
    async def main():
        script = (*(v for i in range(1, 4) for v in (Step(i, 3), Wait(1))), Chunk((1,)), Finish())
        async with simulated(Pipeline([stage("dit")]), SimStage(script=lambda _: script)) as runtime:
            async with runtime.request([1]) as request:
                events = [e async for e in request]
            async with runtime.request([1]) as request:
                await trio.sleep(2.5)
                late = [e async for e in request]
        steps = [(e.step, e.total, e.delta) for e in events if isinstance(e, Progress)]
        assert steps == [(1, 3, None), (2, 3, None), (3, 3, None)]
        # Only the newest waits for a slow consumer, and the stage's last word still comes last.
        assert [e.step for e in late if isinstance(e, Progress)] == [3]
        assert late[-1].finished

    run(main)


def test_a_stage_that_ends_in_silence_still_ends_its_request():
    """U49, W-13."""

    async def main():
        pipe = Pipeline([stage("a"), stage("b", bridge="original_prompt")])
        quiet = SimStage(script=lambda _: (FinishSilently(),))
        async with simulated(pipe, quiet, quiet) as runtime:
            result = await runtime.generate([1])
            assert result["b"].token_ids == ()
            assert result["b"].finish_reason == "stop"
            assert_empty(runtime)

    run(main)


def test_a_batch_of_prompts_is_one_request():
    seen = []

    def note(request):
        seen.append(request.input)
        return (Finish(),)

    async def main():
        async with simulated(Pipeline([stage("dit")]), SimStage(script=note)) as runtime:
            await runtime.generate(["a", "b"])
            await runtime.generate([StageInput(text="c")])
            for wrong in (["a", ""], [StageInput()], ["a", 1], [StageInput(batch=(StageInput(text="x"),))], [1, "a"]):
                with pytest.raises(InvalidRequest):
                    await runtime.generate(wrong)

    run(main)
    assert seen == [
        StageInput(batch=(StageInput(text="a"), StageInput(text="b"))),
        StageInput(batch=(StageInput(text="c"),)),
    ]
