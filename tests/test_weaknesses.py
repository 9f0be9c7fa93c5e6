"""What the compatibility page says of omni_trio and no other test shows, by the page's numbers.

Over simulated stages and virtual time, but for what is said of worker processes and of vLLM's client.
"""

from __future__ import annotations

import gc
import math
import os
import threading
import time
import weakref
from contextlib import asynccontextmanager
from types import NoneType, SimpleNamespace

import numpy as np
import pytest
import trio
import trio.testing

from control_support import begin
from omni_trio.bridges import BridgeContext, Companion, bridge
from omni_trio.errors import (
    BridgeFailed,
    ConfigError,
    EngineDied,
    InvalidRequest,
    NoReplicaAvailable,
    ReplicaLost,
    RequestAborted,
    RequestError,
    ShutDown,
)
from omni_trio.messages import StageInput
from omni_trio.pipeline import Pipeline, StageSpec
from omni_trio.runtime import open_runtime
from omni_trio.stages import ClientStatistics
from omni_trio.testing import Chunk, Die, Error, Finish, KvReady, SimStage, Stall, Wait
from support import P1, P3, assert_empty, run, simulated, stage
from test_runtime_life import CountSteps
from worker_stage import opened

VERDICTS = ("request.finished", "request.failed", "request.aborted", "request.expired")


async def outcome_of(runtime, prompt, **options):
    """The result of a request, or its error."""
    try:
        return await runtime.generate(prompt, **options)
    except RequestError as error:
        return error


# ---- latency and throughput


def test_w2_a_backlog_is_taken_as_it_comes_and_idle_neighbours_cost_nothing():
    """One of twelve replicas puts out 500 batches at one moment of virtual time; all are taken at that moment."""
    batches = []

    async def main():
        steps = [verb for index in range(500) for verb in (Chunk((index,)), Wait(0))]
        pipeline = Pipeline([stage("ar", replicas=12)])
        async with simulated(pipeline, SimStage(script=lambda _: (Wait(1), *steps, Finish()))) as runtime:
            for replica in runtime._orchestrator.replicas():
                deliver = replica.deliver
                replica.deliver = lambda outputs, now, deliver=deliver: (batches.append(now), deliver(outputs, now))
            assert list((await runtime.generate([1]))["ar"].token_ids) == list(range(500))

    run(main)
    assert len(batches) > 100
    assert set(batches) == {1.0}


def test_w3_who_waits_for_a_replica_waits_alone():
    async def main():
        pipeline = Pipeline([stage("a", final_output=True), stage("b", dispatch_timeout=10.0)])
        second = SimStage(script=lambda _: (Die(),))
        async with simulated(pipeline, SimStage(), second, on_engine_death="isolate") as runtime:
            assert isinstance(await outcome_of(runtime, [1]), ReplicaLost)
            async with trio.open_nursery() as nursery:
                waits = begin(nursery, runtime.generate, [1], request_id="waits")
                aborted = begin(nursery, runtime.generate, [1], request_id="aborted")
                await trio.testing.wait_all_tasks_blocked()
                await runtime.generate([1], final_stage="a")
                await runtime.collective_rpc("echo", stages="a")
                await runtime.abort("aborted")
                await trio.testing.wait_all_tasks_blocked()
                assert isinstance(aborted.error, RequestAborted)
                assert trio.current_time() == 0
            assert isinstance(waits.error, NoReplicaAvailable)
            assert waits.at == 10
            assert_empty(runtime)

    run(main)


def test_w4_a_bridge_in_a_thread_delays_no_other_request():
    """It blocks until another request, which came later, has passed the same bridge."""
    passed = threading.Event()

    @bridge(run_in="thread")
    def slow(context: BridgeContext) -> StageInput:
        if context.request_id == "first":
            assert passed.wait(60)
        return StageInput(token_ids=(1,))

    async def main():
        async with simulated(Pipeline([stage("a"), stage("b", bridge=slow)])) as runtime:
            async with trio.open_nursery() as nursery:
                first = begin(nursery, runtime.generate, [1], request_id="first")
                await runtime.generate([1], request_id="second")
                assert first.at is None
                passed.set()
            assert first.error is None

    trio.run(main)  # not on the virtual clock, which would not wait for threads


