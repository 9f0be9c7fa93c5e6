"""Prefill/decode disaggregation over simulated stages: hand-off once, and no KV cache left behind in any phase."""

from __future__ import annotations

import pytest
import trio

from omni_trio.bridges import BridgeContext
from omni_trio.errors import DeadlineExceeded, InvalidRequest, NoReplicaAvailable, RequestAborted, StageFailed
from omni_trio.messages import Output, StageInput
from omni_trio.pipeline import Pipeline
from omni_trio.testing import Chunk, Die, Finish, SimStage, Stall, Wait
from support import assert_empty, run, simulated, stage

KV = {"remote_request_id": "p", "remote_engine_id": "e"}


def pair(*more, prefill=None, decode=None):
    return Pipeline(
        [stage("prefill", role="prefill", **(prefill or {})), stage("decode", role="decode", **(decode or {})), *more]
    )


PD = pair()


def released(sim):
    return [request_id for what, _, _, *ids in sim.log if what == "release_kv" for request_id in ids]


def test_decode_gets_the_original_prompt_and_what_the_prefill_ended_with_and_the_user_sees_the_decode_only():
    """U41: the prefill's own token reaches nobody."""
    seen = {}

    def prefill(request):
        seen["prefill"] = request
        return (Chunk((77,)), Finish("length", kv=KV))

    def decode(request):
        seen["decode"] = request
        return (Chunk((77,)), Chunk((78,)), Finish())

    async def main():
        sims = SimStage(script=prefill), SimStage(script=decode)
        async with simulated(PD, *sims) as runtime:
            async with runtime.request([1, 2, 3]) as request:
                events = [event async for event in request]
            assert_empty(runtime)
        assert [t for e in events if isinstance(e, Output) for t in e.token_ids] == [77, 78]
        assert released(sims[1]) == []

    run(main)
    first, second = seen["prefill"], seen["decode"]
    assert first.kv_transfer.role == "prefill"
    assert second.kv_transfer.role == "decode"
    assert first.kv_transfer.transfer_id == second.kv_transfer.transfer_id
    assert second.kv_transfer.params == KV
    assert second.input == first.input == StageInput(token_ids=(1, 2, 3))


def test_transfer_ids_are_unique_for_ever():
    async def main():
        ids = []

        def prefill(request):
            ids.append(request.kv_transfer.transfer_id)
            return (Finish("length", kv=KV),)

        async with simulated(PD, SimStage(script=prefill)) as runtime:
            for _ in range(3):
                await runtime.generate([1], request_id="same")
        assert len(set(ids)) == 3

    run(main)


def test_a_prefill_without_parameters_fails_its_request_only():
    async def main():
        async with simulated(PD, SimStage(script=lambda _: (Finish("length"),)), SimStage()) as runtime:
            with pytest.raises(StageFailed, match=r"without kv_transfer_params.*handoff = 'content'") as caught:
                await runtime.generate([1], request_id="r")
            assert (caught.value.stage, caught.value.request_id) == ("decode", "r")
            assert_empty(runtime)

    run(main)


def test_a_connector_that_finds_the_cache_by_content_needs_no_parameters():
    async def main():
        decode = []

        def note(request):
            decode.append(request.kv_transfer)
            return (Finish(),)

        pipe = pair(decode={"handoff": "content"})
        async with simulated(pipe, SimStage(script=lambda _: (Finish("length"),)), SimStage(script=note)) as runtime:
            await runtime.generate([1])
        assert [(kv.role, kv.params) for kv in decode] == [("decode", None)]

    run(main)


