"""Companions (classifier-free guidance): one more request each at the first stage; complete fan-in or failure (I9)."""

from __future__ import annotations

import math

import pytest
import trio

from omni_trio.bridges import BridgeContext, Companion
from omni_trio.errors import BridgeFailed, DeadlineExceeded, EngineDied, InvalidRequest, ReplicaLost, StageFailed
from omni_trio.messages import Output, StageInput
from omni_trio.pipeline import Pipeline
from omni_trio.testing import Chunk, Die, Error, Finish, KvReady, SimStage, Stall, Wait
from support import assert_empty, run, simulated, stage

ROLES = ("cfg_text", "cfg_img")


def expand(context):
    return [Companion(role=role, input=StageInput(token_ids=(index + 100,))) for index, role in enumerate(ROLES)]


def gather(context: BridgeContext) -> StageInput:
    """Hands on all that the bundle has: its own tokens, then those of each companion, in order."""
    bundle = [tuple(context.token_ids), *(tuple(one.token_ids) for one in context.companions.values())]
    return StageInput(token_ids=tuple(t for ids in bundle for t in ids), data={"roles": list(context.companions)})


def pipeline(**fields):
    return Pipeline(
        [stage("ar"), stage("dit", **({"bridge": gather} | fields.pop("dit", {})))], **({"expand": expand} | fields)
    )


def role_of(request):
    """Which companion a request at the first stage is; None: the request itself."""
    return next((role for role in ROLES if request.request_id.endswith(f".{role}")), None)


def scripts(**by_role):
    """What the request itself (``me``) and its companions do; by default each gives a token and ends."""
    usual = {"me": (Chunk((1,)), Finish()), "cfg_text": (Chunk((2,)), Finish()), "cfg_img": (Chunk((3,)), Finish())}
    return lambda request: (usual | by_role)[role_of(request) or "me"]


def echo(request):
    return (Chunk(request.input.token_ids or ()), Finish())


def test_the_next_stage_gets_the_complete_bundle_in_order():
    seen = []

    def dit(request):
        seen.append(request)
        return echo(request)

    async def main():
        async with simulated(pipeline(), SimStage(script=scripts()), SimStage(script=dit)) as runtime:
            async with runtime.request([9], request_id="r") as request:
                events = [event async for event in request]
            assert_empty(runtime)
        assert [t for e in events if isinstance(e, Output) for t in e.token_ids] == [1, 2, 3]
        assert {event.request_id for event in events} == {"r"}

    run(main)
    (request,) = seen
    assert request.input.data == {"roles": list(ROLES)}
    assert request.params["cfg_kv_request_ids"] == {role: f"{request.request_id}.{role}" for role in ROLES}


@pytest.mark.parametrize("slow", ["me", "cfg_text", "cfg_img"])
def test_whoever_is_last_completes_the_bundle(slow):
    """U31: a parent that is done at once waits."""

    async def main():
        ar = SimStage(script=scripts(**{slow: (Wait(30), Chunk((7,)), Finish())}))
        dit = SimStage(script=echo)
        async with simulated(pipeline(), ar, dit) as runtime:
            result = await runtime.generate([9])
            assert trio.current_time() == 30
            assert_empty(runtime)
        expected = {"me": [7, 2, 3], "cfg_text": [1, 7, 3], "cfg_img": [1, 2, 7]}[slow]
        assert list(result["dit"].token_ids) == expected
        assert [what for what, *_ in dit.log] == ["submit"]

    run(main)


def test_that_a_companions_kv_cache_is_ready_does_not_complete_the_bundle():
    """U32, W-16: only its output does."""

    async def main():
        ar = SimStage(script=scripts(cfg_text=(KvReady(), Wait(10), Chunk((2,)), Finish())))
        dit = SimStage(script=echo)
        async with simulated(pipeline(dit={"feed": "kv"}), ar, dit) as runtime:
            result = await runtime.generate([9])
            assert list(result["dit"].token_ids) == [1, 2, 3]
            assert trio.current_time() == 10

    run(main)


def test_with_companions_done_the_next_stage_starts_when_the_kv_cache_is_ready():
    async def main():
        ar = SimStage(script=scripts(me=(Chunk((1,)), Wait(5), KvReady(), Wait(100), Chunk((8,)), Finish())))
        dit = SimStage(script=echo)
        async with simulated(pipeline(dit={"feed": "kv"}), ar, dit) as runtime:
            result = await runtime.generate([9])
            assert trio.current_time() == 5  # and the rest of the text is nobody's final output, so it is aborted
            assert list(result["dit"].token_ids) == [1, 2, 3]
            assert_empty(runtime)
        assert [what for what, *_ in dit.log] == ["submit"]
        assert [what for what, *_ in ar.log] == ["submit", "submit", "submit", "abort"]

    run(main)