def test_w6_all_stages_are_told_of_an_abort_at_the_same_time():
    async def main():
        stages = [stage("a", final_output=True), *(stage(name, feed="connector") for name in "bcd")]
        sims = [SimStage(script=lambda _: (Stall(),), abort_time=3.0) for _ in stages]
        async with simulated(Pipeline(stages), *sims) as runtime, trio.open_nursery() as nursery:
            ends = [begin(nursery, runtime.generate, [1], request_id=f"r{index}") for index in range(5)]
            await trio.sleep(1)
            await runtime.abort([f"r{index}" for index in range(5)])
            assert trio.current_time() == 1 + 3
            assert_empty(runtime)
        assert {type(end.error) for end in ends} == {RequestAborted}
        assert [sum(what == "abort" for what, *_ in sim.log) for sim in sims] == [5] * 4

    run(main)


# ---- failures


@pytest.mark.parametrize("made", [[], [StageInput(token_ids=(1,)), StageInput(token_ids=(2,))]])
def test_w13_a_bridge_makes_one_input(made):
    """An empty list is no input and a longer one not several: both fail the request, and the stage has seen none."""

    async def main():
        second = SimStage()
        pipeline = Pipeline([stage("a"), stage("b", bridge=lambda _: made)])
        async with simulated(pipeline, SimStage(), second) as runtime:
            with pytest.raises(BridgeFailed, match="returned list; a bridge returns a StageInput"):
                await runtime.generate([1])
            assert_empty(runtime)
        assert not second.log

    run(main)


def test_w20_a_session_that_is_closed_after_its_last_answer_still_ends():
    def script(request):
        return (Chunk((1,)), Finish()) if request.input.token_ids else (Finish(),)

    async def main():
        async with simulated(P1, SimStage(script=script)) as runtime:
            async with runtime.open_stream() as stream:
                await stream.send([1])
                event = await anext(stream)
                while not event.segment_end:
                    event = await anext(stream)
                await trio.sleep(100)  # nothing is at work any more
                await stream.aclose()
                assert [event.finished async for event in stream] == [True]
            assert runtime.stats().finished == 1
            assert_empty(runtime)

    run(main)


@pytest.mark.parametrize("way", ["chain", "companions", "pair"])
def test_w27_what_no_bridge_will_look_at_any_more_is_let_go_of(way):
    """The last stage is at work for long; what the first ones made for the bridge in between is gone by then."""
    made = []

    def makes(request):
        array = np.zeros(3)
        made.append(weakref.ref(array))
        kv = {"remote_request_id": "p"} if request.kv_transfer is not None else None
        return (Chunk((1,), data={"rows": array}), Wait(1), Finish(kv=kv))

    def look(context: BridgeContext) -> StageInput:
        seen.append((len(context.prefill_data), len(context.data), [len(c.data) for c in context.companions.values()]))
        return StageInput(token_ids=(1,))

    def expand(context):
        return [Companion(role="cfg", input=context.prompt)]

    seen = []
    last = stage("last", bridge=look)
    pipeline = {
        "chain": Pipeline([stage("first"), last]),
        "companions": Pipeline([stage("first"), last], expand=expand),
        "pair": Pipeline([stage("first", role="prefill"), stage("second", role="decode"), last]),
    }[way]

    async def main():
        sims = [SimStage(script=makes) for _ in pipeline.stages[1:]]
        busy = SimStage(script=lambda _: (Wait(1000), Finish()))
        async with simulated(pipeline, *sims, busy) as runtime, trio.open_nursery() as nursery:
            nursery.start_soon(runtime.generate, [1])
            await trio.sleep(10)
            gc.collect()
            assert [ref() for ref in made] == [None] * (1 if way == "chain" else 2)

    run(main)
    assert seen == [{"chain": (0, 1, []), "companions": (0, 1, [1]), "pair": (1, 1, [])}[way]]


