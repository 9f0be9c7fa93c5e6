"""The launcher: one session of a zygote, and the trio side of everything that it starts."""

from __future__ import annotations

import math
import os
import shutil
import socket
import sys
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, Final, final

import attrs
import msgspec
import trio

from ._child import ChildProcess
from ._errors import LaunchFailed
from ._nursery import ServiceNursery, open_service_nursery
from ._protocol import Event, Exited, Gone, Payload, Spawn, Spawned, SpawnRefused, check_entry, plain, receive_packet
from ._zygote import Zygote

__all__ = ["Launcher", "open_launcher"]

_SHORT_ENOUGH: Final = 50
"""Characters of a private directory's path that leave room for the names of sockets (107 bytes in all)."""

_ZYGOTE_GRACE: Final = 1.0
"""Seconds that a zygote whose socket has closed has to be a dead process too."""


@attrs.define(eq=False)
class _Pending:
    """A spawn whose answer has not come yet, with our ends of the child's log and death pipe."""

    name: str
    log_fd: int
    death_fd: int
    answered: trio.Event = attrs.field(factory=trio.Event)
    child: ChildProcess | None = None
    error: str = ""


@final
class Launcher:
    """Starts child processes by a zygote. Made by `open_launcher`.

    Attributes:
        directory: a private directory (mode 0700, short path) for sockets and temporary files. The children
            have it as their ``TMPDIR``; it is removed when the launcher is closed.
    """

    def __init__(self, zygote: Zygote, directory: Path, sock: socket.socket, services: ServiceNursery) -> None:
        self.directory = directory
        self._zygote = zygote
        self._socket = sock
        self._services = services
        self._send_lock = trio.Lock()
        self._next_id = 0
        self._pending: dict[int, _Pending] = {}
        self._children: dict[int, ChildProcess] = {}
        self._closing = False
        self._end_reason = ""
        """Why nothing can be started any more; empty while it can."""
        self._ended = trio.Event()

    @asynccontextmanager
    async def open_child(
        self, name: str, entry: str, kwargs: Mapping[str, Any], *, env: Mapping[str, str] | None = None
    ) -> AsyncIterator[ChildProcess]:
        """Start a child process; leaving the block kills whatever is left of its process group, and waits for that.

        Use `ChildProcess.stop` before the end of the block for a polite end. The child's death does not end
        the block: a task that waits for it (`ChildProcess.wait`) does what has to be done.

        In the child, stdin is empty, stdout and stderr go to its log (`ChildProcess.log_tail`), ``TMPDIR`` is
        `directory`. It exits as soon as the entry returns (code 0) or raises (code 1, with the traceback in its
        log), without running exit handlers or waiting for threads. It is killed the moment this process dies.

        Args:
            name: what the child is called in errors and, cut to 15 bytes, in process lists.
            entry: ``package.module:function``: what to call in the child.
            kwargs: its keyword arguments: plain data only (None, booleans, numbers, strings, bytes, lists,
                dicts). Tuples arrive as lists.
            env: environment variables to set in the child.

        Raises:
            LaunchFailed: the zygote is gone, its preload failed, or it could not fork.
            TypeError: something in `kwargs` or `env` is not plain data.
            ValueError: `entry` has not the form of one.
        """
        child_id, child = await self._spawn(name, entry, kwargs, env or {})
        try:
            yield child
        finally:
            try:
                await child.dispose()
            finally:
                del self._children[child_id]

    async def _spawn(
        self, name: str, entry: str, kwargs: Mapping[str, Any], env: Mapping[str, str]
    ) -> tuple[int, ChildProcess]:
        check_entry(entry)
        payload = msgspec.msgpack.encode(
            Payload(
                name=name,
                entry=entry,
                kwargs=plain(kwargs, "kwargs"),
                env=_checked_env(env),
                directory=str(self.directory),
                path=list(sys.path),
            )
        )
        child_id = self._next_id
        self._next_id += 1
        with ExitStack() as ours, ExitStack() as theirs:
            payload_fd = os.memfd_create("omni-trio-payload")
            theirs.callback(os.close, payload_fd)
            with os.fdopen(os.dup(payload_fd), "wb") as file:
                file.write(payload)
            log_fd, log_w = os.pipe()
            ours.callback(os.close, log_fd)
            theirs.callback(os.close, log_w)
            os.set_blocking(log_fd, False)
            death_r, death_fd = os.pipe()
            ours.callback(os.close, death_fd)
            theirs.callback(os.close, death_r)
            pending = self._pending[child_id] = _Pending(name, log_fd, death_fd)
            try:
                await self._send(msgspec.msgpack.encode(Spawn(child_id=child_id)), [payload_fd, log_w, death_r])
                theirs.close()
                await pending.answered.wait()
            finally:
                # An answer that comes later finds nobody, and the child a death pipe that is closed.
                del self._pending[child_id]
            child = pending.child
            if child is None:
                raise LaunchFailed(f"could not start {name!r}: {pending.error}", log_tail=self._zygote.log_tail())
            ours.pop_all()
        self._services.start_soon(child.watch)
        self._services.start_soon(child.read_log)
        return child_id, child

    async def _send(self, packet: bytes, fds: Sequence[int]) -> None:
        async with self._send_lock:
            while True:
                if self._end_reason:
                    raise LaunchFailed(self._end_reason, log_tail=self._zygote.log_tail())
                try:
                    socket.send_fds(self._socket, [packet], fds)
                except BlockingIOError:
                    await trio.lowlevel.wait_writable(self._socket)
                except OSError:
                    # Nobody is at the other end: `receive` finds that out too, and why. Then the loop raises.
                    await self._ended.wait()
                else:
                    return

    async def receive(self) -> None:
        """Take the zygote's messages until it ends the session. Run by one task."""
        while True:
            await trio.lowlevel.wait_readable(self._socket)
            try:
                packet, fds = receive_packet(self._socket)
            except BlockingIOError:
                continue
            if not packet:
                break
            self._take(msgspec.msgpack.decode(packet, type=Event), fds)
        if not self._closing:
            state = await trio.to_thread.run_sync(self._zygote.describe, _ZYGOTE_GRACE)
            self._end_reason = f"the zygote process {state}; open a new launcher, with a new zygote"
        self._ended.set()
        for pending in self._pending.values():
            pending.error = self._end_reason
            pending.answered.set()
        for child in self._children.values():
            child.tell_lost()

    def _take(self, event: Event, fds: Sequence[int]) -> None:
        match event:
            case Spawned(child_id=child_id, pid=pid):
                (pidfd,) = fds
                pending = self._pending.get(child_id)
                if pending is None:
                    os.close(pidfd)
                else:
                    # In the table before the next message is read: that may tell of its end.
                    pending.child = self._children[child_id] = ChildProcess(
                        name=pending.name, pid=pid, pidfd=pidfd, log_fd=pending.log_fd, death_fd=pending.death_fd
                    )
                    pending.answered.set()
            case SpawnRefused(child_id=child_id, message=message):
                if (pending := self._pending.get(child_id)) is not None:
                    pending.error = message
                    pending.answered.set()
            case Exited(child_id=child_id, returncode=returncode):
                if (child := self._children.get(child_id)) is not None:
                    child.tell_exited(returncode)
            case Gone(child_id=child_id):
                if (child := self._children.get(child_id)) is not None:
                    child.tell_gone()

    async def end_session(self) -> None:
        """Have the zygote end what is left, and wait until it has."""
        self._closing = True
        self._end_reason = self._end_reason or "the launcher is closed"
        try:
            self._socket.shutdown(socket.SHUT_WR)
        except OSError:
            # Not connected any more: the zygote is gone, and with it the session.
            self._ended.set()
        await self._ended.wait()