def test_a_kv_cache_that_is_ready_before_the_companions_waits_for_them():
    async def main():
        ar = SimStage(script=scripts(me=(KvReady(), Wait(50), Finish()), cfg_img=(Wait(20), Chunk((3,)), Finish())))
        dit = SimStage(script=lambda _: (Wait(1), Finish()))
        async with simulated(pipeline(dit={"feed": "kv"}), ar, dit) as runtime:
            await runtime.generate([9])
            assert trio.current_time() == 21

    run(main)


def test_a_companions_failure_is_its_requests_and_ends_the_siblings():
    """U33, S-3."""

    async def main():
        ar = SimStage(script=scripts(me=(Wait(60), Finish()), cfg_text=(Error("oh"),), cfg_img=(Stall(),)))
        dit = SimStage()
        trace = []
        async with simulated(pipeline(), ar, dit, instruments=[trace.append]) as runtime:
            with pytest.raises(StageFailed, match="companion 'cfg_text' failed: oh") as caught:
                await runtime.generate([9], request_id="r")
            assert caught.value.request_id == "r"
            assert trio.current_time() == 0
            assert_empty(runtime)
        aborted = {one for what, _, _, *ids in ar.log if what == "abort" for one in ids}
        assert {one.rsplit("-", 1)[1].partition(".")[2] for one in aborted} == {"", "cfg_img"}
        assert not dit.log
        assert {event.request_id for event in trace if event.request_id} == {"r"}

    run(main)


def test_a_silent_companion_fails_its_request_by_name_at_the_bundle_deadline():
    """U35, W-18."""

    async def main():
        ar = SimStage(script=scripts(cfg_img=(Stall(),)))
        async with simulated(pipeline(bundle_timeout=7.0), ar, SimStage()) as runtime:
            with pytest.raises(DeadlineExceeded, match=r"missing: 'cfg_img'.*bundle_timeout") as caught:
                await runtime.generate([9], request_id="r")
            assert caught.value.request_id == "r"
            assert trio.current_time() == 7
            assert_empty(runtime)
            assert runtime.stats().expired == 1

    run(main)


def test_the_bundle_deadline_counts_from_when_the_request_itself_is_ready():
    async def main():
        ar = SimStage(script=scripts(me=(Wait(100), Finish()), cfg_img=(Wait(105), Chunk((3,)), Finish())))
        async with simulated(pipeline(bundle_timeout=7.0), ar, SimStage(script=echo)) as runtime:
            result = await runtime.generate([9])
            assert list(result["dit"].token_ids) == [2, 3]

    run(main)


def test_companions_share_the_replica_of_their_request():
    """U36, S-8."""

    async def main():
        ar = SimStage(script=scripts(me=(Wait(1), Finish())))
        pipe = Pipeline([stage("ar", replicas=3), stage("dit", bridge=gather)], expand=expand)
        async with simulated(pipe, ar, SimStage()) as runtime, trio.open_nursery() as nursery:
            for _ in range(7):
                nursery.start_soon(runtime.generate, [9])
        replicas: dict[str, set[int]] = {}
        for what, _, replica, request_id in ar.log:
            assert what == "submit"
            replicas.setdefault(request_id.split(".")[0], set()).add(replica)
        assert len(replicas) == 7
        assert all(len(used) == 1 for used in replicas.values())
        assert len(set.union(*replicas.values())) == 3

    run(main)


def test_the_death_of_their_replica_fails_the_request_once():
    async def main():
        dying = scripts(me=(Wait(60), Finish()), cfg_img=(Wait(3), Die()))
        trace = []
        pipe = Pipeline([stage("ar", replicas=2), stage("dit", bridge=gather)], expand=expand)
        async with simulated(
            pipe, SimStage(script=dying), SimStage(), on_engine_death="isolate", instruments=[trace.append]
        ) as runtime:
            with pytest.raises(ReplicaLost):
                await runtime.generate([9], request_id="r")
            assert_empty(runtime)
        assert [e.name for e in trace if e.name in ("request.failed", "request.finished")] == ["request.failed"]

    run(main)


@pytest.mark.parametrize("when", [0.5, 4.0, 12.0])
def test_the_end_of_the_request_ends_its_companions(when):
    """Abort in each phase: all at the first stage; deferred; at the next stage."""

    async def main():
        ar = SimStage(script=scripts(me=(Wait(2), Finish()), cfg_img=(Wait(10), Chunk((3,)), Finish())))
        dit = SimStage(script=lambda _: (Stall(),))
        async with simulated(pipeline(), ar, dit) as runtime:
            with trio.move_on_after(when):
                await runtime.generate([9])
            assert_empty(runtime)
            assert runtime.stats().aborted == 1
        aborted = sum(len(ids) for what, _, _, *ids in (*ar.log, *dit.log) if what == "abort")
        assert aborted == {0.5: 2, 4.0: 1, 12.0: 1}[when]  # cfg_text is done at once

    run(main)