# ---- replicas


def test_w35_a_dead_replica_stays_dead_and_is_said_to_be():
    async def main():
        pipeline = Pipeline([stage("a", replicas=2)])
        sim = SimStage(script=lambda r: (Die(),) if r.input.token_ids == (13,) else (Finish(),))
        async with simulated(pipeline, sim, on_engine_death="isolate") as runtime:
            for _ in range(2):
                assert isinstance(await outcome_of(runtime, [13]), ReplicaLost)
            await trio.sleep(3600)
            health = runtime.health()
            assert health.status == "dead"
            assert [(one.state, one.reason) for one in health.replicas] == [("dead", "simulated death")] * 2
            with pytest.raises(NoReplicaAvailable, match=r"look at Runtime\.health"):
                await runtime.generate([1])
            assert trio.current_time() == 3600

    run(main)


class Factory:
    """Opens simulated replicas, and keeps count of it. `stillborn` ones are dead by the time that they are up."""

    def __init__(self, sim=None, *, stillborn=()):
        self.sim = sim or SimStage()
        self.stillborn = stillborn
        self.opened: list[int] = []
        self.closed: list[int] = []

    @asynccontextmanager
    async def __call__(self, context):
        async with self.sim(context) as client:
            self.opened.append(context.replica_id)
            if context.replica_id in self.stillborn:
                client.close()
            try:
                yield client
            finally:
                self.closed.append(context.replica_id)


def test_w36_a_replica_that_is_dead_when_it_is_up_is_no_zombie():
    async def main():
        factory = Factory(stillborn=(0,))
        pipeline = Pipeline([stage("a", replicas=2)])
        async with open_runtime(pipeline, clients={"a": factory}, on_engine_death="isolate") as runtime:
            await trio.testing.wait_all_tasks_blocked()
            assert [one.state for one in runtime.health().replicas] == ["dead", "ready"]
            assert factory.closed == [0]
            assert {(await runtime.generate([1])).metrics[0].replica_id for _ in range(4)} == {1}

    run(main)


@pytest.mark.parametrize("dies", [False, True])
def test_w37_each_slot_has_one_client_which_is_opened_once_and_closed_once(dies):
    async def main():
        factory = Factory(stillborn=(1,) if dies else ())
        pipeline = Pipeline([stage("a", replicas=3)])
        async with open_runtime(pipeline, clients={"a": factory}, on_engine_death="isolate") as runtime:
            for _ in range(5):
                await runtime.generate([1])
        assert sorted(factory.opened) == sorted(factory.closed) == [0, 1, 2]

    run(main)


def test_w38_a_replicas_number_is_that_of_its_slot_whoever_else_has_died():
    async def main():
        sim = SimStage(script=lambda r: (Die(),) if r.input.token_ids == (13,) else (Chunk((1,)), Finish()))
        async with simulated(Pipeline([stage("a", replicas=3)]), sim, on_engine_death="isolate") as runtime:
            await runtime.generate([1])  # by the first, so that the next is for the second
            assert isinstance(await outcome_of(runtime, [13]), ReplicaLost)
            told = [(await runtime.generate([1])).metrics[0].replica_id for _ in range(4)]
            health = [(one.replica_id, one.state) for one in runtime.health().replicas]
        assert health == [(0, "ready"), (1, "dead"), (2, "ready")]
        assert told == [replica for what, _, replica, _ in sim.log][2:] == [2, 0, 2, 0]

    run(main)