@pytest.mark.parametrize(
    ("phase", "when", "at_prefill", "at_decode", "holds"),
    [
        ("queued prefill", 0.5, ["abort"], [], 0),
        ("prefill", 3.0, ["abort"], [], 0),
        ("handed off, decode not registered", 12.0, [], ["abort"], 1),
        ("decode waiting", 17.0, [], ["abort"], 0),
        ("decoding", 25.0, [], ["abort"], 0),
    ],
)
@pytest.mark.parametrize("how", ["leave", "abort"])
def test_the_producers_hold_is_let_go_of_once_in_every_phase(phase, when, at_prefill, at_decode, holds, how):
    """U39: by the prefill engine itself, by a release, or by the decode engine's abort; and then nothing is held."""
    del phase

    async def main():
        prefill = SimStage(script=lambda _: (Wait(8), Finish("length", kv=KV)), submit_time=2)
        decode = SimStage(script=lambda _: (Wait(5), Chunk((1,)), Stall()), submit_time=5)
        async with simulated(PD, prefill, decode) as runtime:
            if how == "leave":
                with trio.move_on_after(when):
                    await runtime.generate([1])
            else:
                async with trio.open_nursery() as nursery:

                    async def ask():
                        with pytest.raises(RequestAborted):
                            await runtime.generate([1], request_id="r")

                    nursery.start_soon(ask)
                    await trio.sleep(when)
                    await runtime.abort("r")
            assert_empty(runtime)
        acts = {sim: [what for what, *_ in sim.log if what in ("abort", "release_kv")] for sim in (prefill, decode)}
        # A submission that is cancelled has not happened; it is followed by an abort all the same, which is harmless.
        assert acts[prefill] == at_prefill
        assert sorted(acts[decode]) == at_decode + ["release_kv"] * holds

    run(main)


def test_a_deadline_while_a_cache_is_held_releases_it():
    async def main():
        prefill = SimStage(script=lambda _: (Finish("length", kv=KV),))
        decode = SimStage(submit_time=50)
        async with simulated(PD, prefill, decode) as runtime:
            with pytest.raises(DeadlineExceeded):
                await runtime.generate([1], deadline=5)
            assert_empty(runtime)
        assert len(released(decode)) == 1

    run(main)


def test_an_abort_between_the_end_of_the_prefill_and_the_hand_off_releases_the_cache():
    """The request's task has been woken by the prefill's end and has not run yet."""

    async def main():
        decode = SimStage()
        holder = []

        def instrument(event):
            if event.name == "leg.finished" and event.stage == "prefill":
                # Called by the reader, in the very pass that hears of the end.
                trio.lowlevel.spawn_system_task(abort)

        async def abort():
            await holder[0].abort("r")

        prefill = SimStage(script=lambda _: (Wait(1), Finish("length", kv=KV)))
        async with simulated(PD, prefill, decode, instruments=[instrument]) as runtime:
            holder.append(runtime)
            for _ in range(20):  # whichever of the two tasks trio runs first
                with pytest.raises(RequestAborted):
                    await runtime.generate([1], request_id="r")
                assert_empty(runtime)
        assert len(released(decode)) == len(set(released(decode))) == 20

    run(main)


def test_cancelled_prefills_do_not_hold_up_a_short_request():
    """U13, U14: capacity 1; ten long prompts whose callers leave, then a short one."""

    async def main():
        prefill = SimStage(
            script=lambda r: (Wait(100 if r.input.token_ids == (9,) else 1), Finish("length", kv=KV)), capacity=1
        )
        async with simulated(PD, prefill, SimStage(tokens=1)) as runtime:

            async def leaver():
                with trio.move_on_after(5):
                    await runtime.generate([9])

            async with trio.open_nursery() as nursery:
                for _ in range(10):
                    nursery.start_soon(leaver)
                await trio.sleep(6)
                started = trio.current_time()
                await runtime.generate([1])
                assert trio.current_time() - started == 1
            assert_empty(runtime)

    run(main)


def test_an_empty_prefill_pool_rejects_at_once():
    """U42."""

    async def main():
        prefill = SimStage(script=lambda _: (Die(),))
        async with simulated(PD, prefill, SimStage(tokens=2), on_engine_death="isolate") as runtime:
            with pytest.raises(Exception, match="gone"):
                await runtime.generate([1])
            before = trio.current_time()
            with pytest.raises(NoReplicaAvailable) as caught:
                await runtime.generate([1], request_id="r")
            assert (caught.value.request_id, caught.value.stage) == ("r", "prefill")
            assert trio.current_time() == before
            assert_empty(runtime)

    run(main)


def test_an_empty_prefill_pool_is_waited_for_as_long_as_the_stage_says():
    async def main():
        pipe = pair(prefill={"dispatch_timeout": 4.0})
        prefill = SimStage(script=lambda _: (Die(),))
        async with simulated(pipe, prefill, SimStage(tokens=2), on_engine_death="isolate") as runtime:
            with pytest.raises(Exception, match="gone"):
                await runtime.generate([1])
            before = trio.current_time()
            with pytest.raises(NoReplicaAvailable):
                await runtime.generate([1])
            assert trio.current_time() == before + 4

    run(main)


