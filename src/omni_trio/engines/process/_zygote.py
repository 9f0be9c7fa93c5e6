"""The zygote as its owner sees it: started, asked for sessions, closed. No trio in here."""

from __future__ import annotations

import fcntl
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from types import TracebackType
from typing import Final, final

import msgspec

from ._errors import LaunchFailed, describe_exit
from ._protocol import OpenSession

__all__ = ["Zygote"]

_BOOT: Final = (
    "import sys; sys.path[:] = sys.argv[3 + int(sys.argv[2]):]; "
    "from omni_trio.engines.process._zygote_main import main; main()"
)
"""Takes over our ``sys.path`` before anything is imported. A ``-m`` would leave a main module behind that
multiprocessing, in a child that spawns, would import again."""

_LOG_TAIL: Final = 64 * 1024


@final
class Zygote:
    """Owns one zygote process, which has modules loaded and forks child processes in milliseconds.

    A synchronous context manager; entering takes some milliseconds and does not wait for the preload. Keep one
    around several runtimes, or several runs of trio, to pay for the preload once::

        with Zygote(preload=["torch"]) as zygote:
            trio.run(main, zygote)

    It may be used from any thread. It ends itself, and everything that it has forked, when this process dies.

    The environment of the children is this process's at the time of entering, plus what each spawn sets. A
    library that reads its environment when it is imported (``OMP_NUM_THREADS``, for one) has read it by then
    if it is preloaded.

    Args:
        preload: names of modules to import before forking. They must start no threads. One that does not
            import makes every spawn fail with its error.
    """

    def __init__(self, preload: Sequence[str] = ()) -> None:
        if isinstance(preload, str):
            raise TypeError(f"preload is a sequence of module names, not the string {preload!r}")
        self._preload = tuple(preload)
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._log_fd = -1

    def __repr__(self) -> str:
        state = "closed" if self._process is None else f"pid {self._process.pid}"
        return f"<Zygote {state}, preload={self._preload!r}>"

    def __enter__(self) -> Zygote:
        if self._process is not None:
            raise RuntimeError("this zygote is open already")
        control, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        log_fd = os.memfd_create("omni-trio-zygote-log")
        try:
            with far:
                # Both streams share the file, and the zygote cuts it now and then.
                fcntl.fcntl(log_fd, fcntl.F_SETFL, os.O_APPEND)
                self._process = subprocess.Popen(  # noqa: S603 - our own interpreter with our own code
                    [
                        sys.executable,
                        "-c",
                        _BOOT,
                        str(far.fileno()),
                        str(len(self._preload)),
                        *self._preload,
                        *sys.path,
                    ],
                    stdin=subprocess.DEVNULL,
                    stdout=log_fd,
                    stderr=log_fd,
                    pass_fds=[far.fileno()],
                    # Away from the terminal: Ctrl-C is for the head, which then ends its children in order.
                    start_new_session=True,
                )
        except BaseException:
            control.close()
            os.close(log_fd)
            raise
        control.setblocking(False)
        self._control, self._log_fd = control, log_fd
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self, timeout: float = 10.0) -> None:
        """End the zygote and everything that it has forked. Blocks until then; a second time does nothing.

        Args:
            timeout: seconds after which the zygote is killed, should it not have ended by itself.
        """
        process, control = self._process, self._control
        if process is None or control is None:
            return
        self._process = self._control = None
        control.close()
        try:
            process.wait(timeout)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        finally:
            os.close(self._log_fd)
            self._log_fd = -1

    @property
    def pid(self) -> int | None:
        """The zygote's process id, which is also the session id of its children; None while it is not open."""
        return None if self._process is None else self._process.pid

    def log_tail(self, lines: int = 20) -> str:
        """Return the last lines that the zygote itself, imports included, has written."""
        if self._log_fd < 0:
            return ""
        size = os.fstat(self._log_fd).st_size
        data = os.pread(self._log_fd, _LOG_TAIL, max(0, size - _LOG_TAIL))
        return "\n".join(data.decode(errors="replace").splitlines()[-lines:])

    def describe(self, timeout: float = 0.0) -> str:
        """Say in words how the zygote is doing, for errors; wait `timeout` seconds for an end that is under way."""
        if self._process is None:
            return "is closed"
        try:
            return describe_exit(self._process.wait(timeout))
        except subprocess.TimeoutExpired:
            return describe_exit(None)

    def open_session(self, directory: str) -> socket.socket:
        """Open a session and return the head's end of its socket, for a launcher. Never blocks.

        Args:
            directory: the session's private directory; the zygote removes it when the session is over.

        Raises:
            LaunchFailed: the zygote is not there.
        """
        if self._control is None:
            raise LaunchFailed("the zygote is not open; use it inside its 'with' block")
        ours, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            with far:
                packet = msgspec.msgpack.encode(OpenSession(directory=directory))
                socket.send_fds(self._control, [packet], [far.fileno()])
        except OSError as error:
            ours.close()
            raise LaunchFailed(
                f"the zygote process {self.describe()} and takes no sessions: {error}", log_tail=self.log_tail()
            ) from error
        ours.setblocking(False)
        return ours
