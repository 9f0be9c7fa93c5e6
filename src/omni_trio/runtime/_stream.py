"""What a caller holds of one session: a request whose input comes in segments."""

from __future__ import annotations

from types import TracebackType
from typing import Any, Self, final

from omni_trio.messages import Output, Progress, Prompt, StageInput, StageMetrics

from ._admission import RequestOptions, checked_segment, split_params
from ._handle import Request
from ._orchestrator import Orchestrator
from ._request import RequestTask, Segment
from ._result import Result

__all__ = ["RequestStream"]


@final
class RequestStream:
    """A session, as an async context manager and an async iterator. Made by `Runtime.open_stream`.

    Send from one task and iterate in another (or send first: what the stages make of it waits, merged). Every segment
    is answered by each stage in turn; the last answer to it has `Output.segment_end` set. Leaving the block before the
    end aborts the session at every stage, and returns only when all of them have let go (I6).
    """

    def __init__(self, orchestrator: Orchestrator, options: RequestOptions) -> None:
        self._orchestrator = orchestrator
        self._request = Request(orchestrator, None, options)

    @property
    def id(self) -> str:
        """The session's id: the caller's own, or the one that was made for it."""
        return self._request.id

    @property
    def turn(self) -> int:
        """How often the caller has barged in."""
        return self._task.turn.number

    async def __aenter__(self) -> Self:
        await self._request.__aenter__()
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self._request.__aexit__(exc_type, exc, traceback)

    async def send(self, segment: Prompt, *, sampling_params: Any = None, last: bool = False) -> None:
        """Hand over the next segment; returns once the first stage has it.

        Args:
            segment: words, token ids, or a `StageInput` for all else. It adds to what was sent before in this turn.
            sampling_params: from now on, in place of the earlier ones; None: as before.
            last: whether it is the session's last one, as if `aclose` followed.

        Raises:
            SessionClosed: the session was closed, or has ended; the cause says of what.
            InvalidRequest: the first stage can not take the segment. Unless it was the first or the last one, the
                session goes on without it.
            RequestError: handing it over failed, and with it the session.
        """
        await self._hand_over(self._segment(segment, sampling_params, last=last))

    async def barge_in(self, segment: Prompt, *, sampling_params: Any = None) -> None:
        """Begin a new turn with a segment: the caller has changed its mind, or speaks while being answered.

        From the call on, nothing that the stages still say in the old turn is delivered, what is waiting to be read is
        thrown away, and every stage lets go of the old turn. The new turn knows nothing of the old one. Returns once
        the first stage has the segment. Arguments and errors as for `send`.
        """
        made = self._segment(segment, sampling_params, last=False)
        made.turn = True
        await self._hand_over(made)

    async def aclose(self) -> None:
        """Say that there will be no more input. What was sent is still answered: go on iterating. Twice is harmless.

        Raises:
            RequestError: telling the first stage failed, and with it the session.
        """
        session = self._task.session
        if session is None or session.closed or self._task.verdict is not None:
            return
        await self._hand_over(Segment(StageInput(), last=True))

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Output | StageMetrics | Progress:
        """Wait for the next event (see `Request.__anext__`)."""
        return await self._request.__anext__()

    async def result(self) -> Result:
        """Wait for the end and return the final outputs, as far as they have not been iterated over yet.

        The session has to be closed for it to end.

        Raises:
            RequestError: the session did not end well.
        """
        return await self._request.result()

    @property
    def _task(self) -> RequestTask:
        return self._request.task

    def _segment(self, given: Prompt, sampling_params: Any, *, last: bool) -> Segment:
        orchestrator = self._orchestrator
        params = None
        if sampling_params is not None:
            params = orchestrator.params(split_params(sampling_params, orchestrator.pipeline))
        return Segment(checked_segment(given, orchestrator.pipeline), last=last, params=params)

    async def _hand_over(self, segment: Segment) -> None:
        self._task.send(segment)
        await segment.handed_over.wait()
        if segment.error is not None:
            raise segment.error
