"""`open_runtime` as users know it: the runtime together with the engines that a pipeline's stage kinds name."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from .pipeline import Pipeline
from .runtime import DeathPolicy, Instrument, Runtime
from .runtime import open_runtime as _open_runtime
from .stages import ClientFactory

if TYPE_CHECKING:
    from .engines.process import Zygote

__all__ = ["open_runtime"]


@asynccontextmanager
async def open_runtime(
    pipeline: Pipeline,
    *,
    clients: Mapping[str, ClientFactory] | None = None,
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
            on_engine_death=on_engine_death,
            max_in_flight=max_in_flight,
            abort_timeout=abort_timeout,
            shutdown_deadline=shutdown_deadline,
            instruments=instruments,
        ) as runtime,
    ):
        yield runtime
