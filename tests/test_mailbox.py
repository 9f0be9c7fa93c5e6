from __future__ import annotations

from collections import deque

import numpy as np
import pytest
import trio
import trio.testing

from omni_trio.errors import RequestAborted, StageFailed
from omni_trio.messages import StageOutput
from omni_trio.runtime._mailbox import Mailbox
from omni_trio.stages import Leg, StagePool
from support import P3, run


def make_leg(stage_id: int = 0, *, modality: str = "text") -> Leg:
    pool = StagePool(P3.stages[stage_id], stage_id)
    return Leg(
        owner=None,
        replica=pool.replicas[0],
        request_id="r-1",
        external_id="r",
        stage=pool.spec.name,
        stage_id=stage_id,
        modality=modality,
        emits=True,
        collects=False,
        streams=False,
    )


def out(*tokens: int, text: str = "", finish: str | None = None, data=None) -> StageOutput:
    return StageOutput(request_id="r-1", token_ids=tokens, text=text, finish_reason=finish, data=data)


def test_deltas_merge_while_nobody_reads_and_nothing_is_lost():
    async def main():
        box, leg = Mailbox(), make_leg()
        for token in range(1000):
            box.put(leg, out(token, text=f"{token} "))
        box.put(leg, out(1000, text="1000", finish="stop"))
        box.close()
        event = await box.take()
        assert list(event.token_ids) == list(range(1001))
        assert event.text == " ".join(map(str, range(1001)))
        assert event.finished
        assert event.finish_reason == "stop"
        assert await box.take() is None

    run(main)


def test_one_entry_per_stage_however_slow_the_consumer():
    box, first, second = Mailbox(), make_leg(0), make_leg(2)
    for token in range(500):
        box.put(first, out(token))
        box.put(second, out(token))
    assert len(box._entries) == 2


def test_stages_keep_apart_and_come_in_the_order_of_their_oldest_output():
    async def main():
        box, first, second = Mailbox(), make_leg(0), make_leg(2, modality="audio")
        box.put(second, out(data={"audio": np.ones(2)}))
        box.put(first, out(1, text="a"))
        box.put(second, out(data={"audio": np.zeros(1)}))
        event = await box.take()
        assert event.stage == "vocoder"
        assert event.delta.tolist() == [1, 1, 0]
        assert (await box.take()).delta == "a"

    run(main)


def test_an_error_comes_after_what_came_before_it_and_again_whenever_it_is_asked_for():
    async def main():
        box, leg = Mailbox(), make_leg()
        box.put(leg, out(1, text="a"))
        box.close(StageFailed("broken"))
        box.close(RequestAborted("too late to count"))
        assert (await box.take()).text == "a"
        for _ in range(2):
            with pytest.raises(StageFailed, match="broken"):
                await box.take()
            with pytest.raises(StageFailed, match="broken"):
                await box.take_all()

    run(main)


def test_completions_keep_apart_and_the_stages_last_word_comes_last():
    async def main():
        box, leg = Mailbox(), make_leg()
        for index in (0, 1, 0, 1, 2):
            box.put(leg, StageOutput(request_id="r-1", index=index, token_ids=(index,)))
        box.put(leg, StageOutput(request_id="r-1", index=1, completion_finish_reason="stop"))
        box.put(leg, StageOutput(request_id="r-1", index=2, completion_finish_reason="stop"))
        box.put(leg, StageOutput(request_id="r-1", index=0, token_ids=(9,), finish_reason="length"))
        box.close()
        events = [await box.take() for _ in range(3)]
        assert [(e.index, list(e.token_ids), e.finish_reason, e.finished) for e in events] == [
            (1, [1, 1], "stop", False),
            (2, [2], "stop", False),
            (0, [0, 0, 9], "length", True),
        ]
        assert await box.take() is None

    run(main)


def test_segments_of_a_session_keep_apart():
    async def main():
        box, leg = Mailbox(), make_leg()
        leg.segments = deque((0, 1))
        box.put(leg, StageOutput(request_id="r-1", token_ids=(1,)))
        box.put(leg, StageOutput(request_id="r-1", token_ids=(2,), segment_end=True))
        leg.segments.popleft()
        box.put(leg, StageOutput(request_id="r-1", token_ids=(3,), finish_reason="stop"))
        box.close()
        events = [await box.take() for _ in range(2)]
        assert [(e.segment, list(e.token_ids), e.segment_end, e.finished) for e in events] == [
            (0, [1, 2], True, False),
            (1, [3], False, True),
        ]

    run(main)


def test_only_the_newest_progress_waits():
    async def main():
        box, leg = Mailbox(), make_leg()
        for step in range(1, 100):
            box.put_progress(leg, StageOutput(request_id="r-1", progress=(step, 99)))
        assert len(box._entries) == 1
        event = await box.take()
        assert (event.step, event.total, event.stage) == (99, 99, leg.stage)

    run(main)


def test_what_waits_can_be_drained_or_dropped():
    box, leg = Mailbox(), make_leg()
    box.put(leg, out(1))
    (event,) = box.drain()
    assert list(event.token_ids) == [1]
    assert box.drain() == []
    box.put(leg, out(2))
    box.drop()
    assert box.drain() == []


def test_discard_throws_away_what_waits():
    async def main():
        box, leg = Mailbox(), make_leg()
        box.put(leg, out(1))
        box.close(RequestAborted("aborted"), discard=True)
        with pytest.raises(RequestAborted):
            await box.take()

    run(main)


def test_cancelling_a_take_loses_nothing():
    async def main():
        box, leg = Mailbox(), make_leg()
        with trio.move_on_after(1):
            await box.take()
        box.put(leg, out(7))
        with trio.CancelScope() as scope:
            scope.cancel()
            await box.take()
        assert list((await box.take()).token_ids) == [7]

    run(main)


def test_two_consumers_are_refused():
    async def main():
        box = Mailbox()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(box.take)
            await trio.testing.wait_all_tasks_blocked()
            with pytest.raises(trio.BusyResourceError):
                await box.take()
            box.close()

    run(main)


class Steps(trio.abc.Instrument):
    """Counts how often each task is run."""

    def __init__(self) -> None:
        self.count: dict[str, int] = {}

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        self.count[task.name] = self.count.get(task.name, 0) + 1


def test_take_all_wakes_once_at_the_end():
    async def main():
        box, leg, steps = Mailbox(), make_leg(), Steps()
        events = []

        async def consumer():
            events.extend(await box.take_all())

        async with trio.open_nursery() as nursery:
            nursery.start_soon(consumer, name="consumer")
            await trio.testing.wait_all_tasks_blocked()
            trio.lowlevel.add_instrument(steps)
            for token in range(5):
                box.put(leg, out(token))
                await trio.testing.wait_all_tasks_blocked()
            assert "consumer" not in steps.count
            box.close()
        assert [list(event.token_ids) for event in events] == [[0, 1, 2, 3, 4]]
        assert steps.count["consumer"] == 1

    run(main)