def test_an_empty_prefill_pool_can_be_skipped():
    async def main():
        kvs = []

        def decode(request):
            kvs.append(request.kv_transfer)
            return (Chunk((5,)), Finish())

        pipe = pair(prefill={"when_empty": "skip", "dispatch_timeout": 4.0})
        prefill = SimStage(script=lambda _: (Die(),))
        async with simulated(pipe, prefill, SimStage(script=decode), on_engine_death="isolate") as runtime:
            with pytest.raises(Exception, match="gone"):
                await runtime.generate([1])
            before = trio.current_time()
            result = await runtime.generate([1])
            assert list(result["decode"].token_ids) == [5]
            assert trio.current_time() == before + 4
            assert_empty(runtime)
        assert kvs == [None]

    run(main)


def test_parameters_given_for_the_pair_go_to_both_halves():
    seen = {}

    def note(request):
        seen[request.kv_transfer.role] = request.params.get("max_tokens")
        return (Finish("length", kv=KV),)

    async def main():
        pipe = pair(stage("vocoder"))
        async with simulated(
            pipe, SimStage(script=note), SimStage(script=lambda r: (Chunk((1,)), *note(r)))
        ) as runtime:
            await runtime.generate([1], sampling_params={"max_tokens": 5})
            assert seen == {"prefill": 5, "decode": 5}
            await runtime.generate([1], sampling_params=[{"max_tokens": 6}, None])
            assert seen == {"prefill": 6, "decode": 6}
            await runtime.generate([1], sampling_params={"decode": {"max_tokens": 7}})
            assert seen == {"prefill": None, "decode": 7}
            with pytest.raises(InvalidRequest, match="3"):
                await runtime.generate([1], sampling_params=[None])

    run(main)


def test_a_request_can_not_end_at_the_prefill():
    async def main():
        async with simulated(PD) as runtime:
            for final in ("prefill", 0):
                with pytest.raises(InvalidRequest, match="can not end at"):
                    await runtime.generate([1], final_stage=final)
            assert list((await runtime.generate([1], final_stage="decode")).outputs) == ["decode"]

    run(main)


def test_the_plain_prefill_of_a_simulated_stage_and_a_stage_behind_the_decode():
    async def main():
        async with simulated(pair(stage("vocoder")), SimStage(), SimStage(tokens=3), SimStage(tokens=2)) as runtime:
            result = await runtime.generate([1, 2])
            assert list(result.outputs) == ["vocoder"]
            assert [m.stage for m in result.metrics] == ["prefill", "decode", "vocoder"]
            assert_empty(runtime)

    run(main)


def test_a_decode_pool_without_replicas_releases_the_cache_if_it_can_and_says_so_if_not():
    async def main():
        trace = []
        decode = SimStage(script=lambda _: (Die(),))
        prefill = SimStage(script=lambda _: (Finish("length", kv=KV),))
        async with simulated(PD, prefill, decode, on_engine_death="isolate", instruments=[trace.append]) as runtime:
            with pytest.raises(Exception, match="gone"):
                await runtime.generate([1])
            with pytest.raises(NoReplicaAvailable):
                await runtime.generate([1])
            assert_empty(runtime)
        assert [e.name for e in trace if e.name.startswith("kv.")] == ["kv.unreleased"]

    run(main)


def test_what_the_prefill_made_reaches_the_bridge_behind_the_decode():
    seen = []

    def look(context: BridgeContext) -> StageInput:
        seen.append((dict(context.prefill_data), dict(context.data)))
        return StageInput(token_ids=(1,))

    async def main():
        pipe = pair(stage("vocoder", bridge=look))
        prefill = SimStage(script=lambda _: (Chunk((), data={"rows": [1, 2]}), Finish("length", kv=KV)))
        decode = SimStage(script=lambda _: (Chunk((5,), data={"codes": [5]}), Finish()))
        async with simulated(pipe, prefill, decode) as runtime:
            await runtime.generate([1])

    run(main)
    assert seen == [({"rows": [1, 2]}, {"codes": [5]})]
