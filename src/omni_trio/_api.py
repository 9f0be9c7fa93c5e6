"""`open_runtime` and `open_orchestrator` as users know them: with the engines that a pipeline's stage kinds name."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from .message_level import Channels
from .message_level import open_orchestrator as _open_orchestrator
from .pipeline import Pipeline
from .runtime import DeathPolicy, Instrument, Runtime
from .runtime import open_runtime as _open_runtime
from .stages import BalancerFactory, ClientFactory

if TYPE_CHECKING:
    from .engines.process import Zygote

__all__ = ["open_orchestrator", "open_runtime"]


@asynccontextmanager
async def open_runtime(
    pipeline: Pipeline,
    *,
    clients: Mapping[str, ClientFactory] | None = None,
    balancers: Mapping[str, BalancerFactory] | None = None,
    on_engine_death: DeathPolicy = "fail_stop",
    max_in_flight: int = 10_000,
    abort_timeout: float = 10.0,
    shutdown_deadline: float = 10.0,
    instruments: Iterable[Instrument] = (),
    zygote: Zygote | None = None,
) -> AsyncIterator[Runtime]:
    """Bring a pipeline up, give it to the block, and take it down again.

    Entering starts all replicas at the same time and returns when all are up. Leaving, for whatever reason, takes
    no more requests, ends those in flight (each gets its one terminal), aborts them at the stages, and then closes
    the engines: politely, then with SIGTERM, then with SIGKILL.

    Args:
        pipeline: what to run.
        clients: by stage name, what opens a replica of it, where that is not what the stage's kind says.
        balancers: by stage name, what makes the `omni_trio.stages.Balancer` that chooses among its replicas. Without
            one it is the replica with the least in hand.
        on_engine_death: ``fail_stop``: when a replica dies every request in flight fails with `EngineDied`, the
            block is cancelled and this raises `EngineDied`. ``isolate``: only requests that the replica had in
            hand fail, with `ReplicaLost`; the runtime goes on with the other replicas.
        max_in_flight: requests that may be in flight; one more is refused with `Overloaded`.
        abort_timeout: seconds that a stage has to acknowledge an abort; one that does not counts as dead.
        shutdown_deadline: seconds that closing all engines may take, SIGKILL included.
        instruments: callables that are told what happens (`TraceEvent`): a timeline, a progress bar, a test.
        zygote: a warm `omni_trio.engines.process.Zygote` to fork engine processes from; without one, a pipeline
            that needs processes starts its own.

    Raises:
        StartupFailed: a replica did not come up; those that had are down again.
        EngineDied: an engine died (under ``fail_stop``).
    """
    from .engines import open_clients  # noqa: PLC0415 - a runtime is opened long after this package is imported

    async with (
        open_clients(pipeline, given=clients or {}, zygote=zygote, close_timeout=shutdown_deadline) as factories,
        _open_runtime(
            pipeline,
            clients=factories,
            balancers=balancers,
            on_engine_death=on_engine_death,
            max_in_flight=max_in_flight,
            abort_timeout=abort_timeout,
            shutdown_deadline=shutdown_deadline,
            instruments=instruments,
        ) as runtime,
    ):
        yield runtime


@asynccontextmanager
async def open_orchestrator(
    pipeline: Pipeline,
    *,
    clients: Mapping[str, ClientFactory] | None = None,
    command_buffer: int = 256,
    event_buffer: int = 256,
    news_timeout: float = 5.0,
    on_engine_death: DeathPolicy = "fail_stop",
    max_in_flight: int = 10_000,
    abort_timeout: float = 10.0,
    shutdown_deadline: float = 10.0,
    instruments: Iterable[Instrument] = (),
    zygote: Zygote | None = None,
) -> AsyncIterator[Channels]:
    """Bring a pipeline up, and drive it by messages: commands in, events out (see `omni_trio.message_level`).

    Read the events in a task of their own, and to their end if the end of every request matters: send `Shutdown`, or
    close the commands, and read on. Leaving the block ends everything at once; what the events' buffer has no room for
    is then not told.

    Args:
        pipeline: what to run.
        clients: by stage name, what opens a replica of it, where that is not what the stage's kind says.
        command_buffer: commands that may wait to be taken; who sends one more waits.
        event_buffer: events that may wait to be read. With that many waiting, each request holds its next one back,
            and merges what its stages make meanwhile; the stages go on.
        news_timeout: seconds that the block goes on after everything has ended by itself (an engine died, under
            ``fail_stop``), so that whoever reads can hear how each request ended. Then it is cancelled.
        on_engine_death: as for `open_runtime`.
        max_in_flight: requests that may be in flight, those included whose last event has not been read yet. One
            more is refused with `Overloaded`.
        abort_timeout: as for `open_runtime`.
        shutdown_deadline: as for `open_runtime`.
        instruments: as for `open_runtime`.
        zygote: as for `open_runtime`.

    Raises:
        StartupFailed: a replica did not come up; those that had are down again.
        EngineDied: an engine died (under ``fail_stop``).
    """
    from .engines import open_clients  # noqa: PLC0415 - see above

    async with (
        open_clients(pipeline, given=clients or {}, zygote=zygote, close_timeout=shutdown_deadline) as factories,
        _open_orchestrator(
            pipeline,
            clients=factories,
            command_buffer=command_buffer,
            event_buffer=event_buffer,
            news_timeout=news_timeout,
            on_engine_death=on_engine_death,
            max_in_flight=max_in_flight,
            abort_timeout=abort_timeout,
            shutdown_deadline=shutdown_deadline,
            instruments=instruments,
        ) as channels,
    ):
        yield channels
