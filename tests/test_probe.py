from __future__ import annotations

import trio
import trio.testing

from omni_trio.engines.probe import Probe
from support import run


class Replica:
    """Answers after a while, or never."""

    def __init__(self, probe: Probe, *, answers_after: float) -> None:
        self.probe = probe
        self.answers_after = answers_after
        self.asked: list[float] = []

    async def ask(self) -> None:
        self.asked.append(trio.current_time())
        await trio.sleep(self.answers_after)
        self.probe.hear()


def test_without_work_it_sleeps_for_ever():
    async def main():
        probe = Probe(5, 30)
        with trio.move_on_after(10_000):
            await probe.until_mute(Replica(probe, answers_after=1e9).ask)
        assert trio.current_time() == 10_000

    run(main)


def test_a_silent_replica_with_work_is_asked_and_then_mute():
    async def main():
        probe = Probe(5, 30)
        replica = Replica(probe, answers_after=1e9)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(probe.until_mute, replica.ask)
            await trio.sleep(100)
            probe.work(busy=True)
        assert replica.asked == [105]
        assert trio.current_time() == 135 == 100 + probe.patience

    run(main)


def test_one_that_answers_or_speaks_by_itself_is_not_mute():
    async def main():
        probe = Probe(5, 30)
        replica = Replica(probe, answers_after=29)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(probe.until_mute, replica.ask)
            await trio.testing.wait_all_tasks_blocked()
            probe.work(busy=True)
            for _ in range(10):
                await trio.sleep(4)
                probe.hear()
            assert replica.asked == []
            await trio.sleep(5 + 29 + 5 + 1)
            assert replica.asked == [45, 79]
            probe.work(busy=False)
            await trio.sleep(10_000)
            assert replica.asked == [45, 79]
            nursery.cancel_scope.cancel()

    run(main)


def test_work_that_ends_while_it_is_asked_is_no_death():
    async def main():
        probe = Probe(5, 30)
        replica = Replica(probe, answers_after=1e9)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(probe.until_mute, replica.ask)
            await trio.testing.wait_all_tasks_blocked()
            probe.work(busy=True)
            await trio.sleep(6)
            probe.work(busy=False)
            await trio.sleep(1000)
            assert replica.asked == [5]
            nursery.cancel_scope.cancel()

    run(main)
