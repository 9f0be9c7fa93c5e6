"""Operating worker stages: real processes."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import attrs
import pytest
import trio
import trio.testing

from control_support import activities, begin
from omni_trio._api import open_runtime
from omni_trio.errors import EngineDied, OperationFailed, RequestAborted
from omni_trio.pipeline import Pipeline, StageSpec

HERE = str(Path(__file__).parent)


def napper(**fields) -> Pipeline:
    return Pipeline(
        [
            StageSpec(
                name="napper",
                kind="worker",
                target="control_targets:Napper",
                modality="text",
                path=(HERE,),
                start_timeout=60.0,
                **fields,
            )
        ]
    )


@asynccontextmanager
async def running(zygote, **fields):
    with trio.fail_after(120):
        async with open_runtime(napper(**fields), zygote=zygote, on_engine_death="isolate") as runtime:
            yield runtime


@attrs.frozen
class Pipe:
    """A named pipe that workers take bytes from, one each; who finds none waits."""

    path: str
    descriptor: int

    def release(self, count: int = 1) -> None:
        """Let so many go on."""
        assert os.write(self.descriptor, b"." * count) == count


@pytest.fixture
def pipe(tmp_path: Path) -> Iterator[Pipe]:
    path = str(tmp_path / "pipe")
    os.mkfifo(path)
    descriptor = os.open(path, os.O_RDWR)  # open at both ends, so that nobody's open() waits
    yield Pipe(path, descriptor)
    os.close(descriptor)


async def heard(runtime, method, *args):
    return [(one.result, one.error) for one in await runtime.collective_rpc(method, args, timeout=60)]


def test_u67_pause_waits_for_the_batch_of_a_worker(zygote, pipe):
    async def main():
        async with running(zygote) as runtime, trio.open_nursery() as nursery:
            end = begin(nursery, runtime.generate, pipe.path)
            await trio.testing.wait_all_tasks_blocked()
            with pytest.raises(OperationFailed, match="it has 1 in hand"):
                # The worker computes until the pipe is written to: no time would do.
                await runtime.pause(deadline=0.05)
            pause = begin(nursery, runtime.pause)
            await trio.testing.wait_all_tasks_blocked()
            assert pause.at is None
            pipe.release()
        assert end.value.text == "done"
        assert pause.error is None

    trio.run(main)


def test_a_worker_that_does_not_come_to_an_end_is_not_idle_though_nothing_is_in_flight(zygote, pipe):
    """An abort is acknowledged once the worker hears it; that its batch is over shows in the answer to a call."""

    async def main():
        async with running(zygote, probe_timeout=1000.0) as runtime, trio.open_nursery() as nursery:
            busy = begin(nursery, runtime.collective_rpc, "wait_for", (pipe.path,))
            await trio.testing.wait_all_tasks_blocked()
            with pytest.raises(OperationFailed, match="was not answered") as caught:
                await runtime.pause(deadline=0.05)
            assert not caught.value.results[0].answered
            assert runtime.stats().phase == "pausing"
            pipe.release()
            await runtime.pause()
            assert runtime.stats().phase == "paused"
            await runtime.resume()
        assert busy.value[0].result == "got it"

    trio.run(main)


def test_u66_a_worker_with_the_methods_sleeps_where_it_is_named(zygote, pipe):
    async def main():
        async with running(zygote, replicas=2) as runtime, trio.open_nursery() as nursery:
            slept = await runtime.sleep(2, stages="napper")
            assert [(one.replica_id, one.result) for one in slept] == [(0, True), (1, True)]
            assert activities(runtime) == ["asleep", "asleep"]
            end = begin(nursery, runtime.generate, pipe.path)
            assert await heard(runtime, "done") == [(["sleep 2"], None)] * 2
            woken = await runtime.wake(["weights"])
            assert [one.result for one in woken] == [True, True]
            assert await heard(runtime, "done") == [(["sleep 2", "wake ['weights']"], None)] * 2
            assert end.at is None
            await runtime.resume()
            pipe.release()
        assert end.value.text == "done"

    trio.run(main)


def test_u23_a_worker_that_dies_in_a_call_fails_its_waiters_and_no_others(zygote, pipe):
    async def main():
        async with running(zygote, replicas=3) as runtime, trio.open_nursery() as nursery:
            victim, *others = [replica.client for replica in runtime._orchestrator.pools[0].replicas]
            calls = begin(nursery, runtime.collective_rpc, "wait_for", (pipe.path,), timeout=60)
            left = trio.CancelScope()

            async def leave() -> None:
                with left:
                    await runtime.collective_rpc("wait_for", (pipe.path,), timeout=60)

            nursery.start_soon(leave)
            await trio.testing.wait_all_tasks_blocked()
            changed = runtime._orchestrator.pools[0]._changed
            os.kill(victim.statistics().pid, signal.SIGKILL)
            await changed.wait()
            left.cancel()
            pipe.release(4)  # for what nobody waits for any more, too
        assert [type(one.error) for one in calls.value] == [EngineDied, type(None), type(None)]
        assert left.cancelled_caught
        for client in (victim, *others):
            assert not client._calls

    trio.run(main)


def test_u23_a_late_answer_is_nobody_elses(zygote, pipe):
    async def main():
        async with running(zygote) as runtime:
            (late,) = await runtime.collective_rpc("wait_for", (pipe.path,), timeout=0.05)
            assert not late.answered
            pipe.release()
            assert await heard(runtime, "done") == [([], None)]
            assert not runtime._orchestrator.pools[0].replicas[0].client._calls

    trio.run(main)


def test_abort_ends_what_a_worker_has_in_hand(zygote, pipe):
    async def main():
        async with running(zygote) as runtime, trio.open_nursery() as nursery:
            ends = [begin(nursery, runtime.generate, pipe.path) for _ in range(2)]
            await trio.testing.wait_all_tasks_blocked()
            pause = begin(nursery, runtime.pause, "abort")
            await trio.testing.wait_all_tasks_blocked()
            assert pause.at is None  # the worker computes, and has not heard of it
            pipe.release()
        assert pause.error is None
        assert [type(end.error) for end in ends] == [RequestAborted, RequestAborted]

    trio.run(main)
