"""The zygote process: preloads modules once, then forks children in milliseconds.

One thread serves at a time. While the main thread imports the preload, a helper runs the same loop, so that
sessions come and go and the head's death is noticed meanwhile; it has ended before the first fork.

Rules that keep every end clean:

* A child leads a process group of its own. The group is killed while its leader is still a zombie, so its
  number can not belong to anybody else yet.
* The zygote is the subreaper of all that children start: it reaps what they leave behind, and therefore knows
  when a group is empty.
* The end of the control socket is the head's end, in whichever way it came: everything goes then.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import os
import select
import selectors
import shutil
import signal
import socket
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Final

import msgspec

from ._forked import run_child
from ._protocol import Event, Exited, Gone, OpenSession, Spawn, Spawned, SpawnRefused, receive_packet

__all__ = ["LOG_LIMIT", "main"]

LOG_LIMIT: Final = 256 * 1024
"""Bytes of the zygote's own log that are kept."""

_FAREWELL: Final = 3.0
"""Seconds that the last processes get to disappear after SIGKILL."""

_PR_SET_CHILD_SUBREAPER: Final = 36


class _Child:
    """One forked child, until its group is empty."""

    def __init__(self, session: _Session, child_id: int) -> None:
        self.session = session
        self.child_id = child_id


class _Session:
    """One launcher."""

    def __init__(self, sock: socket.socket, directory: str) -> None:
        self.sock = sock
        self.directory = directory
        self.ending = False
        self.outgoing: deque[tuple[bytes, list[int]]] = deque()


class _Order:
    """A spawn that waits for the preload."""

    def __init__(self, session: _Session, child_id: int, fds: list[int]) -> None:
        self.session = session
        self.child_id = child_id
        self.fds = fds

    def close(self) -> None:
        for fd in self.fds:
            os.close(fd)


