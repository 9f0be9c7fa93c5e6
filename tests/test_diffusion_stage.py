"""Diffusion stages: denoising workers in real processes, behind their client."""

from __future__ import annotations

import os
import signal
from typing import Any

import numpy as np
import pytest
import trio

from omni_trio.errors import EngineDied, InvalidRequest, StageFailed, StartupFailed
from omni_trio.messages import StageInput, StageRequest
from omni_trio.stages import ReplicaContext
from omni_trio.worker import WorkItem
from worker_stage import ENDLESS, opened, run, spec
from worker_targets import Denoiser

# ---- one request


def test_progress_is_told_after_every_step_and_then_the_result(zygote):
    async def main():
        async with opened(zygote) as stage:
            await stage.result("a", "word", {"num_inference_steps": 5, "seed": 1})
            *steps, last = stage.of("a")
            assert [output.progress for output in steps] == [(step, 5) for step in range(1, 6)]
            assert not any(output.finished or output.data for output in steps)
            assert (last.finish_reason, last.progress, last.segment_end) == ("stop", None, False)
            assert last.data["steps"] == 5
            # The noise of the seed, halved five times, each time with the prompt's length added.
            noise = np.random.default_rng(1).standard_normal((3, 4))
            expected = noise
            for _ in range(5):
                expected = 0.5 * expected + 4
            assert np.array_equal(last.data["image"], expected)

    run(main)


def test_steps_come_from_the_caller_the_stage_or_the_worker(zygote):
    async def main():
        async with opened(zygote) as stage:
            assert (await stage.result("a", "x")).data["steps"] == 3
        async with opened(zygote, sampling={"num_inference_steps": 2}) as stage:
            assert (await stage.result("a", "x")).data["steps"] == 2
            assert (await stage.result("b", "x", {"num_inference_steps": 4})).data["steps"] == 4

    run(main)


def test_parameters_and_kv_senders_reach_the_worker(zygote):
    async def main():
        async with opened(zygote, sampling={"seed": 3, "eta": 0.5}) as stage:
            given = {"seed": 4, "cfg_kv_request_ids": {"cfg_text": "a-1"}, "own": [1, {"two": 2}]}
            senders = {"thinker": {"host": "localhost", "zmq_port": 7}}
            data = (await stage.result("a", "x", given, kv_senders=senders)).data
            assert data["params"] == {**given, "eta": 0.5}
            assert data["kv_senders"] == senders
            # A request without parameters has the stage's own.
            await stage.client.submit(StageRequest(request_id="b", input=StageInput(text="x")))
            await stage.until_finished("b")
            assert stage.of("b")[-1].data["params"] == {"seed": 3, "eta": 0.5}

    run(main)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("bad prepare", "ValueError: the prompt can not be encoded"),
        ("bad step", "ValueError: the noise is too loud"),
        ("bad finish", "ValueError: the image can not be decoded"),
        ("nothing", "no image was produced"),
    ],
)
def test_what_goes_wrong_with_a_request_is_its_own(zygote, text, words):
    async def main():
        async with opened(zygote, options={"step_time": 0.001}) as stage:
            await stage.submit("beside", "x", ENDLESS)
            await stage.until(lambda: stage.steps("beside") > 0)
            failed = await stage.result("bad", text)
            assert failed.error is not None
            assert words in failed.error
            assert failed.finish_reason == "error"
            assert sum(output.finished for output in stage.of("bad")) == 1
            before = stage.steps("beside")
            await stage.until(lambda: stage.steps("beside") > before + 3)
            assert (await stage.result("after", "x")).finish_reason == "stop"
            await stage.client.abort(["beside"])
            if text != "bad prepare":
                assert any(together == {"beside", "bad"} for together, _ in await stage.runs())

    run(main)


def test_in_a_batch_one_bad_prompt_fails_the_request_as_one(zygote):
    async def main():
        async with opened(zygote) as stage:
            for text in ("bad prepare", "bad step", "bad finish", "nothing"):
                batch = StageInput(batch=(StageInput(text="good"), StageInput(text=text)))
                failed = await stage.result(text, batch)
                assert failed.error is not None
                assert not any(output.data for output in stage.of(text))
                if text == "nothing":
                    assert "sample 1 of 2" in failed.error
            assert (await stage.result("after", "x")).finish_reason == "stop"

    run(main)


# ---- several requests: joining and leaving


