"""One request or session as the reader of events sees it: all its messages, the last one last."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import AsyncIterable, Awaitable, Callable, Iterator, Sequence
from typing import Any, TypeAlias

import msgspec
import trio

from omni_trio.bridges import Companion
from omni_trio.errors import DeadlineExceeded, InvalidRequest, RequestAborted, RequestError, SessionClosed
from omni_trio.messages import Output, Progress, StageMetrics
from omni_trio.routing import RoutePlan
from omni_trio.runtime import RequestStream, Runtime

from ._commands import AddCompanionRequest, AddRequest, Command, StreamingUpdate
from ._companions import make_companions
from ._events import ErrorEvent, Event, OutputEvent, StageMetricsEvent, error_event
from ._prompts import as_prompt, says_resumable

__all__ = ["Conversation"]

_UPDATES = 64
"""Segments of one session that may wait for its first stage to take them."""

_NOBODY = -1
"""Stands for the replica in an output that none has made."""

Tell: TypeAlias = Callable[[Event], Awaitable[None]]
Refuse: TypeAlias = Callable[[Command, Exception], Awaitable[None]]
_Events: TypeAlias = AsyncIterable[Output | StageMetrics | Progress]

_logger = logging.getLogger("omni_trio")


class Conversation:
    """Serves one `AddRequest` and what belongs to it. Its owner runs it in a task of its own.

    Args:
        command: what is asked for.
        runtime: what serves it.
        plan: says which stages a request passes that ends at a stage, or (None) passes the whole pipeline.
        tell: sends an event; may wait for the reader.
        refuse: refuses a command that belongs to this request; may wait for the reader.
        is_fatal: whether the orchestrator ends with an error that this request got.
    """

    def __init__(
        self,
        command: AddRequest,
        runtime: Runtime,
        *,
        plan: Callable[[int | None], RoutePlan],
        tell: Tell,
        refuse: Refuse,
        is_fatal: Callable[[RequestError], bool],
    ) -> None:
        self.id = command.request_id
        self.session = bool(says_resumable(command.prompt) if command.resumable is None else command.resumable)
        self.scope = trio.CancelScope()
        """Cancelled to abort what the runtime does not know yet."""
        self.begun = False
        """Whether the runtime knows the request, or has refused it."""
        self.last: OutputEvent | ErrorEvent | None = None
        """The last event, once it is known."""
        self.over = trio.Event()
        """Set once the last event is out."""
        self.companions: tuple[Companion, ...] = ()
        """What came in messages, complete before the runtime is asked."""
        self._put_update, self._updates = trio.open_memory_channel[StreamingUpdate](_UPDATES)
        self._in_hand: StreamingUpdate | None = None
        """The segment that the first stage is about to take."""
        self._command = command
        self._runtime = runtime
        self._plan = plan
        self._tell = tell
        self._refuse = refuse
        self._is_fatal = is_fatal
        self._deadline = trio.current_time() + command.deadline
        self._members: dict[str, AddCompanionRequest | None] = dict.fromkeys(command.companion_ids)
        self._members |= {companion.companion_id: companion for companion in command.companions}
        self._complete = trio.Event()
        self._wanted: frozenset[int] = frozenset()
        """The stages whose outputs are told."""
        self._unfinished: set[int] = set()
        """The stages that have not ended, of those whose end, all together, is the request's."""
        self._final = 0
        """The stage in whose name the end is told if no output tells it."""
        self._replicas: dict[int, int] = {}
        """By stage, the replica that was heard last."""

    @property
    def companion_ids(self) -> Sequence[str]:
        """The ids of all companions that came with it or are announced."""
        return tuple(self._members)

    # ---- commands about it, as they come; synchronous

    def add_companion(self, command: AddCompanionRequest) -> None:
        """Take a companion that was announced.

        Raises:
            InvalidRequest: it was not, or has come already, or the request has begun without it.
        """
        if self._members.get(command.companion_id, command) is not None or self.last is not None:
            raise InvalidRequest(
                f"request {self.id!r} does not wait for this companion: name it in the companion_ids of the request, "
                "or put it into its companions"
            )
        self._members[command.companion_id] = command
        if None not in self._members.values():
            self._complete.set()

    def add_update(self, command: StreamingUpdate) -> None:
        """Take more input for a session.

        Raises:
            InvalidRequest: it is no session.
            trio.WouldBlock: too many segments wait already.
        """
        if not self.session:
            raise InvalidRequest("it is no session: a session begins with a resumable add_request")
        self._put_update.send_nowait(command)

    def left_over(self) -> Iterator[StreamingUpdate]:
        """Take out the segments that nobody will take any more."""
        if self._in_hand is not None:
            yield self._in_hand
        with contextlib.suppress(trio.WouldBlock):
            while True:
                yield self._updates.receive_nowait()

    @property
    def was_aborted(self) -> bool:
        """Whether it ended by an abort."""
        return isinstance(self.last, OutputEvent) and self.last.engine_outputs.finish_reason == "abort"

    # ---- the task

    async def run(self) -> OutputEvent | ErrorEvent:
        """Serve it to its end; tells all events but the last one, and returns that."""
        with self.scope:
            try:
                return await self._serve()
            except RequestAborted:
                pass
            except RequestError as error:
                return error_event(error, request_id=self.id, fatal=self._is_fatal(error))
            except Exception as error:
                # A bug, of ours or of an object that the caller handed over: it is this request's alone (I3).
                _logger.exception("request %r failed", self.id)
                return error_event(error, request_id=self.id)
        return self._end("abort")

    async def _serve(self) -> OutputEvent:
        command = self._command
        if not command.deadline > 0:
            raise InvalidRequest(f"a deadline is a number of seconds above 0, not {command.deadline!r}")
        options: dict[str, Any] = {
            "sampling_params": command.sampling_params_list,
            "request_id": self.id,
            "final_stage": self._choose_outputs(),
            "priority": command.priority,
        }
        prompt = as_prompt(command.prompt, command.original_prompt)
        await self._gather()
        options["deadline"] = self._deadline - trio.current_time()
        if not options["deadline"] > 0:
            raise DeadlineExceeded("its deadline passed while it waited for its companions")
        self.begun = True  # nothing is awaited between here and the runtime's tables
        if not self.session:
            async with self._runtime.request(prompt, **options) as request:
                return await self._pass_on(request)
        async with self._runtime.open_stream(**options) as stream:
            with contextlib.suppress(SessionClosed):  # it has ended meanwhile: reading tells of what
                await stream.send(prompt)
            return await self._pass_on_session(stream)

    def _choose_outputs(self) -> int | None:
        stages = self._runtime.pipeline.stages
        final, outputs = self._command.final_stage_id, self._command.final_output_stage_ids
        if outputs is not None and not outputs:
            raise InvalidRequest("final_output_stage_ids is empty: nothing is wanted of the request")
        for stage_id in (*(() if final is None else (final,)), *(outputs or ())):
            if not 0 <= stage_id < len(stages):
                raise InvalidRequest(f"there is no stage {stage_id}; there are {len(stages)}")
        if final is None and outputs is not None:
            final = max(outputs)
        plan = self._plan(final)
        told = frozenset(stage_id for stage_id, emits in enumerate(plan.emits) if emits)
        self._wanted = told if outputs is None else frozenset(outputs)
        for stage_id in sorted(self._wanted - told):
            raise InvalidRequest(
                f"final_output_stage_ids: the output of stage {stages[stage_id].name!r} is not a final one",
                stage=stages[stage_id].name,
                stage_id=stage_id,
            )
        self._unfinished = set(plan.needed)
        self._final = max(self._wanted) if final is None else final
        return final

    async def _gather(self) -> None:
        if not self._members:
            return
        if self._runtime.pipeline.expander is None:
            raise InvalidRequest(
                "the pipeline takes no companions: give it an 'expand' function "
                "(omni_trio.message_level:companions_by_message, where all of them come in messages)"
            )
        if None in self._members.values():
            patience = trio.current_time() + self._runtime.pipeline.bundle_timeout
            with trio.move_on_at(min(self._deadline, patience)):
                await self._complete.wait()
        given = [member for member in self._members.values() if member is not None]
        if len(given) < len(self._members):
            missing = ", ".join(one for one, member in self._members.items() if member is None)
            raise DeadlineExceeded(f"it waited for companions that were announced and did not come: {missing}")
        self.companions = make_companions(given)

    # ---- events

    async def _pass_on(self, events: _Events) -> OutputEvent:
        """Tell what comes, and return the last output; it is held back until it is known to be that."""
        held: OutputEvent | None = None
        async for event in events:
            message = self._message(event)
            if message is None:
                continue
            if held is not None:
                earlier, held = held, None
                await self._tell(earlier)
            if isinstance(message, OutputEvent) and message.engine_outputs.finished and not self._unfinished:
                held = message
            else:
                await self._tell(message)
        return self._end("stop") if held is None else msgspec.structs.replace(held, finished=True)

    async def _pass_on_session(self, stream: RequestStream) -> OutputEvent:
        failure: RequestError | None = None
        last: OutputEvent | None = None
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._feed, stream)
            try:
                last = await self._pass_on(stream)
            except RequestError as error:
                failure = error  # raised outside of the nursery, which would wrap it
            nursery.cancel_scope.cancel("the session is over")
        if last is None:
            assert failure is not None  # one of the two has happened
            raise failure
        return last

    async def _feed(self, stream: RequestStream) -> None:
        async for update in self._updates:
            self._in_hand = update
            said = says_resumable(update.prompt) if update.resumable is None else update.resumable
            try:
                if said is False:
                    await stream.aclose()
                else:
                    prompt = as_prompt(update.prompt, update.original_prompt)
                    # Empty means as before, in an update.
                    await stream.send(prompt, sampling_params=update.sampling_params_list or None)
            except RequestError as error:
                await self._refuse(update, error)
            self._in_hand = None

    def _message(self, event: Output | StageMetrics | Progress) -> OutputEvent | StageMetricsEvent | None:
        if isinstance(event, Progress):
            return None
        self._replicas[event.stage_id] = event.replica_id
        if isinstance(event, StageMetrics):
            self._unfinished.discard(event.stage_id)
            return _metrics(event)
        if event.finished:
            self._unfinished.discard(event.stage_id)
        if event.stage_id not in self._wanted:
            return None if event.metrics is None else _metrics(event.metrics)
        return OutputEvent(
            request_id=self.id,
            stage_id=event.stage_id,
            engine_outputs=event,
            metrics=event.metrics,
            replica_id=event.replica_id,
        )

    def _end(self, reason: str) -> OutputEvent:
        """The end of a request that no output of a stage tells of: in the name of its final stage, without content."""
        replica_id = self._replicas.get(self._final)
        pipeline = self._runtime.pipeline
        output = Output(
            request_id=self.id,
            stage=pipeline.stages[self._final].name,
            stage_id=self._final,
            replica_id=_NOBODY if replica_id is None else replica_id,
            modality=pipeline.modalities[self._final],
            finished=True,
            finish_reason=reason,
        )
        return OutputEvent(
            request_id=self.id, stage_id=self._final, engine_outputs=output, finished=True, replica_id=replica_id
        )


def _metrics(metrics: StageMetrics) -> StageMetricsEvent:
    return StageMetricsEvent(
        request_id=metrics.request_id, stage_id=metrics.stage_id, replica_id=metrics.replica_id, metrics=metrics
    )
