"""What a caller holds of one request: the block it lives in, its events, its result."""

from __future__ import annotations

from types import TracebackType
from typing import Self, final

import trio

from omni_trio.messages import Output, Progress, Prompt, StageMetrics

from . import _buggify
from ._admission import RequestOptions
from ._orchestrator import Orchestrator
from ._request import RequestTask
from ._result import Result, collect_result

__all__ = ["Request"]


@final
class Request:
    """One request, as an async context manager and an async iterator. Made by `Runtime.request`.

    Entering the block admits the request and hands it to the first stage; errors in what was asked are raised
    there. Inside it, iterate over the events, or await `result`. Leaving the block before the end aborts the
    request at every stage, and returns only when all of them have let go (I6).
    """

    def __init__(self, orchestrator: Orchestrator, prompt: Prompt | None, options: RequestOptions) -> None:
        self._orchestrator = orchestrator
        self._prompt = prompt
        self._options = options
        self._task: RequestTask | None = None
        self._result: Result | None = None

    @property
    def id(self) -> str:
        """The request's id: the caller's own, or the one that was made for it."""
        return self.task.external_id

    @property
    def task(self) -> RequestTask:
        """The request's task. Not for callers."""
        if self._task is None:
            raise RuntimeError("the request is not open: write 'async with runtime.request(...) as request:'")
        return self._task

    async def __aenter__(self) -> Self:
        if self._task is not None:
            raise RuntimeError("a request can be entered once; ask runtime.request() for another one")
        task = self._task = self._orchestrator.admit(self._prompt, self._options)
        try:
            await task.at_door.wait()
            if _buggify.hook is not None:
                await _buggify.hook("a caller enters")
        except BaseException:
            await self._leave(task)
            raise
        if task.error is not None and not task.admitted:
            await self._leave(task)
            raise task.error
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self._leave(self.task)

    async def _leave(self, task: RequestTask) -> None:
        task.abort("its caller left the request's block")
        task.mailbox.tell()
        if task.done.is_set():
            return
        # The task bounds its own clean-up by the abort time-out; twice that means that the trio thread is stuck.
        with trio.move_on_after(2 * self._orchestrator.abort_timeout, shield=True):
            await task.done.wait()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Output | StageMetrics | Progress:
        """Wait for the next event. A consumer that is slow gets fewer, larger deltas; nothing is lost.

        Raises:
            StopAsyncIteration: the request ended well.
            RequestError: it did not; raised after what had come before, and again whenever it is asked.
        """
        event = await self.task.mailbox.take()
        if event is None:
            raise StopAsyncIteration
        return event

    async def result(self) -> Result:
        """Wait for the end and return the final outputs, as far as they have not been iterated over yet.

        Asked again, it returns the same.

        Raises:
            RequestError: the request did not end well.
        """
        events = await self.task.mailbox.take_all()
        if self._result is None:
            self._result = collect_result(self.id, events)
        return self._result
