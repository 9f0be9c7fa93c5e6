"""A nursery for the tasks that serve a context manager's body."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import final

import trio

__all__ = ["ServiceNursery", "open_service_nursery"]


@final
class ServiceNursery:
    """Runs service tasks: see `open_service_nursery`."""

    def __init__(self, nursery: trio.Nursery) -> None:
        self._nursery = nursery
        self._scopes: set[trio.CancelScope] = set()
        self._closed = False

    def start_soon(self, function: Callable[..., Awaitable[object]], *args: object) -> None:
        """Start a service task. It runs until it returns or the body is over."""
        if self._closed:
            raise RuntimeError("the services have ended; nothing can be started among them any more")
        # Made here, not in the task: one that has not run yet must be cancelled too.
        scope = trio.CancelScope(shield=True)
        self._scopes.add(scope)
        self._nursery.start_soon(self._run, scope, function, args, name=function)

    async def _run(
        self, scope: trio.CancelScope, function: Callable[..., Awaitable[object]], args: tuple[object, ...]
    ) -> None:
        # The shield lasts as long as the body, whose end cancels the scope: the body's own clean-up, which may
        # await under a cancelled scope, still has the services that it needs.
        with scope:
            await function(*args)
        self._scopes.discard(scope)

    def cancel(self) -> None:
        """End all services."""
        self._closed = True
        for scope in self._scopes:
            scope.cancel("the body that this service served is over")


@asynccontextmanager
async def open_service_nursery() -> AsyncIterator[ServiceNursery]:
    """Open a nursery whose tasks serve the body: they outlive a cancellation of it, and end when it has ended.

    A service that raises cancels the body. A lone exception comes out as itself, not in a group, so that a
    context manager built on this passes its caller's exceptions through as they are.
    """
    lone: BaseException | None = None
    try:
        async with trio.open_nursery(strict_exception_groups=True) as nursery:
            services = ServiceNursery(nursery)
            try:
                yield services
            finally:
                services.cancel()
    except BaseExceptionGroup as group:
        if len(group.exceptions) != 1:
            raise
        lone = group.exceptions[0]
    # Outside the except block, so that the error keeps the context and cause that it came with.
    if lone is not None:
        raise lone
