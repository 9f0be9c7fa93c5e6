"""Hosts an engine client written for asyncio as a `StageClient`, on an asyncio loop that runs inside trio.

Each replica has a loop of its own (trio-asyncio's), which lives as long as the replica. It costs about twice the
CPU of a client written for trio: right for an engine that has no other client, wrong for vLLM itself.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, Final, Protocol, TypeAlias, TypeVar, runtime_checkable

import trio

from omni_trio.errors import EngineDied, InvalidRequest, OmniTrioError, RequestError, StageFailed, StartupFailed
from omni_trio.messages import StageOutput, StageRequest
from omni_trio.stages import ClientFactory, ClientStatistics, ReplicaContext, StageClient

__all__ = ["AsyncioStageClient", "Make", "asyncio_client_factory", "stage_output"]

_logger = logging.getLogger("omni_trio")

_T = TypeVar("_T")

_GRACE: Final = 5.0
"""Seconds that an asyncio call has to end once it is cancelled, and a client to take back a request."""
_POLITE: Final = 0.75
"""The part of the close time-out that a client's shutdown may take."""
_THREADS: Final = 32
"""Threads that the default executor of one replica's loop may use."""


@runtime_checkable
class AsyncioStageClient(Protocol):
    """What a client has to have. The coroutines run in the replica's asyncio loop."""

    async def add_request_async(self, request: Any, /) -> None:
        """Take a request. ValueError and TypeError mean that the request is at fault."""
        ...

    async def get_output_async(self) -> Any:
        """Wait for the next batch: an object with `outputs`, a sequence. Is never called twice at a time."""
        ...

    async def abort_requests_async(self, request_ids: list[str], /) -> None:
        """Let go of requests. When it returns, the engine does not work on them any more."""
        ...

    async def collective_rpc_async(
        self, method: str, timeout: float | None = None, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """Call a method of the engine's workers."""
        ...

    def check_health(self) -> None:
        """Raise where the engine is dead; return at once otherwise. Called at each submission."""
        ...

    def shutdown(self) -> None:
        """Let go of everything. Called once, in a worker thread, while the loop still runs."""
        ...


_METHODS: Final = tuple(name for name in vars(AsyncioStageClient) if not name.startswith("_"))

Make: TypeAlias = Callable[[ReplicaContext], Awaitable[AsyncioStageClient]]
"""An async function for asyncio that makes the client of one replica. It runs in the replica's loop, where it must
not block: what takes long and can not be awaited goes through ``loop.run_in_executor(None, ...)``."""


def stage_output(raw: Any) -> StageOutput:
    """Convert one raw engine output as vLLM's clients give it: the default of `asyncio_client_factory`.

    Reads ``request_id``, ``new_token_ids``, ``finish_reason`` (a string, or an enumeration that prints as one),
    ``stop_reason``, ``kv_transfer_params`` and ``pooling_output`` (a mapping becomes the output's data as it is, all
    else goes under ``embedding``). A finish reason of ``error`` fails the request.
    """
    reason = getattr(raw, "finish_reason", None)
    reason = None if reason is None else str(reason)
    pooled = getattr(raw, "pooling_output", None)
    return StageOutput(
        request_id=raw.request_id,
        token_ids=getattr(raw, "new_token_ids", None) or (),
        data=pooled if pooled is None or isinstance(pooled, Mapping) else {"embedding": pooled},
        finish_reason=reason,
        stop_reason=getattr(raw, "stop_reason", None),
        error="the engine gave up on the request; its log may say why" if reason == "error" else None,
        kv_transfer_params=getattr(raw, "kv_transfer_params", None),
    )


def _same(request: StageRequest) -> StageRequest:
    return request


def asyncio_client_factory(
    make: Make,
    *,
    convert_request: Callable[[StageRequest], Any] = _same,
    convert_output: Callable[[Any], StageOutput | None] = stage_output,
    engine_dead: type[Exception] | tuple[type[Exception], ...] | None = None,
    takes_updates: bool = False,
) -> ClientFactory:
    """Return what opens the replicas of a stage as clients that are written for asyncio.

    The client's `shutdown` runs in a worker thread and has three quarters of the close time-out; a thread that takes
    longer is abandoned. Tasks that the client leaves behind are cancelled. An exception in one of its tasks or
    callbacks that nobody handles counts as its death: who knows what no longer runs.

    Args:
        make: makes the client of one replica (see `Make`).
        convert_request: makes what the client's `add_request_async` takes. What it raises refuses the request.
        convert_output: makes a `StageOutput` of each raw output; None where it tells nothing. What it raises fails
            that request alone.
        engine_dead: exceptions of the client that mean that its engine is dead. None: those of a class that is
            called ``EngineDeadError``. Any exception of `get_output_async` counts as a death, too.
        takes_updates: whether a further `add_request_async` with the same id is more input of a request. Else the
            stage takes only requests whose input is complete.

    Returns:
        A factory. Entering what it returns raises `StartupFailed` where `make` fails or takes too long.

    Raises:
        OmniTrioError: trio-asyncio is not installed.
    """
    _import()

    @asynccontextmanager
    async def open_client(context: ReplicaContext) -> AsyncIterator[StageClient]:
        trio_asyncio = _import()
        failure: Exception | None = None
        async with trio_asyncio.open_loop() as loop:
            hosted = _Hosted(loop, context)
            making = hosted.start(make, context)
            try:
                client = _Client(
                    hosted,
                    await _made(hosted, making),
                    convert_request=convert_request,
                    convert_output=convert_output,
                    is_dead=_death_test(engine_dead),
                    takes_updates=takes_updates,
                )
                hosted.on_error = client.unhandled
                yield client
            except Exception as error:
                # Carried past the loop's nurseries, which would wrap it in their groups.
                failure = error
            finally:
                hosted.on_error = None
                await hosted.close(making)
        if failure is not None:
            raise failure

    return open_client


def _import() -> Any:
    try:
        import trio_asyncio  # noqa: PLC0415 - optional; and importing it changes asyncio for the whole process
    except ImportError as error:
        raise OmniTrioError(
            "clients written for asyncio need trio-asyncio, which is not installed; pip install 'omni-trio[asyncio]'"
        ) from error
    return trio_asyncio


def _death_test(engine_dead: type[Exception] | tuple[type[Exception], ...] | None) -> Callable[[Exception], bool]:
    if engine_dead is None:
        # By its name: vLLM's class is not to be imported for it, and other engines have one of the same name.
        return lambda error: any(base.__name__ == "EngineDeadError" for base in type(error).__mro__)
    return lambda error: isinstance(error, engine_dead)


async def _made(hosted: _Hosted, making: asyncio.Task[AsyncioStageClient]) -> AsyncioStageClient:
    """Wait for the client and check that it is one."""
    context = hosted.context

    def failed(message: str) -> StartupFailed:
        return StartupFailed(message, phase="load", **hosted.place)

    context.report("load")
    client: AsyncioStageClient | None = None
    try:
        with trio.move_on_after(context.stage.start_timeout):
            client = await hosted.wait(making)
    except OmniTrioError:
        raise
    except Exception as error:
        raise failed(f"making its client raised {_describe(error)}") from error
    if client is None:
        raise failed(f"its client was not made within start_timeout = {context.stage.start_timeout:g} s")
    if lacking := [name for name in _METHODS if not hasattr(client, name)]:
        raise failed(f"what was made is no stage client: {type(client).__name__} lacks {', '.join(lacking)}")
    context.report("ready")
    return client


def _describe(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


async def _ended(task: asyncio.Task[Any]) -> None:
    """Wait until an asyncio task has ended. Being cancelled leaves it alone."""
    event = trio.Event()
    task.add_done_callback(lambda _: event.set())
    await event.wait()


def _look_at(task: asyncio.Task[Any]) -> None:
    # asyncio would report as overlooked what nobody has looked at.
    if not task.cancelled():
        task.exception()


class _Dead(Exception):
    """The replica died while a call was under way."""


class _Hosted:
    """One replica's asyncio loop: runs calls in it, and ends what is left in it."""

    def __init__(self, loop: Any, context: ReplicaContext) -> None:
        self.context = context
        self.place: dict[str, Any] = {
            "stage": context.stage.name,
            "stage_id": context.stage_id,
            "replica_id": context.replica_id,
        }
        self.on_error: Callable[[Exception], None] | None = None
        """Is told of exceptions that nobody in the loop has handled."""
        self._loop = loop
        self._waiting: set[trio.Event] = set()
        loop.set_exception_handler(self._unhandled)
        loop.set_default_executor(_executor())

    def start(self, function: Callable[..., Awaitable[_T]], *args: Any) -> asyncio.Task[_T]:
        """Start a call in the loop."""

        async def call() -> _T:
            return await function(*args)

        # The caller's context variables, but this loop: the caller's task may know another one, or none.
        context = contextvars.copy_context()
        context.run(_import().current_loop.set, self._loop)
        task: asyncio.Task[_T] = self._loop.create_task(call(), context=context)
        task.add_done_callback(_look_at)
        return task

    async def wait(self, task: asyncio.Task[_T]) -> _T:
        """Wait for a call and return its result. Being cancelled leaves the call alone.

        Raises:
            _Dead: `wake` was called before the call had ended.
            RuntimeError: the call was cancelled from inside.
            Exception: what the call raised.
        """
        event = trio.Event()

        def wake(_: object) -> None:
            event.set()

        task.add_done_callback(wake)
        self._waiting.add(event)
        try:
            await event.wait()
        finally:
            self._waiting.discard(event)
            task.remove_done_callback(wake)
        if not task.done():
            raise _Dead
        if task.cancelled():
            raise RuntimeError("the client cancelled the call itself")
        return task.result()

    async def run(self, function: Callable[..., Awaitable[_T]], *args: Any) -> _T:
        """Run a call in the loop and return its result.

        Being cancelled cancels the call and waits for its end, but not for ever. Raises as `wait`.
        """
        task = self.start(function, *args)
        try:
            return await self.wait(task)
        finally:
            await self.cancel(task)

    async def cancel(self, task: asyncio.Task[Any]) -> None:
        """Cancel a call and wait until it has ended, up to the grace time. Does nothing to one that has ended."""
        if not task.done():
            task.cancel()
            with trio.move_on_after(_GRACE, shield=True):
                await _ended(task)

    def wake(self) -> None:
        """Make all who wait for a call give up on it."""
        for event in self._waiting:
            event.set()

    async def close(self, making: asyncio.Task[AsyncioStageClient]) -> None:
        """End the client, where there is one, then its tasks, within the close time-out.

        Args:
            making: made the client, or still does.
        """
        budget = self.context.close_timeout
        with trio.move_on_after(budget * _POLITE, shield=True) as scope:
            making.cancel()
            await _ended(making)
            shutdown = None if making.cancelled() or making.exception() else getattr(making.result(), "shutdown", None)
            try:
                if shutdown is not None:
                    await trio.to_thread.run_sync(shutdown, abandon_on_cancel=True, limiter=trio.CapacityLimiter(1))
            except Exception:
                _logger.exception("stage %(stage)r, replica %(replica_id)d: its client's shutdown failed", self.place)
        if scope.cancelled_caught:
            _logger.warning(
                "stage %(stage)r, replica %(replica_id)d: its client did not shut down in time, and is abandoned",
                self.place,
            )
        with trio.move_on_after(budget * (1 - _POLITE) / 2, shield=True):
            # Again and again: a task may start others while it ends.
            while tasks := asyncio.all_tasks(self._loop):
                for task in tasks:
                    task.cancel()
                for task in tasks:
                    await _ended(task)
        for task in asyncio.all_tasks(self._loop):
            # The loop would wait for it for ever.
            asyncio._unregister_task(task)  # noqa: SLF001 - documented, for those who write loops and tasks
            _logger.warning("stage %s: an asyncio task of its client ignores its end: %r", self.place["stage"], task)

    def _unhandled(self, loop: asyncio.AbstractEventLoop, details: dict[str, Any]) -> None:
        error = details.get("exception")
        if self.on_error is None or not isinstance(error, Exception):
            # trio-asyncio's own handler would raise it in the loop's nursery.
            asyncio.BaseEventLoop.default_exception_handler(loop, details)  # type: ignore[arg-type]
        else:
            self.on_error(error)


def _executor() -> Any:
    """Make an executor for ``run_in_executor(None, ...)`` whose threads do not hold up the end."""

    class Executor(_import().TrioExecutor):  # type: ignore[misc]
        async def submit(self, function: Callable[..., Any], *args: Any) -> Any:
            # As under asyncio: cancelling the future does not wait for the thread.
            return await trio.to_thread.run_sync(function, *args, abandon_on_cancel=True, limiter=self._limiter)

    return Executor(max_workers=_THREADS)


class _Client:
    """The `StageClient`."""

    def __init__(
        self,
        hosted: _Hosted,
        client: AsyncioStageClient,
        *,
        convert_request: Callable[[StageRequest], Any],
        convert_output: Callable[[Any], StageOutput | None],
        is_dead: Callable[[Exception], bool],
        takes_updates: bool,
    ) -> None:
        self._hosted = hosted
        self._client = client
        self._convert_request = convert_request
        self._convert_output = convert_output
        self._is_dead = is_dead
        self._takes_updates = takes_updates
        self._known: set[str] = set()
        """Requests that the client has or may have: outputs of others are dropped."""
        self._pending: asyncio.Task[Any] | None = None
        """The one call of get_output_async. Outlives the `receive` that started it."""
        self._ready: list[StageOutput] = []
        self._unreadable: list[str] = []
        """Requests that have failed here and that the client does not know to be over."""
        self._death: EngineDied | None = None

    # ---- StageClient

    def resolve_params(self, params: Any) -> Any:
        """Lay a mapping over the stage's defaults; an object of the engine's own class goes before them."""
        if params is not None and not isinstance(params, Mapping):
            return params
        return {**self._hosted.context.stage.sampling, **(params or {})}

    async def submit(self, request: StageRequest) -> None:
        if not request.last and not self._takes_updates:
            await trio.lowlevel.checkpoint()
            raise InvalidRequest("the stage takes no input in pieces; set feed = 'finish' in front of it")
        self._check_health()
        converted = self._converted(request)
        self._known.add(request.request_id)  # before the submission: outputs may come before it returns
        try:
            await self._add(converted)
        except EngineDied:
            self._known.discard(request.request_id)
            raise
        except BaseException:
            await self._take_back(request.request_id)
            raise

    async def update(self, request: StageRequest) -> None:
        if not self._takes_updates:
            await trio.lowlevel.checkpoint()
            raise InvalidRequest("the stage takes no input in pieces; set feed = 'finish' in front of it")
        self._check_alive()
        if request.request_id not in self._known:
            # By contract no error: the stage may have ended the request early, its last output crossing with this.
            await trio.lowlevel.checkpoint()
            return
        await self._add(self._converted(request))

    def _converted(self, request: StageRequest) -> Any:
        try:
            return self._convert_request(request)
        except Exception as error:
            raise InvalidRequest(f"the stage can not use it: {_describe(error)}") from error

    async def _add(self, converted: Any) -> None:
        try:
            await self._ask(self._client.add_request_async, converted)
        except (ValueError, TypeError) as error:
            raise InvalidRequest(f"the stage refused it: {_describe(error)}") from error
        except RequestError:
            raise
        except Exception as error:
            raise StageFailed(f"submitting to it raised {_describe(error)}", **self._hosted.place) from error

    async def abort(self, request_ids: Sequence[str]) -> None:
        self._check_alive()
        known = [request_id for request_id in request_ids if request_id in self._known]
        if not known:
            await trio.lowlevel.checkpoint()
            return
        await self._ask(self._client.abort_requests_async, known)
        self._known.difference_update(known)
        self._ready = [output for output in self._ready if output.request_id not in known]

    async def receive(self) -> Sequence[StageOutput]:
        await trio.lowlevel.checkpoint()
        while True:
            if self._unreadable and self._death is None:
                await self._ask(self._client.abort_requests_async, list(self._unreadable))
                self._unreadable.clear()
            if self._ready:
                outputs, self._ready = self._ready, []
                return outputs
            self._check_alive()
            if self._pending is None:
                self._pending = self._hosted.start(self._client.get_output_async)
            try:
                batch = await self._hosted.wait(self._pending)
            except _Dead:
                continue
            except Exception as error:
                self._die(error)
                continue
            self._pending = None
            self._convert(batch)

    async def call(self, method: str, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        self._check_alive()
        try:
            return await self._ask(self._client.collective_rpc_async, method, None, tuple(args), dict(kwargs or {}))
        except EngineDied:
            raise
        except Exception as error:
            raise StageFailed(f"{method!r} raised {_describe(error)}", **self._hosted.place) from error

    def statistics(self) -> ClientStatistics:
        return ClientStatistics()

    # ---- the client behind it

    def unhandled(self, error: Exception) -> None:
        """Something of the client's raised and nobody handled it: who knows what no longer runs."""
        self._die(error, "something in its client raised and nobody handled it")

    async def _ask(self, function: Callable[..., Awaitable[_T]], *args: Any) -> _T:
        try:
            return await self._hosted.run(function, *args)
        except _Dead:
            death = self._death
        except Exception as error:
            if not self._is_dead(error):
                raise
            death = self._die(error)
        # Raised out here: the death has its cause already, which may be another one than what was met here.
        assert death is not None  # it is what wakes those who wait
        raise death

    async def _take_back(self, request_id: str) -> None:
        """Make sure that the client does not have a request whose submission did not end well."""
        if self._death is not None:
            return
        failure: Exception = TimeoutError(f"not answered within {_GRACE:g} s")
        with trio.move_on_after(_GRACE, shield=True):
            try:
                await self._ask(self._client.abort_requests_async, [request_id])
            except Exception as error:
                failure = error
            else:
                self._known.discard(request_id)
                return
        self._die(failure, "it did not take back a request whose submission failed")

    def _convert(self, batch: Any) -> None:
        for raw in batch.outputs:
            request_id = raw.request_id
            if request_id not in self._known:
                continue
            try:
                output = self._convert_output(raw)
            except Exception as error:
                _logger.exception("stage %(stage)r: an output can not be converted", self._hosted.place)
                output = StageOutput(request_id=request_id, error=f"its output can not be converted: {error!r}")
                self._unreadable.append(request_id)
            if output is None:
                continue
            if output.finished:
                self._known.discard(request_id)
            self._ready.append(output)

    def _check_alive(self) -> None:
        if self._death is not None:
            raise self._death

    def _check_health(self) -> None:
        self._check_alive()
        try:
            self._client.check_health()
        except Exception as error:
            self._die(error)
        self._check_alive()

    def _die(self, error: Exception, what: str | None = None) -> EngineDied:
        if self._death is None:
            if what is None:
                what = "the engine is dead" if self._is_dead(error) else "its client failed"
            self._death = EngineDied(f"{what}: {_describe(error)}", **self._hosted.place)
            self._death.__cause__ = error
            self._known.clear()
            self._hosted.wake()
        return self._death
