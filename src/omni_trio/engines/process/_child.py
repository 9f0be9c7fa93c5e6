"""A child process as the head sees it."""

from __future__ import annotations

import math
import os
import select
import signal
from collections import deque
from typing import Final, final

import trio

from ._errors import UNKNOWN_RETURNCODE, LaunchFailed, describe_exit, signal_name

__all__ = ["ChildProcess"]

_LOG_LIMIT: Final = 64 * 1024
"""Bytes of a child's log that are kept."""

_STATUS_GRACE: Final = 2.0
"""Seconds that the zygote has to tell the exit code of a child that is known to be dead."""

_END_TIMEOUT: Final = 5.0
"""Seconds that the kernel and the zygote have to get rid of a group that was sent SIGKILL."""


@final
class ChildProcess:
    """One child of the zygote's, which leads a process group of its own. Made by `Launcher.open_child`."""

    def __init__(self, *, name: str, pid: int, pidfd: int, log_fd: int, death_fd: int) -> None:
        """Take over the descriptors."""
        self.name = name
        """What the child is called in errors and process lists."""
        self.pid = pid
        """Its process id, which is its group's too."""
        self._pidfd = pidfd
        self._log_fd = log_fd
        self._death_fd = death_fd
        self._returncode: int | None = None
        self._told = trio.Event()
        """Set when the zygote has said all that it will ever say of the exit code."""
        self._exited = trio.Event()
        self._gone = trio.Event()
        self._log: deque[bytes] = deque()
        self._log_size = 0
        self._log_scope = trio.CancelScope()

    def __repr__(self) -> str:
        return f"<ChildProcess {self.name!r} pid {self.pid}: {describe_exit(self._returncode)}>"

    @property
    def returncode(self) -> int | None:
        """How it ended, as `subprocess.Popen.returncode`; `UNKNOWN_RETURNCODE` where the zygote died first.

        None while it runs.
        """
        return self._returncode

    async def wait(self) -> int:
        """Wait for its death, and return how it ended (see `returncode`). Any number of tasks may wait."""
        await self._exited.wait()
        assert self._returncode is not None
        return self._returncode

    def log_tail(self, lines: int = 20) -> str:
        """Return the last lines that it has written to stdout and stderr. Works after its end too."""
        self._drain()
        return "\n".join(b"".join(self._log).decode(errors="replace").splitlines()[-lines:])

    def signal(self, number: int) -> None:
        """Send a signal to its whole process group. Does nothing once the child is dead."""
        if self._returncode is None and not self._is_dead():
            # While the leader lives its number is its own.
            self._kill_group(number)

    async def stop(self, *, terminate_after: float = 0.0, kill_after: float = 3.0) -> int:
        """End it: wait, SIGTERM to its group, wait, SIGKILL to its group; return how it ended.

        A cancellation skips what is left of the two waits; SIGKILL is sent, and its effect waited for, anyway.

        Args:
            terminate_after: seconds to wait for its own end before SIGTERM, for a caller that has asked it to
                end in a way of its own; `math.inf` for no SIGTERM at all is not useful, 0 for at once is.
            kill_after: seconds from SIGTERM to SIGKILL; 0 sends SIGKILL alone.

        Raises:
            LaunchFailed: the kernel did not get rid of it within some seconds of SIGKILL.
        """
        for name, value in (("terminate_after", terminate_after), ("kill_after", kill_after)):
            if not 0 <= value < math.inf:
                raise ValueError(f"{name} is a finite number of seconds from 0, not {value!r}")
        try:
            if terminate_after:
                with trio.move_on_after(terminate_after):
                    return await self.wait()
            if kill_after:
                self.signal(signal.SIGTERM)
                with trio.move_on_after(kill_after):
                    return await self.wait()
        finally:
            await self._end()
        return await self.wait()

    # -- for the launcher

    def tell_exited(self, returncode: int) -> None:
        """Take the zygote's word for how it ended."""
        if self._returncode is None:
            self._returncode = returncode
        self._told.set()
        self._exited.set()

    def tell_gone(self) -> None:
        """Take the zygote's word that its group is empty."""
        self._gone.set()

    def tell_lost(self) -> None:
        """Hear that the zygote will say nothing any more."""
        self._told.set()
        if self._exited.is_set():
            self._gone.set()

    async def watch(self) -> None:
        """Notice its death. Run by one task."""
        try:
            await trio.lowlevel.wait_readable(self._pidfd)
            with trio.move_on_after(_STATUS_GRACE):
                await self._told.wait()
            if self._returncode is None:
                # The zygote is gone or stuck, and has not killed the group. Its number is safe while it has
                # members, and very unlikely to have been taken again within this moment if it has none.
                self._kill_group(signal.SIGKILL)
                self._returncode = UNKNOWN_RETURNCODE
                self._exited.set()
                self._gone.set()
        finally:
            os.close(self._pidfd)
            self._pidfd = -1

    async def read_log(self) -> None:
        """Keep its log's tail. Run by one task, so that the child never waits for a reader."""
        try:
            with self._log_scope:
                while self._drain():
                    await trio.lowlevel.wait_readable(self._log_fd)
        finally:
            os.close(self._log_fd)
            self._log_fd = -1

    async def _end(self) -> None:
        """Kill the group and wait until nothing of it is left."""
        with trio.move_on_after(_END_TIMEOUT, shield=True) as scope:
            self.signal(signal.SIGKILL)
            await self._exited.wait()
            await self._gone.wait()
        if scope.cancelled_caught:
            raise LaunchFailed(
                f"process {self.pid} ({self.name}) or its children did not end within {_END_TIMEOUT} s of SIGKILL; "
                "look at their state with ps: 'D' is a device or file system that does not answer"
            )

    async def dispose(self) -> None:
        """End it, then let go of everything that was held for it. Run once, by its block's exit."""
        try:
            await self._end()
        finally:
            os.close(self._death_fd)
            self._drain()
            self._log_scope.cancel("the child's group is gone; whoever holds its log now has left it")

    def _is_dead(self) -> bool:
        if self._pidfd < 0:
            return True
        poll = select.poll()
        poll.register(self._pidfd, select.POLLIN)
        return bool(poll.poll(0))

    def _kill_group(self, number: int) -> None:
        try:
            os.killpg(self.pid, number)
        except ProcessLookupError:
            return
        except PermissionError as error:
            raise LaunchFailed(
                f"process {self.pid} ({self.name}) has changed its user and can not be sent {signal_name(number)}"
            ) from error

    def _drain(self) -> bool:
        """Read what the pipe holds right now; return False at its end."""
        if self._log_fd < 0:
            return False
        # A pipe holds 64 KiB: one that is still full after a few reads has a writer that outruns us.
        for _ in range(4):
            try:
                data = os.read(self._log_fd, _LOG_LIMIT)
            except BlockingIOError:
                return True
            if not data:
                return False
            self._log.append(data)
            self._log_size += len(data)
            while self._log_size - len(self._log[0]) >= _LOG_LIMIT:
                self._log_size -= len(self._log.popleft())
        return True
