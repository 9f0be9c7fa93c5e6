"""What ``omni-trio run`` does."""

from __future__ import annotations

import math
import os
import signal
import stat
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import attrs
import trio

from omni_trio import open_runtime
from omni_trio.errors import ConfigError, EngineDied, InvalidRequest, OmniTrioError, RequestError
from omni_trio.merging import merge_data
from omni_trio.messages import Output
from omni_trio.pipeline import Pipeline
from omni_trio.runtime import Request, Runtime, StageResult
from omni_trio.runtime._admission import checked_prompt
from omni_trio.telemetry import Recorder, timeline_svg, write_chrome_trace

from . import _status
from ._load import load
from ._prompts import BadLine, Job, parse_params, read_jobs
from ._save import describe
from ._screen import Screen
from ._sink import Kept, Sink
from ._streams import CanNotWriteError, say

__all__ = ["Options", "run"]


@attrs.frozen(kw_only=True)
class Options:
    """The command line of ``run``."""

    pipeline: str
    prompt: str | None = None
    input: str | None = None
    out: str | None = None
    trace: str | None = None
    timeline: str | None = None
    concurrency: int = 8
    deadline: float | None = None
    params: Sequence[str] = ()
    quiet: bool = False


def run(options: Options) -> None:
    """Run prompts through a pipeline and end the program with the exit status that `run_status` returns."""
    sys.exit(run_status(options))


def run_status(options: Options) -> int:
    """Do it, and return the exit status."""
    # Stdout is for results.
    os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")
    pipeline = load(options.pipeline)
    jobs = _read(pipeline, options)
    _check_outputs(options)
    recorder = Recorder() if options.trace or options.timeline else None
    with Screen(pipeline, quiet=options.quiet) as screen, closing(_open_sink(options)) as sink:
        work = _Work(pipeline, options, jobs, screen, sink)
        drawn = True
        try:
            status = _run_work(work, recorder, screen)
        finally:
            screen.end()
            if recorder is not None:
                drawn = _write_pictures(recorder, pipeline, options, screen)
    return status if drawn or status != _status.OK else _status.FAILED


def _run_work(work: _Work, recorder: Recorder | None, screen: Screen) -> int:
    instruments = (screen, recorder) if recorder is not None else (screen,)
    status = _status.OK
    try:
        status = trio.run(work.main, instruments)
    except* ConfigError as group:
        for error in _leaves(group):
            screen.error(f"{work.options.pipeline}: {error}")
        status = _status.USAGE
    except* OmniTrioError as group:
        # A request's own errors end in its line; these are about engines and their processes.
        for error in _leaves(group):
            screen.error(str(error))
        status = _status.ENGINE
    except* CanNotWriteError as group:
        screen.error(str(next(_leaves(group))))
        status = _status.FAILED
    except* BrokenPipeError:
        status = _status.BROKEN_PIPE
    if work.signalled is not None:
        return 128 + work.signalled
    return status


