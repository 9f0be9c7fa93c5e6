"""`open_orchestrator`: takes commands, has the runtime carry them out, and tells what comes of them."""

from __future__ import annotations

import contextlib
import math
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, NamedTuple, TypeAlias

import attrs
import trio

from omni_trio.bridges import Companion
from omni_trio.errors import EngineDied, InvalidRequest, Overloaded, RequestError, SessionClosed, ShutDown
from omni_trio.pipeline import Pipeline
from omni_trio.routing import RoutePlan
from omni_trio.runtime import DeathPolicy, Instrument, RpcResult, Runtime, open_runtime
from omni_trio.runtime._groups import lone
from omni_trio.stages import ClientFactory

from ._commands import (
    Abort,
    AddCompanionRequest,
    AddRequest,
    CollectiveRpc,
    Command,
    Shutdown,
    StreamingUpdate,
    checked,
    id_of,
    is_command,
)
from ._companions import with_companions_by_message
from ._conversation import Conversation
from ._events import STATUS_CODES, AbortResult, CollectiveRpcResult, ErrorEvent, Event, OutputEvent, error_event

__all__ = ["Channels", "open_orchestrator"]

_CALLS = 1000
"""Aborts and collective RPCs that may be unanswered; the next one waits to be taken, and so does what is behind it."""

_Opener: TypeAlias = Callable[[Pipeline], AbstractAsyncContextManager[Runtime]]


class Channels(NamedTuple):
    """The two ends that a caller holds of an orchestrator."""

    commands: trio.MemorySendChannel[Command]
    """Closed, it says that no more will come: what is in flight is served, then the events end."""
    events: trio.MemoryReceiveChannel[Event]
    """Closed, it ends everything."""


@attrs.define(eq=False)
class _Call:
    """An abort or a collective RPC that has not been answered yet."""

    command: Abort | CollectiveRpc
    targets: list[Conversation]
    """What an abort is to end."""
    scope: trio.CancelScope = attrs.field(factory=trio.CancelScope)
    answer: AbortResult | CollectiveRpcResult | None = None


def _unanswered(command: Abort | CollectiveRpc, error: BaseException) -> AbortResult | CollectiveRpcResult | None:
    """The answer that there will be none."""
    if isinstance(command, CollectiveRpc):
        kind = type(error).__name__
        return CollectiveRpcResult(rpc_id=command.rpc_id, method=command.method, error=str(error), error_type=kind)
    if command.rpc_id is None:
        return None
    return AbortResult(rpc_id=command.rpc_id, success=False, error=str(error))