def test_a_request_joins_between_two_steps_and_leaves_when_it_is_done(zygote):
    async def main():
        async with opened(zygote, options={"step_time": 0.001}) as stage:
            await stage.submit("long", "x", ENDLESS)
            await stage.until(lambda: stage.steps("long") >= 2)
            await stage.result("short", "x", {"num_inference_steps": 7})
            before = stage.steps("long")
            await stage.until(lambda: stage.steps("long") > before)
            await stage.client.abort(["long"])
            (alone, first), (both, together), (again, rest) = await stage.runs()
            assert (alone, both, again) == ({"long"}, {"long", "short"}, {"long"})
            assert first >= 2
            assert together == 7
            assert rest >= 1

    run(main)


def test_an_aborted_request_drops_out_between_two_steps_and_the_others_go_on(zygote):
    async def main():
        async with opened(zygote, options={"step_time": 0.001}) as stage:
            await stage.submit("stays", "x", ENDLESS)
            await stage.submit("goes", "x", ENDLESS)
            await stage.until(lambda: stage.steps("goes") >= 5)
            await stage.client.abort(["goes"])
            heard = len(stage.of("goes"))
            # What had come by when the abort was acknowledged: an upper bound of the steps done by then.
            stage.outputs += await stage.client.receive()
            acknowledged = stage.steps("stays")
            await stage.until(lambda: stage.steps("stays") >= acknowledged + 50)
            assert len(stage.of("goes")) == heard
            await stage.client.abort(["stays"])
            *_, (both, together), (alone, after) = await stage.runs()
            assert (both, alone) == ({"stays", "goes"}, {"stays"})
            assert 5 <= together <= acknowledged
            assert after >= 49
            assert (stage.client.statistics().running, stage.client.statistics().waiting) == (0, 0)

    run(main)


def test_no_more_than_the_maximum_are_at_work_together_and_the_rest_waits(zygote):
    async def main():
        async with opened(zygote, options={"step_time": 0.001, "max_batch_size": 2}) as stage:
            for name in ("a", "b", "c"):
                await stage.submit(name, "x", ENDLESS)
            await stage.until(lambda: stage.steps("b") > 2)
            assert stage.steps("c") == 0
            assert (stage.client.statistics().running, stage.client.statistics().waiting) == (2, 1)
            await stage.client.abort(["a"])
            await stage.until(lambda: stage.steps("c") > 2)
            await stage.client.abort(["b", "c"])
            assert max(len(together) for together, _ in await stage.runs()) == 2

    run(main)


def test_a_call_is_answered_however_many_requests_come(zygote):
    async def main():
        async with opened(zygote, options={"step_time": 0.001}) as stage:
            await stage.submit("before", "x", ENDLESS)
            await stage.until(lambda: stage.steps("before") > 0)
            answers = []

            async def call():
                answers.append(await stage.runs())

            async with trio.open_nursery() as nursery:
                nursery.start_soon(call)
                # Each output that is waited for gives the call its turn.
                sent = stage.steps("before") + 3
                await stage.until(lambda: stage.steps("before") >= sent)
                # While a call waits nobody joins, so that there is an end to the batch that it waits for.
                await stage.submit("after", "x", {"num_inference_steps": 1000})
                sent = stage.steps("before") + 20
                await stage.until(lambda: stage.steps("before") >= sent)
                assert stage.steps("after") == 0
                await stage.client.abort(["before"])
            await stage.until(lambda: stage.steps("after") > 0)
            assert [together for together, _ in answers[0]] == [{"before"}]

    run(main)


def test_the_parts_of_the_loop_are_not_to_be_called_from_outside(zygote):
    async def main():
        async with opened(zygote) as stage:
            for method in ("prepare", "step", "finish", "num_steps", "process", "close"):
                with pytest.raises(StageFailed, match="no method"):
                    await stage.client.call(method)

    run(main)


def test_any_worker_can_have_requests_join(zygote):
    async def main():
        async with opened(zygote, "Counted", kind="worker") as stage:
            await stage.submit("long", "1000000000")
            await stage.until(lambda: bool(stage.of("long")))
            await stage.result("short", "3")
            assert [output.data["size"] for output in stage.of("short")] == [2, 2, 2]
            assert [output.finish_reason for output in stage.of("short")] == [None, None, "stop"]
            await stage.client.abort(["long"])

    run(main)


# ---- batch inputs


def test_a_batch_is_one_request_and_its_results_are_in_order(zygote):
    async def main():
        prompts = ["one", "three", "fives", "sevens", "x"]
        async with opened(zygote) as stage:
            alone = [await stage.result(f"p{i}", text, {"seed": 9}) for i, text in enumerate(prompts)]
            batch = StageInput(batch=tuple(StageInput(text=text) for text in prompts))
            together = await stage.result("batch", batch, {"seed": 9})
            assert together.data["text"] == prompts
            for image, one in zip(together.data["image"], alone, strict=True):
                assert np.array_equal(image, one.data["image"])
            assert together.finish_reason == "stop"
            # One after each call of step(): five samples in calls of four make two calls for each of three steps.
            assert [o.progress for o in stage.of("batch")[:-1]] == [(0, 3), (1, 3), (1, 3), (2, 3), (2, 3), (3, 3)]

    run(main)


