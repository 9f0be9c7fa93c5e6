"""Sessions in worker and diffusion stages: input that comes in segments, whose ends are told."""

from __future__ import annotations

from omni_trio.messages import StageInput
from worker_stage import ENDLESS, opened, run


def test_each_segment_of_a_session_is_denoised_and_its_end_told(zygote):
    async def main():
        async with opened(zygote) as stage:
            await stage.submit("s", "one", last=False, segment_end=True)
            await stage.until(lambda: any(output.segment_end for output in stage.of("s")))
            first = stage.of("s")[-1]
            assert (first.data["text"], first.finished) == ("one", False)
            # Two that come at once are worked off one after the other.
            await stage.update("s", "two", last=False, segment_end=True)
            await stage.update("s", "three", last=False, segment_end=True)
            await stage.until(lambda: sum(output.segment_end for output in stage.of("s")) == 3)
            assert [output.data["text"] for output in stage.of("s") if output.data] == ["one", "two", "three"]
            assert stage.client.statistics().running == 0
            # Nothing is left to do but to close.
            await stage.update("s", StageInput(), last=True)
            await stage.until_finished("s")
            last = stage.of("s")[-1]
            assert (last.finish_reason, last.data, last.segment_end, last.error) == ("stop", None, False, None)
            assert sum(output.finished for output in stage.of("s")) == 1

    run(main)


def test_the_last_segment_may_close_the_session(zygote):
    async def main():
        async with opened(zygote) as stage:
            await stage.submit("s", "one", last=False, segment_end=True)
            await stage.update("s", "two", last=True, segment_end=True)
            await stage.until_finished("s")
            ends = [
                (output.data["text"], output.segment_end, output.finish_reason)
                for output in stage.of("s")
                if output.data
            ]
            assert ends == [("one", True, None), ("two", False, "stop")]

    run(main)


def test_pieces_of_one_segment_are_one_prompt(zygote):
    async def main():
        async with opened(zygote) as stage:
            await stage.submit("s", "al", last=False)
            await stage.update("s", "pha", last=False, segment_end=True)
            await stage.update("s", "be", last=False)
            await stage.update("s", "ta", last=False)
            await stage.update("s", StageInput(), last=True)
            await stage.until_finished("s")
            texts = [(output.data["text"], output.segment_end) for output in stage.of("s") if output.data]
            assert texts == [("alpha", True), ("beta", False)]

    run(main)


def test_a_session_with_a_plain_worker(zygote):
    async def main():
        async with opened(zygote, "Pieces", kind="worker") as stage:
            await stage.submit("s", StageInput(token_ids=(1, 2)), last=False, segment_end=True)
            await stage.update("s", StageInput(token_ids=(3,)), last=False)
            await stage.update("s", StageInput(), last=False, segment_end=True)
            await stage.update("s", StageInput(token_ids=(4,)), last=True, segment_end=True)
            await stage.until_finished("s")
            told = [(tuple(o.token_ids), o.segment_end, o.finish_reason) for o in stage.of("s")]
            # A worker that does not say which reply is its last has the end told by itself.
            assert told == [
                ((1,), False, None),
                ((2,), False, None),
                ((), True, None),
                ((3,), False, None),
                ((), True, None),
                ((4,), False, None),
                ((), False, "stop"),
            ]

    run(main)


def test_a_session_with_a_function_is_called_once_per_segment(zygote):
    async def main():
        async with opened(zygote, "pieces_of", kind="worker") as stage:
            await stage.submit("s", "a", last=False)
            await stage.update("s", "b", last=False, segment_end=True)
            await stage.update("s", "c", last=False, segment_end=True)
            await stage.update("s", StageInput(), last=True)
            await stage.until_finished("s")
            assert "".join(output.text for output in stage.of("s")) == "ab$c$"
            assert sum(output.segment_end for output in stage.of("s")) == 2

    run(main)


def test_a_session_may_be_aborted_in_the_middle(zygote):
    async def main():
        async with opened(zygote, options={"step_time": 0.001}) as stage:
            await stage.submit("s", "one", ENDLESS, last=False, segment_end=True)
            await stage.update("s", "two", last=False, segment_end=True)
            await stage.until(lambda: stage.steps("s") > 2)
            await stage.client.abort(["s"])
            await stage.update("s", "late", last=False, segment_end=True)
            assert (await stage.result("other", "x")).finish_reason == "stop"
            assert not any(output.segment_end for output in stage.outputs)
            assert (stage.client.statistics().running, stage.client.statistics().waiting) == (0, 0)

    run(main)


def test_what_is_done_is_not_to_blame_for_what_fails_later(zygote):
    async def main():
        async with opened(zygote, "DoneThenFails", kind="worker") as stage:
            await stage.submit("first", "x", last=False, segment_end=True)
            await stage.until(lambda: bool(stage.of("first")))
            failed = await stage.result("second", "x")
            assert "too late for the first" in failed.error
            done = stage.of("first")[-1]
            assert (done.text, done.segment_end, done.finished) == ("well", True, False)
            await stage.update("first", StageInput(), last=True)
            await stage.until_finished("first")
            assert stage.of("first")[-1].finish_reason == "stop"

    run(main)