def _checked_env(env: Mapping[Any, Any]) -> dict[str, str]:
    for key, value in env.items():
        if not isinstance(key, str) or not isinstance(value, str):
            raise TypeError(f"an environment variable is a pair of strings, not {key!r}: {value!r}")
    return dict(env)


def _make_directory() -> Path:
    base = tempfile.gettempdir()
    if len(os.fsencode(base)) > _SHORT_ENOUGH and os.access("/tmp", os.W_OK):  # noqa: S108 - mkdtemp is safe there
        base = "/tmp"  # noqa: S108 - as above
    return Path(tempfile.mkdtemp(prefix="omni-", dir=base))


def _remove_directory(directory: Path) -> None:
    # The zygote has removed it, unless it is dead.
    if directory.exists():
        shutil.rmtree(directory)


@asynccontextmanager
async def open_launcher(
    *, zygote: Zygote | None = None, preload: Sequence[str] = (), close_timeout: float = 10.0
) -> AsyncIterator[Launcher]:
    """Open a launcher of child processes; leaving the block ends them all, and removes their directory.

    Args:
        zygote: a zygote to use, which stays open; several launchers may share it. None: start one for this
            launcher alone. That does not wait for its preload: the first child does.
        preload: modules to import in the launcher's own zygote (see `Zygote`).
        close_timeout: seconds that closing may take before force is used.

    Raises:
        LaunchFailed: the given zygote is not open any more.
        ValueError: both `zygote` and `preload` are given.
    """
    if zygote is not None and preload:
        raise ValueError("preload is for a zygote of the launcher's own; the given zygote has a preload already")
    own: Zygote | None = None
    if zygote is None:
        zygote = own = Zygote(preload)
        await trio.to_thread.run_sync(own.__enter__)
    deadline = math.inf
    try:
        directory = await trio.to_thread.run_sync(_make_directory)
        try:
            with zygote.open_session(str(directory)) as sock:
                async with open_service_nursery() as services:
                    launcher = Launcher(zygote, directory, sock, services)
                    services.start_soon(launcher.receive)
                    try:
                        yield launcher
                    finally:
                        deadline = trio.current_time() + close_timeout
                        await _end_session(launcher, deadline, zygote if own is None else None)
        finally:
            # The shield needs no deadline: removing a few files is bounded by itself.
            with trio.CancelScope(shield=True):
                await trio.to_thread.run_sync(_remove_directory, directory)
    finally:
        if own is not None:
            left = min(max(deadline - trio.current_time(), 0.5), close_timeout)
            with trio.CancelScope(shield=True):  # the call has a time-out of its own
                await trio.to_thread.run_sync(own.close, left)


async def _end_session(launcher: Launcher, deadline: float, zygote: Zygote | None) -> None:
    with trio.CancelScope(deadline=deadline, shield=True) as scope:
        await launcher.end_session()
    if scope.cancelled_caught and zygote is not None:
        raise LaunchFailed(
            f"{zygote!r} did not end the launcher's session in time; it looks stuck, so close it",
            log_tail=zygote.log_tail(),
        )