def test_several_outputs_per_prompt(zygote):
    async def main():
        async with opened(zygote) as stage:
            params = {"seed": 5, "num_outputs_per_prompt": 2}
            batch = StageInput(batch=(StageInput(text="a"), StageInput(text="bb")))
            data = (await stage.result("batch", batch, params)).data
            assert (data["text"], data["seed"]) == (["a", "a", "bb", "bb"], [5, 6, 5, 6])
            assert len({image.tobytes() for image in data["image"]}) == 4
            data = (await stage.result("plain", "a", params)).data
            assert data["seed"] == [5, 6]

    run(main)


def test_a_batch_of_one_gives_a_list_of_one(zygote):
    async def main():
        async with opened(zygote) as stage:
            data = (await stage.result("batch", StageInput(batch=(StageInput(text="a"),)), {"seed": 5})).data
            single = (await stage.result("plain", "a", {"seed": 5})).data
            (image,) = data["image"]
            assert np.array_equal(image, single["image"])
            assert single["image"].shape == (3, 4)

    run(main)


def test_a_plain_worker_in_a_diffusion_stage_gets_the_batch_itself(zygote):
    async def main():
        async with opened(zygote, "texts_of_batch") as stage:
            arrays = {"image": np.arange(2000.0)}
            batch = StageInput(batch=(StageInput(text="a"), StageInput(text="b", data=arrays)))
            data = (await stage.result("batch", batch)).data
            assert data["texts"] == ["a", "b"]
            assert np.array_equal(data["image"], arrays["image"])

    run(main)


@pytest.mark.parametrize(
    ("kind", "given", "words"),
    [
        ("worker", StageInput(batch=(StageInput(text="a"),)), "takes no batch"),
        ("diffusion", StageInput(batch=()), "at least one"),
        ("diffusion", StageInput(batch=(StageInput(batch=(StageInput(text="a"),)),)), "within a batch"),
        ("diffusion", StageInput(text="a", batch=(StageInput(text="b"),)), "beside it"),
    ],
)
def test_batches_that_can_not_be(zygote, kind, given, words):
    async def main():
        async with opened(zygote, "shout", kind=kind) as stage:
            with pytest.raises(InvalidRequest, match=words) as caught:
                await stage.submit("a", given)
            assert (caught.value.request_id, caught.value.stage) == ("a", "denoiser")
            assert stage.client.statistics().waiting == 0

    run(main)


# ---- seeds


def test_an_equal_seed_makes_an_equal_image_whatever_else_is_at_work(zygote):
    async def main():
        async with opened(zygote, options={"step_time": 0.001}) as stage:
            params = {"seed": 77, "num_inference_steps": 6}
            alone = (await stage.result("alone", "cat", params)).data["image"]
            await stage.submit("long", "x", ENDLESS)
            await stage.submit("longer", StageInput(batch=(StageInput(text="y"),) * 3), ENDLESS)
            await stage.until(lambda: stage.steps("long") > 3)
            beside = (await stage.result("beside", "cat", params)).data["image"]
            await stage.client.abort(["long", "longer"])
            batch = StageInput(batch=(StageInput(text="dog"), StageInput(text="cat")))
            within = (await stage.result("within", batch, params)).data["image"][1]
            assert alone.tobytes() == beside.tobytes() == within.tobytes()
            other = (await stage.result("other", "cat", {**params, "seed": 78})).data["image"]
            assert other.tobytes() != alone.tobytes()

    run(main)


def test_without_a_seed_each_request_has_its_own(zygote):
    async def main():
        async with opened(zygote) as stage:
            seeds = [(await stage.result(f"r{i}", "x", {"seed": None})).data["seed"] for i in range(3)]
            assert len(set(seeds)) == 3
            assert all(0 <= seed < 1 << 63 for seed in seeds)
            again = await stage.result("again", "x", {"seed": seeds[0]})
            assert np.array_equal(again.data["image"], stage.of("r0")[-1].data["image"])

    run(main)


# ---- what is refused


class SamplingParams:
    """Of another kind of stage."""