def test_no_companions_where_the_request_ends_at_the_first_stage():
    async def main():
        ar = SimStage(script=scripts())
        async with simulated(pipeline(), ar, SimStage()) as runtime:
            assert list((await runtime.generate([9], final_stage="ar"))["ar"].token_ids) == [1]
        assert [what for what, *_ in ar.log] == ["submit"]

    run(main)


def test_an_expand_function_may_give_no_companions():
    async def main():
        dit = SimStage(script=echo)
        async with simulated(pipeline(expand=lambda _: ()), SimStage(script=scripts()), dit) as runtime:
            assert list((await runtime.generate([9]))["dit"].token_ids) == [1]

    run(main)


def test_companions_parameters_go_over_those_of_the_request():
    seen = {}

    def note(request):
        seen[role_of(request)] = dict(request.params)
        return (Chunk((1,)), Finish())

    def other(context):
        assert context.params["max_tokens"] == 5
        yield Companion(role="cfg_text", input=context.prompt, sampling={"max_tokens": 1, "seed": 3})

    async def main():
        async with simulated(pipeline(expand=other), SimStage(script=note), SimStage()) as runtime:
            await runtime.generate([9], sampling_params={"max_tokens": 5})

    run(main)
    assert seen == {None: {"max_tokens": 5}, "cfg_text": {"max_tokens": 1, "seed": 3}}


def boom(context):
    raise ValueError("boom")


@pytest.mark.parametrize(
    ("function", "error", "words"),
    [
        (boom, BridgeFailed, "raised ValueError: boom; no stage has seen"),
        (lambda _: [1], BridgeFailed, "gave int"),
        (lambda c: [Companion(role="a", input=c.prompt)] * 2, BridgeFailed, "'a' twice"),
        (lambda c: [Companion(role="", input=c.prompt)], BridgeFailed, "left it empty"),
        (lambda _: [Companion(role="a", input=StageInput())], BridgeFailed, "no input"),
        (lambda c: [Companion(role="a", input=c.prompt, sampling={"max_tokens": 0})], InvalidRequest, "max_tokens"),
    ],
)
def test_an_expand_function_that_goes_wrong_refuses_the_request_before_any_stage_has_seen_it(function, error, words):
    """W-17: all or nothing."""

    async def main():
        ar = SimStage(script=scripts())
        async with simulated(pipeline(expand=function), ar, SimStage()) as runtime:
            with pytest.raises(error, match=words) as caught:
                await runtime.generate([9], request_id="r")
            assert caught.value.request_id == "r"
            assert caught.value.stage == "ar"
            assert runtime.stats().rejected == 1
            assert_empty(runtime)
        assert not ar.log

    run(main)


def test_a_companion_that_the_stage_refuses_fails_the_request_and_leaves_nothing():
    def picky(request):
        if role_of(request) == "cfg_img":
            raise InvalidRequest("too long")
        return (Wait(5), Finish())

    async def main():
        ar = SimStage(script=picky)
        async with simulated(pipeline(), ar, SimStage()) as runtime:
            with pytest.raises(InvalidRequest, match="companion 'cfg_img' was refused: too long"):
                await runtime.generate([9])
            assert_empty(runtime)

    run(main)


def test_many_requests_with_companions_do_not_mix():
    async def main():
        def ar(request):
            base = int(request.request_id.split("-")[0].removeprefix("r")) * 10
            offset = 1 + (ROLES.index(role_of(request)) + 1 if role_of(request) else 0)
            return (Wait((base * offset) % 7), Chunk((base + offset,)), Finish())

        results = {}

        async def ask(runtime, index):
            results[index] = tuple((await runtime.generate([9], request_id=f"r{index}"))["dit"].token_ids)

        pipe = Pipeline([stage("ar", replicas=2), stage("dit", bridge=gather, replicas=2)], expand=expand)
        async with simulated(pipe, SimStage(script=ar), SimStage(script=echo)) as runtime:
            async with trio.open_nursery() as nursery:
                for index in range(20):
                    nursery.start_soon(ask, runtime, index)
            assert_empty(runtime)
        assert results == {i: (10 * i + 1, 10 * i + 2, 10 * i + 3) for i in range(20)}

    run(main)


def test_fail_stop_tells_a_request_with_companions_once():
    async def main():
        heard = []
        with pytest.raises(EngineDied):
            async with simulated(pipeline(), SimStage(script=scripts(cfg_text=(Die(),))), SimStage()) as runtime:
                try:
                    await runtime.generate([9])
                except EngineDied as error:
                    heard.append(error)
                await trio.sleep(math.inf)
        assert len(heard) == 1

    run(main)
