"""A worker that denoises: requests join between two steps, and leave between two steps."""

from __future__ import annotations

import secrets
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

import msgspec

from omni_trio.messages import StageInput

from ._base import Reply, Worker, WorkItem, in_words
from ._pieces import gather

__all__ = ["DiffusionWorker", "Sample"]

_SEEDS: Final = 1 << 63
"""How many seeds there are, from 0: what both torch and numpy take."""


class Sample(msgspec.Struct, kw_only=True, eq=False):
    """One image (video, sound) in the making. A request has one per prompt and output."""

    item: WorkItem
    """Whose sample it is."""
    input: StageInput
    """The prompt: the request's whole input (in a session: the segment's), or the one of its batch that this sample
    is for."""
    index: int
    """The sample's place among the request's results: all outputs of the first prompt, then those of the second."""
    seed: int
    """From 0 to 2**63 - 1. That of the request (a random one where it has none) for the first output of each prompt,
    and one more for each further output: a sample is the same whatever it is made together with."""
    steps: int
    """Steps in all."""
    step: int = 0
    """Steps done: at `DiffusionWorker.step` the number of the step to do, from 0."""
    state: Any = None
    """What `DiffusionWorker.prepare`, and then each `DiffusionWorker.step`, has returned."""

    @property
    def params(self) -> Mapping[str, Any]:
        """The request's parameters."""
        return self.item.params