def _leaves(error: BaseException) -> Iterator[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        for inner in error.exceptions:
            yield from _leaves(inner)
    else:
        yield error


def _read(pipeline: Pipeline, options: Options) -> list[Job | tuple[int, BadLine]]:
    try:
        params = parse_params(pipeline, options.params)
    except BadLine as error:
        _status.fail(f"--param: {error}", _status.USAGE)
    if options.prompt is not None:
        try:
            return [Job(line=1, prompt=checked_prompt(options.prompt, pipeline), params=params)]
        except InvalidRequest as error:
            _status.fail(f"PROMPT: {error.message}", _status.USAGE)
    assert options.input is not None  # the command line has one of the two
    if options.input == "-" and sys.stdin is None:
        _status.fail("--input: stdin is closed", _status.USAGE)
    try:
        raw = sys.stdin.buffer.read() if options.input == "-" else Path(options.input).read_bytes()
    except OSError as error:
        _status.fail(f"--input: {error}", _status.USAGE)
    return list(read_jobs(pipeline, raw.splitlines(), params))


# --------------------------------------------------------------------------------------------------------------
# Where results go


def _check_outputs(options: Options) -> None:
    """Find out now, and not after an hour's work, what can not be written."""
    if sys.stdout is None and (options.prompt is not None or options.out is None):
        _status.fail("stdout is closed; it takes the results", _status.USAGE)
    for name, path in (("--trace", options.trace), ("--timeline", options.timeline)):
        if path is not None:
            try:
                _check_writable(Path(path))
            except OSError as error:
                _status.fail(f"{name}: can not write {path}: {error.strerror}", _status.USAGE)


def _check_writable(path: Path) -> None:
    try:
        kind = stat.S_IFMT(path.stat().st_mode)
    except FileNotFoundError:
        made = path.resolve()  # a link may lead to where no file is yet
        made.open("xb").close()
        made.unlink()
        return
    # To open a pipe and close it again would end it for its reader.
    if kind in (stat.S_IFREG, stat.S_IFDIR):
        path.open("ab").close()


def _open_sink(options: Options) -> Sink:
    try:
        return Sink.open(None if options.out is None else Path(options.out), wants_lines=options.prompt is None)
    except OSError as error:
        _status.fail(f"--out: {error}", _status.USAGE)


def _write_pictures(recorder: Recorder, pipeline: Pipeline, options: Options, screen: Screen) -> bool:
    """Write the trace and the timeline; return whether they could be."""
    drawn = True
    for path, draw in ((options.trace, _draw_trace), (options.timeline, _draw_timeline)):
        if path is not None:
            try:
                draw(recorder, pipeline, Path(path))
            except OSError as error:
                screen.error(f"can not write {path}: {error.strerror}")
                drawn = False
    return drawn


def _draw_trace(recorder: Recorder, pipeline: Pipeline, path: Path) -> None:
    write_chrome_trace(recorder, path, pipeline=pipeline)


def _draw_timeline(recorder: Recorder, pipeline: Pipeline, path: Path) -> None:
    path.write_text(timeline_svg(recorder, pipeline=pipeline), encoding="utf-8")


# --------------------------------------------------------------------------------------------------------------
# The work


class _Work:
    """The prompts of one call of the program, and how they fare."""

    def __init__(
        self,
        pipeline: Pipeline,
        options: Options,
        jobs: Sequence[Job | tuple[int, BadLine]],
        screen: Screen,
        sink: Sink,
    ) -> None:
        self.pipeline = pipeline
        self.options = options
        self.signalled: int | None = None
        self._jobs = [job for job in jobs if isinstance(job, Job)]
        self._bad_lines = [job for job in jobs if not isinstance(job, Job)]
        self._total = len(jobs)
        self._screen = screen
        self._sink = sink
        self._sink_lock = trio.Lock()
        self._done = 0
        self._failed = 0

    async def main(self, instruments: Sequence[Callable[[Any], None]]) -> int:
        """Open the runtime, do the work, close it. A signal cancels the work and never the closing."""
        with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
            async with trio.open_nursery() as nursery:
                work = trio.CancelScope()
                nursery.start_soon(self._watch, signals, work)
                with work:
                    await self._refuse()
                    if self._jobs:
                        await self._serve(instruments)
                    if self.options.prompt is None:
                        self._screen.end()
                        self._screen.note(f"{self._total - self._failed} of {self._total} prompts were served")
                nursery.cancel_scope.cancel("all is done")
        return _status.FAILED if self._failed else _status.OK

    async def _refuse(self) -> None:
        """Tell of the lines that are no prompts: engines can take minutes to come up."""
        for line, bad in self._bad_lines:
            await self._fail(line, None, str(bad), {"type": "BadLine", "message": str(bad)})

    async def _serve(self, instruments: Sequence[Callable[[Any], None]]) -> None:
        async with open_runtime(
            self.pipeline,
            instruments=instruments,
            max_in_flight=max(10_000, self.options.concurrency),
        ) as runtime:
            self._screen.end()
            if self.options.prompt is not None:
                await self._one(runtime)
            else:
                await self._batch(runtime)

    async def _watch(self, signals: Any, work: trio.CancelScope) -> None:
        async for number in signals:
            if self.signalled is None:
                self.signalled = number
                self._screen.note("stopping")
                work.cancel(f"signal {number}")
            else:
                self._screen.note("still stopping; every step of it is bounded")

    def _request(self, runtime: Runtime, job: Job) -> Request:
        deadline = self.options.deadline if job.deadline is None else job.deadline
        return runtime.request(
            job.prompt,
            sampling_params=job.params or None,
            request_id=job.request_id,
            deadline=math.inf if deadline is None else deadline,
        )

    # One prompt

    async def _one(self, runtime: Runtime) -> None:
        (job,) = self._jobs
        texts = [
            stage.name
            for index, stage in enumerate(self.pipeline.stages)
            if self.pipeline.finals[index] and self.pipeline.modalities[index] == "text"
        ]
        parts: dict[str, list[Output]] = {}
        try:
            async with self._request(runtime, job) as request:
                async for event in request:
                    if isinstance(event, Output):
                        parts.setdefault(event.stage, []).append(event)
                        if event.text and event.stage in texts[:1]:
                            await trio.to_thread.run_sync(say, event.text)
                request_id = request.id
        except EngineDied:
            raise  # of the whole runtime, which says it better
        except RequestError as error:
            self._failed += 1
            await trio.to_thread.run_sync(say, "\n" if parts else "")
            self._screen.error(str(error))
            await self._keep({"request_id": error.request_id, "error": _error_json(error)}, {}, "")
            return
        results = {stage: _join(outputs) for stage, outputs in parts.items()}
        await trio.to_thread.run_sync(say, _rest(results, texts))
        kept = await self._keep({"request_id": request_id}, results, "")
        for path in kept.files:
            self._screen.note(f"wrote {path}")
        if kept.problems:
            self._failed += 1
            self._screen.error("\n".join(kept.problems))
        if self.options.out is None:
            for stage, result in results.items():
                if result.modality != "text":
                    self._screen.note(f"{stage}: {describe(result)}; give --out DIR to keep it")

    # Many prompts

    async def _batch(self, runtime: Runtime) -> None:
        jobs = iter(self._jobs)
        self._progress()
        async with trio.open_nursery() as nursery:
            for _ in range(min(self.options.concurrency, len(self._jobs))):
                nursery.start_soon(self._worker, runtime, jobs)

    async def _worker(self, runtime: Runtime, jobs: Iterator[Job]) -> None:
        for job in jobs:
            await self._answer(runtime, job)

    async def _answer(self, runtime: Runtime, job: Job) -> None:
        try:
            async with self._request(runtime, job) as request:
                result = await request.result()
        except OmniTrioError as error:
            await self._fail(job.line, job.request_id, str(error), _error_json(error))
            return
        kept = await self._keep({"line": job.line, "request_id": result.request_id}, result.outputs, f"{job.line:05d}-")
        if kept.problems:
            self._failed += 1
            self._screen.error(f"{self.options.input}:{job.line}: {'; '.join(kept.problems)}")
        self._progress(1)

    async def _fail(self, line: int, request_id: str | None, words: str, error: dict[str, Any]) -> None:
        self._failed += 1
        self._screen.error(f"{self.options.input}:{line}: {words}")
        await self._keep({"line": line, "request_id": request_id, "error": error}, {}, "")
        self._progress(1)

    def _progress(self, done: int = 0) -> None:
        self._done += done
        self._screen.requests(self._total, self._done, self._failed)

    async def _keep(self, record: dict[str, Any], results: Mapping[str, StageResult], prefix: str) -> Kept:
        async with self._sink_lock:
            return await trio.to_thread.run_sync(self._sink.write, record, results, prefix)


def _join(outputs: Sequence[Output]) -> StageResult:
    last = outputs[-1]
    return StageResult(
        stage=last.stage,
        modality=last.modality,
        text="".join(part.text for part in outputs),
        token_ids=tuple(token for part in outputs for token in part.token_ids),
        data=merge_data(part.data for part in outputs),
        finish_reason=last.finish_reason,
        stop_reason=last.stop_reason,
        metrics=last.metrics,
    )


def _rest(results: Mapping[str, StageResult], texts: Sequence[str]) -> str:
    """Return what of the texts has not been shown yet: the first one's end of line, and all of the others."""
    made = [name for name in texts if name in results]
    shown = "".join("" if results[name].text.endswith("\n") else "\n" for name in made[:1])
    return shown + "".join(f"\n[{name}]\n{results[name].text.rstrip()}\n" for name in made[1:])


def _error_json(error: OmniTrioError) -> dict[str, Any]:
    data: dict[str, Any] = {"type": type(error).__name__, "message": str(error)}
    if isinstance(error, RequestError) and error.stage is not None:
        data |= {"stage": error.stage, "replica_id": error.replica_id}
    return data