class Server:
    """The loop and its tables. Never used by two threads at once."""

    def __init__(self, control: socket.socket, tracker_pid: int) -> None:
        self._control = control
        self._tracker_pid = tracker_pid
        self._selector = selectors.EpollSelector()
        self._sessions: set[_Session] = set()
        self._orders: deque[_Order] = deque()
        self._leaders: dict[int, _Child] = {}
        """By pid: children that run."""
        self._lingering: dict[int, _Child] = {}
        """By group: dead children whose group has been killed and may not be empty yet."""
        self._preloaded = False
        self._preload_error: str | None = None
        self._returned = False
        self._wake_r, self._wake_w = os.pipe()
        for fd in (self._wake_r, self._wake_w):
            os.set_blocking(fd, False)
        self._stop_r, self._stop_w = os.pipe()
        self._selector.register(control, selectors.EVENT_READ, self._on_control)
        self._selector.register(self._wake_r, selectors.EVENT_READ, self._on_wake)
        self._selector.register(self._stop_r, selectors.EVENT_READ, self._on_stop)

    # -- the loop

    def serve(self) -> None:
        """Serve until the head is gone (ends the process) or `stop` is called (returns)."""
        self._returned = False
        while not self._returned:
            for key, mask in self._selector.select():
                # One callback may have ended what a later one is about.
                if self._selector.get_map().get(key.fd) is key:
                    key.data(mask)

    def stop(self) -> None:
        """Make `serve`, in another thread, return."""
        os.write(self._stop_w, b"s")

    def preloaded(self, error: str | None) -> None:
        """Serve spawns from now on; with an error, refuse them."""
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._wake_w, warn_on_full_buffer=False)
        self._preloaded = True
        self._preload_error = error
        while self._orders:
            self._spawn(self._orders.popleft())

    def _on_stop(self, _mask: int) -> None:
        os.read(self._stop_r, 1)
        self._returned = True

    def _on_wake(self, _mask: int) -> None:
        with contextlib.suppress(BlockingIOError):
            while os.read(self._wake_r, 4096):
                pass
        self._reap()

    def _on_control(self, _mask: int) -> None:
        data, fds = receive_packet(self._control)
        if not data:
            self._farewell()
        order = msgspec.msgpack.decode(data, type=OpenSession)
        (fd,) = fds
        session = _Session(socket.socket(fileno=fd), order.directory)
        session.sock.setblocking(False)
        self._sessions.add(session)
        self._selector.register(session.sock, selectors.EVENT_READ, lambda mask: self._on_session(session, mask))

    def _on_session(self, session: _Session, mask: int) -> None:
        if mask & selectors.EVENT_WRITE:
            self._flush(session)
        if not mask & selectors.EVENT_READ or session.ending:
            return
        try:
            data, fds = receive_packet(session.sock)
        except BlockingIOError:
            return
        if not data:
            self._end_session(session)
            return
        order = _Order(session, msgspec.msgpack.decode(data, type=Spawn).child_id, fds)
        if self._preloaded:
            self._spawn(order)
        else:
            self._orders.append(order)

    # -- children

    def _spawn(self, order: _Order) -> None:
        payload_fd, log_fd, death_fd = order.fds
        try:
            if _hung_up(death_fd):
                return
            if self._preload_error is not None:
                self._tell(order.session, SpawnRefused(child_id=order.child_id, message=self._preload_error))
                return
            _bound_log()
            for stream in (sys.stdout, sys.stderr):
                stream.flush()
            strangers = [fd for fd in self._own_fds() if fd not in order.fds]
            try:
                pid = os.fork()
            except OSError as error:
                self._tell(order.session, SpawnRefused(child_id=order.child_id, message=f"fork failed: {error}"))
                return
            if pid == 0:
                run_child(payload_fd, log_fd, death_fd, strangers)
            # Here as well as in the child: whoever comes first, the group exists when the head hears of it.
            with contextlib.suppress(PermissionError, ProcessLookupError):
                os.setpgid(pid, pid)
            self._leaders[pid] = _Child(order.session, order.child_id)
            self._tell(order.session, Spawned(child_id=order.child_id, pid=pid), [os.pidfd_open(pid)])
        finally:
            order.close()

    def _own_fds(self) -> Iterator[int]:
        yield self._control.fileno()
        yield self._selector.fileno()
        yield from (self._wake_r, self._wake_w, self._stop_r, self._stop_w)
        for session in self._sessions:
            yield session.sock.fileno()
            for _, fds in session.outgoing:
                yield from fds
        for order in self._orders:
            yield from order.fds

    def _reap(self) -> None:
        if not self._preloaded:
            # Whatever has ended belongs to an import, which wants to collect it itself.
            return
        while (info := _next_zombie()) is not None:
            pid = info.si_pid
            child = self._leaders.pop(pid, None)
            if child is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            if child is not None:
                returncode = info.si_status if info.si_code == os.CLD_EXITED else -info.si_status
                self._lingering[pid] = child
                self._tell(child.session, Exited(child_id=child.child_id, returncode=returncode))
        for group, child in list(self._lingering.items()):
            if _is_empty(group):
                del self._lingering[group]
                self._tell(child.session, Gone(child_id=child.child_id))
                self._finish_session(child.session)

    # -- sessions

    def _tell(self, session: _Session, event: Event, fds: Sequence[int] = ()) -> None:
        session.outgoing.append((msgspec.msgpack.encode(event), list(fds)))
        self._flush(session)

    def _flush(self, session: _Session) -> None:
        while session.outgoing:
            data, fds = session.outgoing[0]
            try:
                socket.send_fds(session.sock, [data], fds)
            except BlockingIOError:
                break
            except OSError:
                # The head no longer listens; that its end of the socket is closed is handled where it is read.
                pass
            for fd in fds:
                os.close(fd)
            session.outgoing.popleft()
        if session in self._sessions:
            # After its end was read, a session's socket is always readable: wait for nothing but room then.
            wanted = 0 if session.ending else selectors.EVENT_READ
            if session.outgoing:
                wanted |= selectors.EVENT_WRITE
            self._watch(session, wanted)

    def _watch(self, session: _Session, wanted: int) -> None:
        key = self._selector.get_map().get(session.sock)
        callback: Callable[[int], None] = lambda mask: self._on_session(session, mask)  # noqa: E731 - bound to session
        if key is None:
            if wanted:
                self._selector.register(session.sock, wanted, callback)
        elif not wanted:
            self._selector.unregister(session.sock)
        elif key.events != wanted:
            self._selector.modify(session.sock, wanted, callback)

    def _end_session(self, session: _Session) -> None:
        session.ending = True
        for order in [order for order in self._orders if order.session is session]:
            self._orders.remove(order)
            order.close()
        for pid, child in self._leaders.items():
            if child.session is session:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(pid, signal.SIGKILL)
        self._flush(session)
        self._finish_session(session)

    def _finish_session(self, session: _Session) -> None:
        if not session.ending or session not in self._sessions:
            return
        if any(child.session is session for table in (self._leaders, self._lingering) for child in table.values()):
            return
        _remove(session.directory)
        self._sessions.discard(session)
        self._watch(session, 0)
        for _, fds in session.outgoing:
            for fd in fds:
                os.close(fd)
        session.sock.close()

    def _farewell(self) -> None:
        """End everything, and this process."""
        try:
            for session in list(self._sessions):
                self._end_session(session)
            self._kill_all()
            for session in self._sessions:
                _remove(session.directory)
            self._end_tracker()
        except BaseException:
            traceback.print_exc()
        finally:
            for stream in (sys.stdout, sys.stderr):
                stream.flush()
            os._exit(0)

    def _kill_all(self) -> None:
        # Also what left its group, or was started by an import: nobody would ever end it.
        deadline = time.monotonic() + _FAREWELL
        while time.monotonic() < deadline:
            children = [pid for pid in _children() if pid != self._tracker_pid]
            if not children:
                break
            for pid in children:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            for pid in children:
                _wait_for(pid, deadline)
            # Orphans of the dead have become ours meanwhile: look again.

    def _end_tracker(self) -> None:
        # It unlinks what the dead have left in /dev/shm once nobody holds its pipe any more.
        if (fd := resource_tracker.getfd()) is not None:
            os.close(fd)
        _wait_for(self._tracker_pid, time.monotonic() + _FAREWELL)


