"""How the replicas of `llm` and `pooling` stages are opened: a process, a handshake, a client."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NoReturn

import attrs
import trio

from omni_trio.engines.process import ChildProcess, Launcher, LaunchFailed, describe_exit, open_service_nursery
from omni_trio.engines.zmq_trio import SharedZmqContext
from omni_trio.errors import ConfigError, InvalidRequest, StartupFailed
from omni_trio.pipeline import StageSpec
from omni_trio.stages import ClientFactory, ReplicaContext, StageClient

from ._frontends import Frontends
from ._text import describe
from ._version import installed_version
from ._wire import Wire

if TYPE_CHECKING:
    from ._compat import Frontend
    from ._engine import VllmClient

__all__ = ["vllm_client_factory"]

_ENTRY: Final = "omni_trio.engines.vllm._child:engine_main"

_RUNNERS: Final = {"llm": "generate", "pooling": "pooling"}
"""What vLLM calls the kinds of stages that it runs."""

_LAST_WORDS: Final = 1.0
"""Seconds that a failing start waits for the other side to say why, too."""


def vllm_client_factory(launcher: Launcher) -> ClientFactory:
    """Return what opens the replicas of `llm` and `pooling` stages as vLLM engines.

    Engines start fast, in about half a second instead of 7, where the launcher's zygote preloads `PRELOAD`.
    Replicas with the same engine arguments share one config and tokenizer. Importing vLLM and reading a model's
    config happen in worker threads; a cancelled start does not wait for them.

    Args:
        launcher: starts the engines' processes, and owns the directory of their sockets. It must stay open
            longer than every client.

    Returns:
        A factory. Entering what it returns raises `StartupFailed`; and `omni_trio.errors.OmniTrioError` where
        vLLM is missing or too old.
    """
    shared = _Shared(launcher)

    @asynccontextmanager
    async def open_client(context: ReplicaContext) -> AsyncIterator[StageClient]:
        async with _open(shared, context) as client:
            yield client

    return open_client


class _Shared:
    """What the replicas of one factory share, as long as there is one."""

    def __init__(self, launcher: Launcher) -> None:
        self.launcher = launcher
        self.frontends = Frontends()
        self._zmq = SharedZmqContext()
        self._numbers = itertools.count()

    @asynccontextmanager
    async def wire(self, name: str) -> AsyncIterator[tuple[Wire, Path]]:
        """Open the sockets of one engine, in a directory of its own."""
        directory = self.launcher.directory / f"{name}-{next(self._numbers)}"
        directory.mkdir(mode=0o700)
        try:
            async with self._zmq.open() as context:
                with Wire(context, directory) as wire:
                    yield wire, directory
        finally:
            # A handful of sockets and small files: quicker done than handed to a thread.
            shutil.rmtree(directory, ignore_errors=True)


@attrs.define
class _Startup:
    """How far a start has come."""

    context: ReplicaContext
    phase: str = "spawn"
    child: ChildProcess | None = None

    def enter(self, phase: str) -> None:
        self.phase = phase
        self.context.report(phase)

    def failed(self, message: str, *, phase: str | None = None, log_tail: str | None = None) -> StartupFailed:
        if log_tail is None:
            log_tail = "" if self.child is None else self.child.log_tail()
        return StartupFailed(
            message,
            phase=phase or self.phase,
            stage=self.context.stage.name,
            stage_id=self.context.stage_id,
            replica_id=self.context.replica_id,
            log_tail=log_tail,
        )

    def config_failed(
        self, text: str, key: str | None = None, *, field: str = "engine_args", cause: BaseException | None = None
    ) -> StartupFailed:
        """Make the error for something in the stage's description that vLLM refuses.

        Args:
            text: what is wrong.
            key: name of the argument, where it is known.
            field: the stage's field that it stands in.
            cause: what was raised.
        """
        place = f"stages.{self.context.stage.name}.{field}"
        config_error = ConfigError(text, key=place if key is None else f"{place}.{key}")
        config_error.__cause__ = cause
        # What is wrong with the stage's own parameters is found here; the engine and its log know nothing of it.
        failure = self.failed(str(config_error), phase="config", log_tail="" if field == "sampling" else None)
        failure.__cause__ = config_error
        return failure


def _engine_args(stage: StageSpec) -> dict[str, Any]:
    return {"runner": _RUNNERS[stage.kind], **stage.engine_args, "model": stage.model}


@asynccontextmanager
async def _open(shared: _Shared, context: ReplicaContext) -> AsyncIterator[VllmClient]:
    installed_version()
    stage = context.stage
    startup = _Startup(context)
    async with (
        shared.wire(f"{stage.name[:20]}{context.replica_id}") as (wire, directory),
        open_service_nursery() as services,
        AsyncExitStack() as stack,
    ):
        with trio.move_on_after(stage.start_timeout) as scope:
            client = await _start(shared, startup, wire, directory, stack)
        if scope.cancelled_caught:
            raise startup.failed(f"it was not ready within start_timeout = {stage.start_timeout} s")
        services.start_soon(client.serve)
        try:
            startup.enter("ready")
            yield client
        finally:
            with trio.move_on_after(context.close_timeout, shield=True):
                await client.close()


async def _start(shared: _Shared, startup: _Startup, wire: Wire, directory: Path, stack: AsyncExitStack) -> VllmClient:
    """Start an engine and connect to it. What has to be ended after the client goes on the stack."""
    stage = startup.context.stage
    engine_args = _engine_args(stage)
    if engine_args["runner"] not in ("auto", _RUNNERS[stage.kind]):
        raise startup.config_failed(f"{engine_args['runner']!r} is not for stages of kind {stage.kind!r}", "runner")
    log_stats = not engine_args.pop("disable_log_stats", False)
    frontend_of = stack.enter_context(shared.frontends.use(engine_args))
    kwargs = {
        "engine_args": engine_args,
        "handshake_address": wire.handshake_address,
        "directory": str(directory),
        "log_stats": log_stats,
        "devices": stage.device_group(startup.context.replica_id),
    }
    client: VllmClient | None = None
    failure: StartupFailed | None = None
    try:
        async with trio.open_nursery() as nursery:
            prepared = _Prepared()
            nursery.start_soon(_prepare, startup, frontend_of, prepared)
            startup.enter("spawn")
            child = startup.child = await _spawn(shared.launcher, startup, kwargs, stack)
            startup.enter("handshake")
            nursery.start_soon(_die, startup, child)
            ready = await _shake_hands(startup, wire)
            await prepared.event.wait()
            assert prepared.frontend is not None  # set before the event
            client = await _connect(startup, prepared.frontend, wire, child, ready)
            nursery.cancel_scope.cancel("the engine is ready")
    except* StartupFailed as group:
        failure = _first(group)
    if failure is not None:
        raise failure
    # Without a failure the nursery is only ever cancelled when there is a client, or from outside.
    await trio.lowlevel.checkpoint_if_cancelled()
    assert client is not None  # see above
    return client


def _first(group: BaseExceptionGroup[StartupFailed]) -> StartupFailed:
    error = group.exceptions[0]
    return _first(error) if isinstance(error, BaseExceptionGroup) else error


@attrs.define(eq=False)
class _Prepared:
    event: trio.Event = attrs.field(factory=trio.Event)
    frontend: Frontend | None = None


async def _prepare(startup: _Startup, frontend_of: Any, prepared: _Prepared) -> None:
    """Build what this side needs of vLLM, while the engine starts."""
    refusal: Exception | None = None
    try:
        prepared.frontend = await frontend_of()
    except Exception as error:
        refusal = error
    if refusal is not None:
        # The engine meets the same obstacle; its log belongs into the error.
        if startup.child is not None:
            with trio.move_on_after(_LAST_WORDS):
                await startup.child.wait()
        raise startup.config_failed(describe(refusal), getattr(refusal, "key", None), cause=refusal)
    prepared.event.set()


async def _spawn(
    launcher: Launcher, startup: _Startup, kwargs: Mapping[str, Any], stack: AsyncExitStack
) -> ChildProcess:
    stage = startup.context.stage
    name = f"vllm {stage.name} {startup.context.replica_id}"
    try:
        return await stack.enter_async_context(launcher.open_child(name, _ENTRY, kwargs, env=stage.env))
    except LaunchFailed as error:
        raise startup.failed(str(error), log_tail=error.log_tail) from error
    except TypeError as error:
        refusal = error
    raise startup.config_failed(str(refusal), cause=refusal)


async def _die(startup: _Startup, child: ChildProcess) -> NoReturn:
    """Fail the start when the process ends, unless it has said itself why."""
    returncode = await child.wait()
    await trio.sleep(_LAST_WORDS)
    raise startup.failed(f"the engine's process {describe_exit(returncode)}")


async def _shake_hands(startup: _Startup, wire: Wire) -> dict[str, Any]:
    while True:
        message = await wire.hello()
        status = message.get("status")
        if status == "HELLO":
            startup.enter("load")
        elif status == "READY":
            return await wire.ready()
        elif status == "FAILED":
            await _say_why(startup, message)


async def _connect(
    startup: _Startup, frontend: Frontend, wire: Wire, child: ChildProcess, ready: Mapping[str, Any]
) -> VllmClient:
    from ._engine import connect  # noqa: PLC0415 - imports vLLM, as a worker thread has done by now

    try:
        return await connect(startup.context, frontend, wire, child, ready)
    except InvalidRequest as error:
        # The stage's own parameters are the first that are checked.
        refusal = error
    raise startup.config_failed(refusal.message, field="sampling", cause=refusal)


async def _say_why(startup: _Startup, message: Mapping[str, Any]) -> NoReturn:
    assert startup.child is not None  # it has just spoken
    # Its log is complete when it has ended.
    with trio.move_on_after(_LAST_WORDS):
        await startup.child.wait()
    text = str(message["message"])
    if message["phase"] == "config":
        raise startup.config_failed(text, message["key"])
    raise startup.failed(f"{message['type']}: {text}")