def test_w39_a_stage_without_replicas_is_still_the_stage_that_it_is():
    """Asked at the door or behind another stage, it fails the request with its name; statistics list it."""

    async def main():
        pipeline = Pipeline([stage("a"), stage("b", final_output=True), stage("c")])
        second = SimStage(script=lambda _: (Die(),))
        async with simulated(pipeline, SimStage(), second, on_engine_death="isolate") as runtime:
            assert isinstance(await outcome_of(runtime, [1]), ReplicaLost)
            error = await outcome_of(runtime, [1], sampling_params={"b": {"max_tokens": 2}}, request_id="r")
            assert isinstance(error, NoReplicaAvailable)
            assert (error.request_id, error.stage, error.stage_id) == ("r", "b", 1)
            with pytest.raises(InvalidRequest, match="unknown sampling parameter"):
                await runtime.generate([1], sampling_params={"b": {"max_tokns": 2}})
            assert [one.stage for one in runtime.stats().stages] == ["a", "b", "c"]
            assert_empty(runtime)

    run(main)


@pytest.mark.parametrize("said", [-5, 1_000_000])
def test_w41_what_replicas_say_of_their_queues_does_not_choose_among_them(said):
    @asynccontextmanager
    async def boaster(context):
        async with SimStage(script=lambda _: (Wait(1), Finish()))(context) as client:
            if context.replica_id == 0:
                client.statistics = lambda: ClientStatistics(running=said, waiting=said)
            yield client

    async def main():
        async with open_runtime(Pipeline([stage("a", replicas=2)]), clients={"a": boaster}) as runtime:
            async with trio.open_nursery() as nursery:
                for _ in range(6):
                    nursery.start_soon(runtime.generate, [1])
                await trio.testing.wait_all_tasks_blocked()
                assert [one.requests for one in runtime.stats().stages[0].replicas] == [3, 3]

    run(main)


@pytest.mark.parametrize("told", [True, False])
def test_w47_a_stage_is_told_of_the_replica_that_has_the_request_or_of_none(told):
    seen = {}

    def note(request):
        seen[request.input.token_ids] = dict(request.kv_senders)
        return (Finish(),)

    @asynccontextmanager
    async def places(context):
        info = {"host": f"10.0.0.{context.replica_id}", "zmq_port": 1}
        # The second one's engine offers nothing: that is no reason to name the first.
        sender = info if told or context.replica_id == 0 else None
        async with SimStage(script=lambda _: (KvReady(), Finish()), kv_sender=sender)(context) as client:
            yield client

    async def main():
        ar, dit = stage("ar", replicas=2), stage("dit", feed="kv", bridge="original_prompt")
        async with open_runtime(Pipeline([ar, dit]), clients={"ar": places, "dit": SimStage(script=note)}) as runtime:
            for token in range(2):
                await runtime.generate([token])

    run(main)
    second = {"ar": {"host": "10.0.0.1", "zmq_port": 1}} if told else {}
    assert seen == {(0,): {"ar": {"host": "10.0.0.0", "zmq_port": 1}}, (1,): second}


# ---- worker processes and vLLM


def test_w49_an_idle_diffusion_stage_costs_no_steps(zygote):
    """From when the process is up, time passes as soon as nobody has anything to do."""
    clock = trio.testing.MockClock(rate=1.0)

    async def main():
        async with opened(zygote) as denoiser:
            await denoiser.result("r", "x", {"num_inference_steps": 2})
            counter = CountSteps()
            clock.autojump_threshold = 0
            trio.lowlevel.add_instrument(counter)
            await trio.sleep(3600)
            trio.lowlevel.remove_instrument(counter)
            clock.autojump_threshold = math.inf
            assert counter.steps <= 1  # this task's own wake-up

    trio.run(main, clock=clock)


def test_w51_a_worker_in_a_call_hears_an_abort_when_the_call_is_over(zygote, tmp_path):
    """So it is today: a worker process has one thread."""
    door = str(tmp_path / "door")
    os.mkfifo(door)

    async def main():
        async with opened(zygote, "control_targets:Napper", kind="worker") as worker, trio.open_nursery() as nursery:
            call = begin(nursery, worker.client.call, "wait_for", (door,))
            # Opened at this end once the worker has opened it at the other, which it does within the call.
            descriptor = await trio.to_thread.run_sync(os.open, door, os.O_WRONLY)
            await worker.submit("r", door)
            abort = begin(nursery, worker.client.abort, ["r"])
            await trio.testing.wait_all_tasks_blocked()
            assert (call.at, abort.at) == (None, None)
            os.write(descriptor, b"..")  # one for the request, should the worker hear of that before the abort
        os.close(descriptor)
        assert call.value == "got it"
        assert abort.error is None

    trio.run(main)