class _Orchestrator:
    """Takes commands strictly in order; each is carried out in a task of its own.

    Who waits for whom: a request waits to tell its events (and what its stages make meanwhile is merged), so a slow
    reader delays nobody at the stages. Taking commands waits only to tell of a refusal, and where too many calls are
    unanswered. What can pile up is therefore bounded by the two channels, `max_in_flight` and `_CALLS`.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        commands: trio.MemoryReceiveChannel[Command],
        events: trio.MemorySendChannel[Event],
        *,
        on_engine_death: DeathPolicy,
        max_in_flight: int,
        news_timeout: float,
    ) -> None:
        self.pipeline = with_companions_by_message(pipeline, self._companions_of)
        self._commands = commands
        self._events = events
        self._policy = on_engine_death
        self._max_in_flight = max_in_flight
        self._news_timeout = news_timeout
        self._runtime: Runtime
        self._tasks: trio.Nursery
        self._started = False
        self._scope = trio.CancelScope()
        """Around all work."""
        self._words_scope = trio.CancelScope()
        """Around the telling of what is left to be told after it."""
        self._left = trio.Event()
        self._quiet = trio.Event()
        self._failure: BaseException | None = None
        """Why everything ends, where it was not asked for."""
        self._news_deadline = math.inf
        """Until then whoever reads can hear of the failure; then the block is cancelled."""
        self._conversations: dict[str, Conversation] = {}
        self._parents: dict[str, Conversation] = {}
        """By the id of a companion."""
        self._calls: dict[_Call, None] = {}
        """Those under way, in the order in which they came."""
        self._rpc_ids: set[str] = set()
        self._slots = trio.Semaphore(_CALLS)
        self._unheard: list[tuple[Command, str | None]] = []
        """Sent, but not taken before the end; each with the id of the request that ends with that."""
        self._in_hand: Command | None = None
        """What is being taken."""
        self._unsaid: ErrorEvent | None = None
        """The refusal that is being told."""
        self._owed: deque[Event] = deque()
        """What is left to be told when all tasks have ended."""
        self._noted = False
        self._plans: dict[int | None, RoutePlan] = {}

    # ---- life

    async def run(self, opener: _Opener, *, task_status: trio.TaskStatus[None]) -> None:  # noqa: ASYNC128 - passed on
        """Live. Returns when all has been told; where it ends of a failure, raises that, and so ends the block.

        Raises:
            StartupFailed: the runtime did not open.
            EngineDied: an engine died (under ``fail_stop``).
        """
        try:
            try:
                with self._scope:
                    async with trio.open_nursery() as self._tasks:
                        await self._run_runtime(opener, task_status)
            except Exception as error:
                self._fail(lone(error, levels=1))
            if self._started:
                await self._tell_owed()
        finally:
            self._close()
        if self._failure is not None:
            if self._started:
                with trio.move_on_at(self._news_deadline):
                    await self._left.wait()
            raise self._failure

    async def _run_runtime(self, opener: _Opener, task_status: trio.TaskStatus[None]) -> None:
        try:
            async with opener(self.pipeline) as self._runtime:
                self._started = True
                task_status.started()
                try:
                    await self._take_commands()
                except Exception as error:
                    self._fail(error)
                    raise
                finally:
                    self._stop_taking()
        except Exception as error:
            # Kept rather than raised: it would cancel those who are about to tell how each request has ended.
            self._fail(error)
            self._tasks.cancel_scope.deadline = self._news_deadline

    def _fail(self, error: BaseException) -> None:
        if self._failure is None:
            self._news_deadline = trio.current_time() + self._news_timeout
        self._failure = error

    def leave(self) -> None:
        """End everything now; what can not be told without waiting is not told."""
        self._left.set()
        self._scope.cancel("the orchestrator's block is left")
        self._words_scope.cancel("the orchestrator's block is left")

    def _stop_taking(self) -> None:
        """Take no more commands, and let nobody wait any longer for the stages to answer a call."""
        unheard = [] if self._in_hand is None else [self._in_hand]
        with contextlib.suppress(trio.WouldBlock, trio.EndOfChannel):
            while True:
                unheard.append(self._commands.receive_nowait())
        self._commands.close()
        ended: set[str | None] = set()
        for command in unheard:
            ends = self._ends(command)
            self._unheard.append((command, None if ends in ended else ends))
            ended.add(ends)
        for call in self._calls:
            if isinstance(call.command, CollectiveRpc):
                call.scope.cancel("the orchestrator ends")

    def _why_it_ends(self) -> BaseException:
        if self._failure is not None:
            return self._failure
        if self._policy == "fail_stop":
            for replica in self._runtime.health().replicas:
                if replica.state == "dead":
                    return EngineDied(
                        replica.reason or "it died",
                        stage=replica.stage,
                        stage_id=replica.stage_id,
                        replica_id=replica.replica_id,
                    )
        return ShutDown("the orchestrator ends; open a new one")

    def _note_owed(self) -> None:
        """Note what nobody is left to tell: the ends of requests whose tasks were cancelled, and the like."""
        if self._noted or not self._started:
            return
        self._noted = True
        error = self._why_it_ends()
        fatal = self._failure is not None
        for conversation in self._conversations.values():
            self._owed.append(conversation.last or error_event(error, request_id=conversation.id, fatal=fatal))
        for call in self._calls:
            if (answer := call.answer or _unanswered(call.command, error)) is not None:
                self._owed.append(answer)
        if self._unsaid is not None:
            self._owed.append(self._unsaid)
        for command, ends in self._unheard:
            if isinstance(command, Abort | CollectiveRpc):
                if (answer := _unanswered(command, error)) is not None:
                    self._owed.append(answer)
            elif not isinstance(command, Shutdown):
                self._owed.append(_refusal(command, error, ends=ends, fatal=fatal))
        if fatal:
            self._owed.append(error_event(error, fatal=True))

    async def _tell_owed(self) -> None:
        self._note_owed()
        self._words_scope.deadline = self._news_deadline
        with self._words_scope:
            while self._owed:
                try:
                    await self._events.send(self._owed[0])
                except trio.BrokenResourceError:
                    self._owed.clear()  # nobody reads any more
                    return
                self._owed.popleft()

    def _close(self) -> None:
        self._note_owed()
        try:
            while self._owed:
                self._events.send_nowait(self._owed[0])
                self._owed.popleft()
        except (trio.WouldBlock, trio.BrokenResourceError):
            self._owed.clear()
        self._events.close()
        self._commands.close()

    # ---- commands, in order

    async def _take_commands(self) -> None:
        async for command in self._commands:
            if isinstance(command, Shutdown):
                return
            await self._take(command)
        while self._conversations or self._calls:
            self._quiet = trio.Event()
            await self._quiet.wait()

    async def _take(self, command: Command) -> None:
        self._in_hand = command
        try:
            made = checked(command)
            if isinstance(made, AddRequest):
                self._add(made)
            elif isinstance(made, StreamingUpdate):
                self._update(made)
            elif isinstance(made, AddCompanionRequest):
                self._add_companion(made)
            elif isinstance(made, Abort | CollectiveRpc):
                await self._start_call(made)
            else:
                await self._say(_not_supported(made))
        except RequestError as error:
            await self._say(_refusal(command, error, ends=self._ends(command)))
        self._in_hand = None

    async def _say(self, refusal: ErrorEvent) -> None:
        self._in_hand, self._unsaid = None, refusal
        await self._tell(refusal)
        self._unsaid = None

    def _add(self, command: AddRequest) -> None:
        if command.request_id in self._conversations:
            raise InvalidRequest("a request with this id is in flight; ids must be unique among those")
        if len(self._conversations) >= self._max_in_flight:
            raise Overloaded(
                f"{len(self._conversations)} requests are in flight, or their ends have not been read, which is the "
                "limit; send it again when one has ended, or raise max_in_flight"
            )
        conversation = Conversation(
            command, self._runtime, plan=self._plan, tell=self._tell, refuse=self._refuse, is_fatal=self._is_fatal
        )
        names = [*command.companion_ids, *(companion.companion_id for companion in command.companions)]
        for name in names:
            if names.count(name) > 1 or name in self._parents or name in self._conversations or name == conversation.id:
                raise InvalidRequest(f"the companion id {name!r} is taken; ids must be unique among those in flight")
        self._conversations[conversation.id] = conversation
        self._parents.update(dict.fromkeys(names, conversation))
        self._tasks.start_soon(self._serve, conversation, name=f"messages of {conversation.id}")

    def _update(self, command: StreamingUpdate) -> None:
        conversation = self._conversations.get(command.request_id)
        if conversation is None:
            raise SessionClosed("no session with this id is in flight: it has ended, or was never begun")
        try:
            conversation.add_update(command)
        except trio.WouldBlock:
            raise Overloaded(
                "the session's first stage has not taken the earlier segments yet; send it again"
            ) from None

    def _add_companion(self, command: AddCompanionRequest) -> None:
        conversation = self._conversations.get(command.parent_id)
        if conversation is None:
            raise InvalidRequest(f"no request {command.parent_id!r} is in flight that could have a companion")
        conversation.add_companion(command)

    async def _start_call(self, command: Abort | CollectiveRpc) -> None:
        if command.rpc_id in self._rpc_ids:
            raise InvalidRequest("a call with this rpc_id has not been answered yet; ids must be unique among those")
        await self._slots.acquire()
        targets: list[Conversation] = []
        if isinstance(command, Abort):
            found = (self._parents.get(one) or self._conversations.get(one) for one in command.request_ids)
            targets = list(dict.fromkeys(one for one in found if one is not None))
        if command.rpc_id is not None:
            self._rpc_ids.add(command.rpc_id)
        call = _Call(command, targets)
        self._calls[call] = None
        self._tasks.start_soon(self._carry_out, call, name=f"{command.type} {command.rpc_id}")

    async def _refuse(self, command: Command, error: Exception) -> None:
        await self._tell(_refusal(command, error, ends=self._ends(command)))

    def _ends(self, command: Command) -> str | None:
        """Return the id of the request that ends if a command is refused.

        A new one does; one with an id that is taken must not look as if the other had.
        """
        about = id_of(command) if isinstance(command, AddRequest) else None
        return None if about in self._conversations else about

    # ---- what they come to, in tasks of their own

    async def _serve(self, conversation: Conversation) -> None:
        conversation.last = await conversation.run()
        await self._tell(conversation.last)
        # Nothing is awaited in between: who has read the end may use the id again.
        del self._conversations[conversation.id]
        for name in conversation.companion_ids:
            del self._parents[name]
        conversation.over.set()
        self._quiet.set()
        for update in conversation.left_over():
            await self._refuse(update, SessionClosed("the session ended before its first stage took this"))

    async def _carry_out(self, call: _Call) -> None:
        command = call.command
        with call.scope:
            if isinstance(command, Abort):
                call.answer = await self._abort(command, call.targets)
            else:
                call.answer = await self._ask(command)
        if call.scope.cancelled_caught:
            call.answer = _unanswered(command, self._why_it_ends())
        if call.answer is not None:
            await self._tell(call.answer)
        del self._calls[call]
        if command.rpc_id is not None:
            self._rpc_ids.discard(command.rpc_id)
        self._slots.release()
        self._quiet.set()

    async def _abort(self, command: Abort, targets: Iterable[Conversation]) -> AbortResult | None:
        known = []
        for conversation in targets:
            if conversation.begun:
                known.append(conversation.id)
            else:
                conversation.scope.cancel("it was aborted")
        failure: EngineDied | None = None
        try:
            await self._runtime.abort(known)
        except EngineDied as error:
            failure = error
        for conversation in targets:
            await conversation.over.wait()
        if command.rpc_id is None:
            return None
        return AbortResult(
            rpc_id=command.rpc_id,
            success=failure is None,
            error=None if failure is None else str(failure),
            abort_outputs=[one.last for one in targets if isinstance(one.last, OutputEvent) and one.was_aborted],
        )

    async def _ask(self, command: CollectiveRpc) -> CollectiveRpcResult:
        stages = self.pipeline.stages
        asked = range(len(stages)) if command.stage_ids is None else list(dict.fromkeys(command.stage_ids))
        try:
            for stage_id in asked:
                if not 0 <= stage_id < len(stages):
                    raise InvalidRequest(f"there is no stage {stage_id}; there are {len(stages)}")
            answers = await self._runtime.collective_rpc(
                command.method,
                command.args,
                command.kwargs,
                stages=[stages[stage_id].name for stage_id in asked],
                **({} if command.timeout is None else {"timeout": command.timeout}),
            )
        except Exception as error:  # whatever a stage's client raises, the caller waits for an answer
            return CollectiveRpcResult(
                rpc_id=command.rpc_id, method=command.method, error=str(error), error_type=type(error).__name__
            )
        answers = sorted(answers, key=lambda answer: asked.index(answer.stage_id))
        return CollectiveRpcResult(
            rpc_id=command.rpc_id,
            method=command.method,
            stage_ids=[answer.stage_id for answer in answers],
            replica_ids=[answer.replica_id for answer in answers],
            results=[_value(answer) for answer in answers],
        )

    # ---- small things

    async def _tell(self, event: Event) -> None:
        try:
            await self._events.send(event)
        except trio.BrokenResourceError:
            self._scope.cancel("nobody reads the events any more")
            await trio.sleep_forever()

    def _is_fatal(self, error: RequestError) -> bool:
        return self._failure is not None or (isinstance(error, EngineDied) and self._policy == "fail_stop")

    def _plan(self, final_stage: int | None) -> RoutePlan:
        if final_stage not in self._plans:
            self._plans[final_stage] = RoutePlan(self.pipeline, final_stage)
        return self._plans[final_stage]

    def _companions_of(self, request_id: str) -> tuple[Companion, ...]:
        return self._conversations[request_id].companions


def _refusal(command: Command, error: BaseException, *, ends: str | None, fatal: bool = False) -> ErrorEvent:
    return error_event(
        error,
        request_id=ends,
        fatal=fatal,
        refused=command.type if is_command(command) else type(command).__name__,
        refused_id=id_of(command),
    )


def _value(answer: RpcResult) -> Any:
    if answer.error is None:
        return answer.result
    return {"supported": False, "error": str(answer.error), "error_type": type(answer.error).__name__}


def _not_supported(command: Command) -> ErrorEvent:
    return ErrorEvent(
        error=f"{command.type!r} is not supported yet: the replicas of a stage are those that the pipeline names",
        status_code=STATUS_CODES["NotSupported"],
        error_type="NotSupported",
        refused=command.type,
        refused_id=id_of(command),
    )


@asynccontextmanager
async def open_orchestrator(
    pipeline: Pipeline,
    *,
    clients: Mapping[str, ClientFactory],
    command_buffer: int = 256,
    event_buffer: int = 256,
    news_timeout: float = 5.0,
    on_engine_death: DeathPolicy = "fail_stop",
    max_in_flight: int = 10_000,
    abort_timeout: float = 10.0,
    shutdown_deadline: float = 10.0,
    instruments: Iterable[Instrument] = (),
) -> AsyncIterator[Channels]:
    """Bring a pipeline up, and drive it by messages: commands in, events out.

    Read the events in a task of their own, and to their end if the end of every request matters: send `Shutdown`, or
    close the commands, and read on. Leaving the block ends everything at once; what the events' buffer has no room for
    is then not told.

    Args:
        pipeline: what to run.
        clients: by stage name, what opens a replica of it.
        command_buffer: commands that may wait to be taken; who sends one more waits.
        event_buffer: events that may wait to be read. With that many waiting, each request holds its next one back,
            and merges what its stages make meanwhile; the stages go on.
        news_timeout: seconds that the block goes on after everything has ended by itself (an engine died, under
            ``fail_stop``), so that whoever reads can hear how each request ended. Then it is cancelled.
        on_engine_death: as for `omni_trio.open_runtime`.
        max_in_flight: requests that may be in flight, those included whose last event has not been read yet. One
            more is refused with `Overloaded`.
        abort_timeout: as for `omni_trio.open_runtime`.
        shutdown_deadline: as for `omni_trio.open_runtime`.
        instruments: callables that are told what happens (`TraceEvent`).

    Raises:
        StartupFailed: a replica did not come up; those that had are down again.
        EngineDied: an engine died (under ``fail_stop``).
    """
    if not news_timeout >= 0:
        raise ValueError(f"news_timeout: expected a number of seconds, not {news_timeout!r}")
    put_command, commands = trio.open_memory_channel[Command](command_buffer)
    events, take_event = trio.open_memory_channel[Event](event_buffer)
    orchestrator = _Orchestrator(
        pipeline,
        commands,
        events,
        on_engine_death=on_engine_death,
        max_in_flight=max_in_flight,
        news_timeout=news_timeout,
    )

    def opener(made: Pipeline) -> AbstractAsyncContextManager[Runtime]:
        return open_runtime(
            made,
            clients=clients,
            on_engine_death=on_engine_death,
            max_in_flight=max_in_flight,
            abort_timeout=abort_timeout,
            shutdown_deadline=shutdown_deadline,
            instruments=instruments,
        )

    failure: BaseException | None = None
    try:
        async with trio.open_nursery() as nursery:
            await nursery.start(orchestrator.run, opener)
            try:
                yield Channels(put_command, take_event)
            finally:
                orchestrator.leave()
    except BaseException as error:
        failure = error
    # Raised out here, so that what a user sees first does not drag the nursery's group along as its context.
    if failure is not None:
        raise lone(failure, levels=1)