@pytest.mark.parametrize(
    ("params", "words"),
    [
        (SamplingParams(), "as a mapping, not as SamplingParams"),
        ([("seed", 1)], "as a mapping, not as list"),
        ({1: 2}, "must be strings"),
        ({"num_inference_steps": 0}, "num_inference_steps must be a whole number from 1 up, not 0"),
        ({"num_inference_steps": 2.0}, "num_inference_steps"),
        ({"num_inference_steps": True}, "num_inference_steps"),
        ({"num_outputs_per_prompt": 0}, "num_outputs_per_prompt"),
        ({"height": "16"}, "height"),
        ({"width": -1}, "width"),
        ({"seed": "x"}, "seed"),
        ({"seed": -1}, "seed"),
        ({"seed": 1 << 63}, "seed"),
        ({"guidance_scale": "much"}, "guidance_scale must be a number"),
        ({"guidance_scale": float("nan")}, "guidance_scale"),
        ({"cfg_kv_request_ids": ["a"]}, "cfg_kv_request_ids"),
        ({"cfg_kv_request_ids": {"cfg_text": 1}}, "cfg_kv_request_ids"),
        ({"mask": object()}, "can not be sent"),
    ],
)
def test_parameters_that_are_refused(params, words, client):
    with pytest.raises(InvalidRequest, match=words) as caught:
        client.resolve_params(params)
    assert caught.value.stage == "denoiser"


def test_parameters_that_are_taken(client):
    given = {"seed": np.int64(0), "guidance_scale": 7, "height": None, "own": "x", "num_inference_steps": 1}
    assert client.resolve_params(given) == given
    assert client.resolve_params(None) == {}


@pytest.fixture(scope="module")
def client():
    """A client that is asked about parameters only, which takes neither a process nor a run of trio."""
    from omni_trio.engines.worker import WorkerClient

    async def make():
        context = ReplicaContext(
            stage=spec("Denoiser"),
            stage_id=0,
            replica_id=0,
            want_text=True,
            report=lambda _: None,
            close_timeout=5.0,
        )
        return WorkerClient(context, None, None)

    return trio.run(make)


def test_the_stages_own_parameters_are_checked_before_anything_is_started(zygote):
    async def main():
        with pytest.raises(StartupFailed, match=r"stages\.denoiser\.sampling: num_inference_steps") as caught:
            async with opened(zygote, sampling={"num_inference_steps": "many"}):
                pytest.fail("it must not open")
        assert caught.value.phase == "config"

    run(main)


# ---- death


def test_a_kill_amid_denoising_is_told_with_its_cause(zygote):
    async def main():
        async with opened(zygote, options={"step_time": 0.001}) as stage:
            for name in ("a", "b"):
                await stage.submit(name, "x", ENDLESS)
            await stage.until(lambda: stage.steps("a") > 3 and stage.steps("b") > 3)
            os.kill(stage.client.statistics().pid, signal.SIGKILL)
            with pytest.raises(EngineDied, match="SIGKILL") as caught:
                await stage.until(lambda: False)
            assert caught.value.exit_code == -signal.SIGKILL
            with pytest.raises(EngineDied):
                await stage.submit("late", "x")
            assert not any(output.finished for output in stage.outputs)

    run(main)


# ---- the loop by itself


def item(request_id: str, text: str, **params: Any) -> WorkItem:
    return WorkItem(request_id=request_id, input=StageInput(text=text), last=True, params=params, state={})


def test_the_loop_needs_no_process():
    batch = [item("a", "x", num_inference_steps=1), item("b", "x", num_inference_steps=2)]
    told = [(item.request_id, reply.progress, reply.done) for item, reply in Denoiser().process(batch)]
    assert told == [
        ("a", (1, 1), False),
        ("b", (1, 2), False),
        ("a", None, True),
        ("b", (2, 2), False),
        ("b", None, True),
    ]


def test_a_failing_step_is_tried_alone_from_the_same_states():
    batch = [item("a", "x", seed=1), item("bad", "bad step"), item("c", "x", seed=1)]
    ends = {item.request_id: reply for item, reply in Denoiser().process(batch) if reply.done or reply.error}
    assert ends["bad"].error == "ValueError: the noise is too loud"
    (alone,) = [reply for _, reply in Denoiser().process([item("d", "x", seed=1)]) if reply.done]
    for name in ("a", "c"):
        assert np.array_equal(ends[name].data["image"], alone.data["image"])


def test_results_of_different_shapes_of_mapping_are_an_error():
    class Fickle(Denoiser):
        def finish(self, sample):
            return {"image": 1} if sample.index else {"latent": 1}

    both = WorkItem(
        request_id="a",
        input=StageInput(batch=(StageInput(text="a"), StageInput(text="b"))),
        last=True,
        params={},
        state={},
    )
    replies = [reply for _, reply in Fickle().process([both])]
    assert "['latent'] for one sample and ['image'] for another" in replies[-1].error


def test_a_step_must_give_as_many_states_as_it_was_given():
    class Short(Denoiser):
        def step(self, samples):
            return []

    (reply,) = [reply for _, reply in Short().process([item("a", "x")])]
    assert reply.error == "TypeError: step() returned 0 states for 1 samples"