@pytest.mark.engine
def test_w61_a_message_that_has_only_statistics_counts(monkeypatch):
    from omni_trio.engines.vllm import _engine

    caches = SimpleNamespace(queries=7, hits=3)
    stats = SimpleNamespace(prefix_cache_stats=caches, connector_prefix_cache_stats=None)
    message = SimpleNamespace(utility_output=None, scheduler_stats=stats, outputs=())
    monkeypatch.setattr(_engine._compat, "decode_outputs", lambda _: message)
    client = SimpleNamespace(
        _probe=SimpleNamespace(hear=lambda: None),
        _stats=None,
        _prefix_queries=1,
        _prefix_hits=1,
        _work=SimpleNamespace(ready=[], take=list),
    )
    assert _engine.VllmClient._take(client, [b"", b""])  # type: ignore[arg-type]
    assert (client._stats, client._prefix_queries, client._prefix_hits) == (stats, 8, 4)


# ---- the rest


def test_w54_a_batch_is_one_input_and_never_more_of_one():
    """A stage that takes batches takes its input at once, so a batch can not come as an update."""
    diffusion = {"kind": "diffusion", "target": "a:b"}
    with pytest.raises(ConfigError, match="take their input in pieces"):
        Pipeline([stage("a"), StageSpec(name="b", feed="output", **diffusion)])
    assert "takes its input at once" in (Pipeline([StageSpec(name="b", **diffusion)]).no_sessions or "")

    async def main():
        async with simulated(P1) as runtime, runtime.open_stream() as stream:
            await stream.send([1])
            with pytest.raises(InvalidRequest, match="not a batch"):
                await stream.send(["a", "b"])

    run(main)


def test_w60_durations_are_of_a_clock_that_nobody_sets_and_of_a_whole_session(monkeypatch):
    async def main():
        slow = SimStage(script=lambda r: (Wait(5), Chunk((1,)), Finish()) if r.input.token_ids else (Finish(),))
        async with simulated(P1, slow) as runtime, runtime.open_stream() as stream:
            await stream.send([1])
            await trio.sleep(100)
            monkeypatch.setattr(time, "time", lambda: -1e9)  # somebody sets the clock
            await stream.send([2])
            await stream.aclose()
            (metrics,) = (await stream.result()).metrics
        assert metrics.stage_gen_time_ms == pytest.approx(105_000)
        assert metrics.time_to_first_output_ms == pytest.approx(5000)

    run(main)


def test_w63_what_is_not_the_runtimes_is_not_ended_with_it():
    async def main():
        ticks = []

        async def mine():
            while True:
                await trio.sleep(1)
                ticks.append(trio.current_time())

        async with trio.open_nursery() as nursery:
            nursery.start_soon(mine)
            with pytest.raises(EngineDied):
                async with simulated(P1, SimStage(script=lambda _: (Wait(2), Die()))) as runtime:
                    await runtime.generate([1])
            await trio.sleep(2.5)
            nursery.cancel_scope.cancel()
        assert ticks == [1, 2, 3, 4]

    run(main)


@pytest.mark.parametrize("first", ["end", "death"])
def test_w66_a_request_that_ends_as_its_replica_dies_ends_once(first):
    """Both at one moment of virtual time; and the stage before, which is still at work for it, is slow to let go."""
    trace = []

    def script(request):
        what = request.request_id.split("-")[0]
        late = () if what == first else (Wait(0),) * 3
        return (Wait(5), *late, Finish() if what == "end" else Die())

    async def main():
        pipeline = Pipeline([stage("a"), stage("b", feed="kv", bridge="original_prompt")])
        sims = SimStage(script=lambda _: (KvReady(), Stall()), abort_time=3.0), SimStage(script=script)
        async with simulated(pipeline, *sims, on_engine_death="isolate", instruments=[trace.append]) as runtime:
            async with trio.open_nursery() as nursery:
                end, death = (begin(nursery, runtime.generate, [1], request_id=one) for one in ("end", "death"))
            assert isinstance(death.error, ReplicaLost)
            assert isinstance(end.error, NoneType if first == "end" else ReplicaLost)
            assert_empty(runtime)

    run(main)
    assert sorted(event.request_id for event in trace if event.name in VERDICTS) == ["death", "end"]