def _next_zombie() -> os.waitid_result | None:
    try:
        return os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return None


def _wait_for(pid: int, deadline: float) -> None:
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        poll = select.poll()
        poll.register(pidfd, select.POLLIN)
        if poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)
    finally:
        os.close(pidfd)


def _is_empty(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        # A member that has changed its user: it is there.
        return False
    return False


def _children() -> list[int]:
    pids: list[int] = []
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(FileNotFoundError):
            pids += map(int, (task / "children").read_text(encoding="ascii").split())
    return pids


def _hung_up(fd: int) -> bool:
    poll = select.poll()
    poll.register(fd, 0)
    return bool(poll.poll(0))


def _remove(directory: str) -> None:
    try:
        shutil.rmtree(directory)
    except FileNotFoundError:
        pass
    except OSError:
        traceback.print_exc()


def _bound_log() -> None:
    """Cut our own log, a memory file of which the head reads the tail."""
    if os.fstat(2).st_size > LOG_LIMIT:
        os.ftruncate(2, 0)


def _become_subreaper() -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def _preload(names: Sequence[str]) -> str | None:
    for name in names:
        try:
            importlib.import_module(name)
        except BaseException as error:
            traceback.print_exc()
            return f"preloading {name!r} failed: {type(error).__name__}: {error}"
    return None


def main() -> None:
    """Run the zygote: ``argv`` has the control socket's descriptor, how many modules to preload, and their names.

    The names are followed by the head's ``sys.path``, which the command line has put in place already.
    """
    control = socket.socket(fileno=int(sys.argv[1]))
    names = sys.argv[3 : 3 + int(sys.argv[2])]
    sys.argv[1:] = []
    os.set_inheritable(control.fileno(), False)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _become_subreaper()
    resource_tracker.ensure_running()
    (tracker_pid,) = _children()
    server = Server(control, tracker_pid)
    helper = threading.Thread(target=server.serve, name="zygote-preload")
    helper.start()
    error = _preload(names)
    gc.collect()
    gc.freeze()
    server.stop()
    helper.join()
    server.preloaded(error)
    server.serve()