class DiffusionWorker(Worker):
    """Base class of workers that denoise: define `prepare`, `step` and `finish`.

    After every step each request's progress goes out, aborted requests leave the batch, and waiting ones join it.
    An error in one request's samples fails that request only.

    An input with a batch (`StageInput.batch`) is one request with a sample per prompt; ``num_outputs_per_prompt``
    makes that several. What `finish` gives for the only sample of a plain input goes out as it is; wherever there
    could be several, each value becomes a list with one per sample, in the order of `Sample.index`.

    Parameters that are looked at here: ``num_inference_steps``, ``num_outputs_per_prompt``, ``seed``.
    """

    joins = True

    max_batch_size: int = 4
    """How many requests may be at work together, and how many samples `step` may be given at once: a request with
    more of them takes several calls for a step."""

    default_steps: int = 50
    """Steps where neither the caller nor the stage says ``num_inference_steps``."""

    def num_steps(self, item: WorkItem) -> int:
        """Return how many steps a request takes."""
        steps = item.params.get("num_inference_steps")
        return self.default_steps if steps is None else int(steps)

    def prepare(self, sample: Sample) -> Any:
        """Return what a sample starts with: latents drawn from its seed, the encoded prompt, ..."""
        raise TypeError(f"{type(self).__name__} must define prepare(self, sample)")

    def step(self, samples: Sequence[Sample]) -> Sequence[Any]:
        """Do one denoising step of some samples, which may be at different steps and of different requests.

        If it raises for several samples, each is tried again by itself, so that only those fail that are to blame.
        So that this starts from the same, the states given must stay as they are; return new ones.

        Args:
            samples: at most `max_batch_size`.

        Returns:
            The new states, in the same order.
        """
        raise TypeError(f"{type(self).__name__} must define step(self, samples)")

    def finish(self, sample: Sample) -> Mapping[str, Any] | None:
        """Return what a sample has become: arrays, tensors and plain values by name (``image``, ``latent``, ...).

        Nothing, or an empty mapping, is an error: the request fails.
        """
        raise TypeError(f"{type(self).__name__} must define finish(self, sample)")

    def process(self, batch: Sequence[WorkItem]) -> Iterator[tuple[WorkItem, Reply]]:
        """Denoise until the batch is empty; not to be overridden."""
        jobs: dict[WorkItem, _Job] = {}
        while True:
            jobs = {item: jobs.get(item) or _Job(item) for item in batch if not item.aborted}
            at_work = [job for job in jobs.values() if not job.ended]
            if not at_work:
                return
            for job in at_work:
                if not job.begun:
                    yield from job.attempt(self._begin)
            yield from self._step_all(at_work)
            for job in at_work:
                if job.alive and not job.unfinished:
                    yield from job.attempt(self._end)

    def _begin(self, job: _Job) -> Reply | None:
        job.begun = True
        item = job.item
        if (given := gather(item)) is None:
            return Reply(done=True)
        outputs = item.params.get("num_outputs_per_prompt") or 1
        if (seed := item.params.get("seed")) is None:
            seed = secrets.randbelow(_SEEDS)
        steps = self.num_steps(item)
        prompts = (given,) if given.batch is None else given.batch
        job.several = given.batch is not None or outputs > 1
        for prompt in prompts:
            for output in range(outputs):
                sample = Sample(
                    item=item,
                    input=prompt,
                    index=len(job.samples),
                    seed=(seed + output) % _SEEDS,
                    steps=steps,
                )
                sample.state = self.prepare(sample)
                job.samples.append(sample)
        return None

    def _step_all(self, jobs: Sequence[_Job]) -> Iterator[tuple[WorkItem, Reply]]:
        """Do one step of every sample."""
        rest = [(job, sample) for job in jobs for sample in job.unfinished]
        while rest := [(job, sample) for job, sample in rest if job.alive]:
            size = max(1, self.max_batch_size)
            chunk, rest = rest[:size], rest[size:]
            errors = self._step_some([sample for _, sample in chunk])
            for job in dict.fromkeys(job for job, _ in chunk):
                error = next((error for sample, error in errors if sample.item is job.item), None)
                yield job.item, job.progress() if error is None else job.failed(error)

    def _step_some(self, samples: Sequence[Sample]) -> list[tuple[Sample, Exception]]:
        """Do one step of some samples; return those that failed."""
        try:
            states = self.step(samples)
            if len(states) != len(samples):
                raise TypeError(f"step() returned {len(states)} states for {len(samples)} samples")
        except Exception as error:
            traceback.print_exc()
            if len(samples) == 1:
                return [(samples[0], error)]
            return [failure for sample in samples for failure in self._step_some([sample])]
        for sample, state in zip(samples, states, strict=True):
            sample.state = state
            sample.step += 1
        return []

    def _end(self, job: _Job) -> Reply:
        parts: list[Mapping[str, Any]] = []
        for sample in job.samples:
            part = self.finish(sample)
            if not part:
                place = f" for sample {sample.index} of {len(job.samples)}" if job.several else ""
                return Reply(error=f"no image was produced: {type(self).__name__}.finish() gave nothing{place}")
            if parts and part.keys() != parts[0].keys():
                raise TypeError(f"finish() gave {sorted(parts[0])} for one sample and {sorted(part)} for another")
            parts.append(part)
        data = {key: [part[key] for part in parts] for key in parts[0]} if job.several else parts[0]
        return Reply(data=data, done=True)


class _Job:
    """A request's item in the making."""

    def __init__(self, item: WorkItem) -> None:
        self.item = item
        self.samples: list[Sample] = []
        self.several = False
        self.begun = False
        self.ended = False

    @property
    def alive(self) -> bool:
        return not (self.ended or self.item.aborted)

    @property
    def unfinished(self) -> list[Sample]:
        return [sample for sample in self.samples if sample.step < sample.steps]

    def progress(self) -> Reply:
        """Tell the steps that all samples have done."""
        slowest = min(self.samples, key=lambda sample: sample.step)
        return Reply(progress=(slowest.step, slowest.steps))

    def failed(self, error: Exception) -> Reply:
        self.ended = True
        return Reply(error=in_words(error))

    def attempt(self, work: Callable[[_Job], Reply | None]) -> Iterator[tuple[WorkItem, Reply]]:
        """Do a part of the work whose error is this request's own."""
        try:
            reply = work(self)
        except Exception as error:
            traceback.print_exc()
            reply = self.failed(error)
        if reply is not None:
            self.ended = reply.done or reply.error is not None
            yield self.item, reply