@pytest.mark.parametrize("during", ["wait for a replica", "submission"])
def test_w67_an_abort_during_a_forward_leaves_no_orphan(during):
    async def main():
        pipeline = Pipeline([stage("a"), stage("b", dispatch_timeout=20.0), stage("c")])
        second = SimStage(submit_time=10.0, script=lambda r: (Die(),) if r.input.token_ids == (13,) else (Stall(),))
        first = SimStage(script=lambda r: (Chunk(r.input.token_ids), Finish()))
        async with simulated(pipeline, first, second, on_engine_death="isolate") as runtime:
            if during == "wait for a replica":
                assert isinstance(await outcome_of(runtime, [13]), ReplicaLost)
            async with trio.open_nursery() as nursery:
                request = begin(nursery, runtime.generate, [1], request_id="r")
                await trio.sleep(5)
                await runtime.abort("r")
                assert_empty(runtime)
                asked = len(second.log)
                await trio.sleep(3600)
            assert isinstance(request.error, RequestAborted)
            assert len(second.log) == asked
            assert_empty(runtime)

    run(main)


def test_w67_an_abort_during_a_bridge_leaves_no_orphan():
    inside, aborted, over = threading.Event(), threading.Event(), threading.Event()

    @bridge(run_in="thread")
    def slow(context: BridgeContext) -> StageInput:
        inside.set()
        assert aborted.wait(60)
        over.set()
        return StageInput(token_ids=(1,))

    async def main():
        second = SimStage()
        async with simulated(Pipeline([stage("a"), stage("b", bridge=slow)]), SimStage(), second) as runtime:
            async with trio.open_nursery() as nursery:
                request = begin(nursery, runtime.generate, [1], request_id="r")
                await trio.to_thread.run_sync(inside.wait)
                await runtime.abort("r")
                aborted.set()
                await trio.to_thread.run_sync(over.wait)
                await trio.testing.wait_all_tasks_blocked()
            assert isinstance(request.error, RequestAborted)
            assert_empty(runtime)
        assert not second.log

    trio.run(main)  # not on the virtual clock, which would not wait for threads


def test_w68_who_comes_after_a_death_is_told_at_once():
    async def main():
        deaths = []
        with pytest.raises(EngineDied):
            async with simulated(P3, SimStage(script=lambda _: (Die(),))) as runtime:
                with pytest.raises(EngineDied):
                    await runtime.generate([1])
                for _ in range(2):
                    with pytest.raises(ShutDown) as caught:
                        await runtime.generate([1])
                    deaths.append(caught.value.__cause__)
        assert [type(death) for death in deaths] == [EngineDied] * 2
        assert trio.current_time() == 0

    run(main)


def test_w69_a_stage_has_one_number_its_place():
    async def main():
        first = SimStage(script=lambda r: (Chunk(r.input.token_ids), Finish()))
        second = SimStage(script=lambda r: (Error(),) if r.input.token_ids == (13,) else (Chunk((1,)), Finish()))
        trace = []
        async with simulated(P3, first, second, instruments=[trace.append]) as runtime:
            async with runtime.request([1]) as request:
                events = [event async for event in request]
            error = await outcome_of(runtime, [13])
            answers = await runtime.collective_rpc("echo")
            stats = runtime.stats().stages
        for told in (*events, error, *answers, *stats, *(event for event in trace if event.stage)):
            assert P3.stage_id(told.stage) == told.stage_id
        assert {told.stage_id for told in events} == {0, 1, 2}
        assert error.stage_id == 1

    run(main)
