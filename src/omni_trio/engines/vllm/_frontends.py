"""What turns prompts into engine requests: built in worker threads, shared by replicas that are alike."""

from __future__ import annotations

import importlib
import logging
import os
import threading
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import trio

if TYPE_CHECKING:
    from ._compat import Frontend

__all__ = ["Frontends"]

_import_lock = threading.Lock()


class _Entry:
    """One way to set an engine up, and how many replicas use it."""

    def __init__(self, args: Mapping[str, Any]) -> None:
        self._args = args
        self._thread_lock = threading.Lock()
        self.lock = trio.Lock()
        self.users = 0
        self.frontend: Frontend | None = None

    def build(self) -> Frontend:
        """Build it, or return what an earlier thread, which nobody waited for any more, has built."""
        with self._thread_lock:
            if self.frontend is None:
                self.frontend = _compat_module().Frontend.build(self._args)
            return self.frontend


class Frontends:
    """The frontends in use, by engine arguments."""

    def __init__(self) -> None:
        self._entries: dict[str, _Entry] = {}

    @contextmanager
    def use(self, args: Mapping[str, Any]) -> Iterator[Callable[[], Awaitable[Frontend]]]:
        """Use one for a block; yields the function that waits for it, and raises what building it raises.

        The thread that builds can not be interrupted in its imports. When the wait is cancelled it goes on, and
        its result serves the next start or is dropped.
        """
        key = repr(sorted(args.items()))
        entry = self._entries.setdefault(key, _Entry(args))
        entry.users += 1
        mine: list[Frontend] = []

        async def get() -> Frontend:
            # The lock keeps all but one of the waiting replicas out of threads.
            async with entry.lock:
                frontend = await trio.to_thread.run_sync(entry.build, abandon_on_cancel=True)
                if not frontend.shareable:
                    entry.frontend = None
                    mine.append(frontend)
            return frontend

        try:
            yield get
        finally:
            entry.users -= 1
            if not entry.users:
                del self._entries[key]
                if entry.frontend is not None:
                    entry.frontend.close()
            for frontend in mine:
                frontend.close()


def _compat_module() -> Any:
    with _import_lock:
        # What vLLM has to say of this machine while it is imported is in every engine's log, too.
        if (logger := logging.getLogger("vllm")).level == logging.NOTSET and "VLLM_LOGGING_LEVEL" not in os.environ:
            logger.setLevel(logging.ERROR)
        return importlib.import_module("omni_trio.engines.vllm._compat")
