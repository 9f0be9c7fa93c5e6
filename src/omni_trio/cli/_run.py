"""What ``omni-trio run`` does."""

from __future__ import annotations

import math
import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self, TextIO

import attrs
import trio

from omni_trio import open_runtime
from omni_trio.errors import ConfigError, EngineDied, OmniTrioError, RequestError, StartupFailed
from omni_trio.merging import merge_data
from omni_trio.messages import Output
from omni_trio.pipeline import Pipeline
from omni_trio.runtime import Request, Runtime, StageResult
from omni_trio.telemetry import Recorder, timeline_svg, write_chrome_trace

from . import _status
from ._prompts import BadLine, Job, parse_params, read_jobs
from ._save import describe, json_line, save, to_json
from ._screen import Screen

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
    try:
        sys.exit(run_status(options))
    except KeyboardInterrupt:  # before trio listened for it, or after
        sys.exit(_status.INTERRUPTED)


def run_status(options: Options) -> int:
    """Do it, and return the exit status."""
    pipeline = _status.load(options.pipeline)
    for name, path in (("--trace", options.trace), ("--timeline", options.timeline)):
        if path is not None and not Path(path).absolute().parent.is_dir():
            _status.fail(f"{name}: the folder of {path} does not exist", _status.USAGE)
    jobs = _read(pipeline, options)
    recorder = Recorder() if options.trace or options.timeline else None
    with Screen(pipeline, quiet=options.quiet) as screen, _open_sink(options) as sink:
        work = _Work(pipeline, options, jobs, screen, sink)
        try:
            return _run_work(work, recorder, screen)
        finally:
            screen.end()
            if recorder is not None:
                _write_pictures(recorder, pipeline, options)


def _run_work(work: _Work, recorder: Recorder | None, screen: Screen) -> int:
    instruments = (screen, recorder) if recorder is not None else (screen,)
    status = _status.OK
    try:
        status = trio.run(work.main, instruments)
    except* (StartupFailed, EngineDied) as group:
        for error in _leaves(group):
            screen.error(str(error))
        status = _status.ENGINE
    except* ConfigError as group:
        for error in _leaves(group):
            screen.error(f"{work.options.pipeline}: {error}")
        status = _status.USAGE
    except* _CanNotWriteError as group:
        screen.error(str(next(_leaves(group))))
        status = _status.REQUEST_FAILED
    except* BrokenPipeError:
        # Whoever read our output has left. Python would complain when it flushes at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
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
        return [Job(line=1, prompt=options.prompt, params=params)]
    assert options.input is not None  # the command line has one of the two
    try:
        raw = sys.stdin.buffer.read() if options.input == "-" else Path(options.input).read_bytes()
    except OSError as error:
        _status.fail(f"--input: {error}", _status.USAGE)
    return list(read_jobs(pipeline, raw.splitlines(), params))


def _write_pictures(recorder: Recorder, pipeline: Pipeline, options: Options) -> None:
    if options.trace is not None:
        write_chrome_trace(recorder, options.trace, pipeline=pipeline)
    if options.timeline is not None:
        Path(options.timeline).write_text(timeline_svg(recorder, pipeline=pipeline), encoding="utf-8")


# --------------------------------------------------------------------------------------------------------------
# Where results go; called in threads, since disks and pipes can be slow


class _Sink:
    """The output folder, or stdout."""

    def __init__(self, folder: Path | None, lines: TextIO | None) -> None:
        self.folder = folder
        self._lines = lines

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *args: object) -> None:
        if self._lines is not None and self.folder is not None:
            self._lines.close()

    def write(self, record: dict[str, Any], results: Mapping[str, StageResult], prefix: str) -> list[Path]:
        """Write a request's files and its line; return the files."""
        files: list[Path] = []
        if results:
            record["outputs"] = outputs = {}
            for stage, result in results.items():
                made = [] if self.folder is None else save(result, self.folder, f"{prefix}{stage}")
                outputs[stage] = to_json(result, made, self.folder)
                files += made
        if self._lines is not None:
            self._lines.write(json_line(record))
            self._lines.flush()
        return files


def _open_sink(options: Options) -> _Sink:
    if options.out is None:
        return _Sink(None, sys.stdout if options.prompt is None else None)
    folder = Path(options.out)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return _Sink(folder, (folder / "results.jsonl").open("w", encoding="utf-8"))
    except OSError as error:
        _status.fail(f"--out: {error}", _status.USAGE)


class _CanNotWriteError(Exception):
    """There is no use in going on."""


def _say(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


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
        sink: _Sink,
    ) -> None:
        self.pipeline = pipeline
        self.options = options
        self.signalled: int | None = None
        self._jobs = jobs
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
                nursery.cancel_scope.cancel("all is done")
        return _status.REQUEST_FAILED if self._failed else _status.OK

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
        assert isinstance(job, Job)  # a prompt on the command line is never a bad line
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
                            await trio.to_thread.run_sync(_say, event.text)
                request_id = request.id
        except EngineDied:
            raise  # of the whole runtime, which says it better
        except RequestError as error:
            self._failed += 1
            await trio.to_thread.run_sync(_say, "\n" if parts else "")
            self._screen.error(str(error))
            await self._keep({"request_id": error.request_id, "error": _error_json(error)}, {}, "")
            return
        results = {stage: _join(outputs) for stage, outputs in parts.items()}
        await trio.to_thread.run_sync(_say, _rest(results, texts))
        files = await self._keep({"request_id": request_id}, results, "")
        for path in files:
            self._screen.note(f"wrote {path}")
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
        self._screen.end()
        total = len(self._jobs)
        self._screen.note(f"{total - self._failed} of {total} prompts were served")

    async def _worker(self, runtime: Runtime, jobs: Iterator[Job | tuple[int, BadLine]]) -> None:
        for job in jobs:
            if isinstance(job, Job):
                await self._serve(runtime, job)
            else:
                line, bad = job
                await self._fail(line, None, str(bad), {"type": "BadLine", "message": str(bad)})
            self._done += 1
            self._progress()

    async def _serve(self, runtime: Runtime, job: Job) -> None:
        try:
            async with self._request(runtime, job) as request:
                result = await request.result()
        except OmniTrioError as error:
            await self._fail(job.line, job.request_id, str(error), _error_json(error))
            return
        record = {"line": job.line, "request_id": result.request_id}
        await self._keep(record, result.outputs, f"{job.line:05d}-")

    async def _fail(self, line: int, request_id: str | None, words: str, error: dict[str, Any]) -> None:
        self._failed += 1
        self._screen.error(f"{self.options.input}:{line}: {words}")
        await self._keep({"line": line, "request_id": request_id, "error": error}, {}, "")

    def _progress(self) -> None:
        self._screen.requests(len(self._jobs), self._done, self._failed)

    async def _keep(self, record: dict[str, Any], results: Mapping[str, StageResult], prefix: str) -> list[Path]:
        async with self._sink_lock:
            try:
                return await trio.to_thread.run_sync(self._sink.write, record, results, prefix)
            except BrokenPipeError:
                raise
            except OSError as error:
                raise _CanNotWriteError(f"can not write the results: {error}") from error


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
