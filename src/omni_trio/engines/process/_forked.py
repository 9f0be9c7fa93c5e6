"""What runs in a child from the fork on."""

from __future__ import annotations

import importlib
import os
import signal
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NoReturn

import msgspec

from ._protocol import Payload

__all__ = ["run_child"]


def run_child(payload_fd: int, log_fd: int, death_fd: int, strangers: Iterable[int]) -> NoReturn:
    """Become the child: never returns to the zygote's code, whatever happens.

    Args:
        payload_fd: a memory file with the `Payload`.
        log_fd: the write end of the pipe that takes what the child writes to stdout and stderr.
        death_fd: the read end of a pipe whose write end the head process holds, and nobody else.
        strangers: descriptors of the zygote's that the child must not hold.
    """
    code = 1
    try:
        os.setpgid(0, 0)
        _reset_signals()
        os.dup2(log_fd, 1)
        os.dup2(log_fd, 2)
        for fd in (log_fd, *strangers):
            os.close(fd)
        threading.Thread(target=_die_with_head, args=(death_fd,), name="head-watch", daemon=True).start()
        payload = _read_payload(payload_fd)
        _settle_in(payload)
        code = _call(payload)
    except BaseException:
        traceback.print_exc()
    finally:
        # No interpreter teardown: for a process with torch in it that takes seconds, and frees only what the
        # kernel frees anyway.
        for stream in (sys.stdout, sys.stderr):
            _flush(stream)
        os._exit(code)


def _reset_signals() -> None:
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals():
        if signal.getsignal(number) not in (signal.SIG_DFL, None):
            signal.signal(number, signal.SIG_DFL)
    # As the interpreter itself sets them up.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def _die_with_head(death_fd: int) -> None:
    # The group is ours by setpgid, so this also reaches what the child has forked since.
    os.read(death_fd, 1)
    os.killpg(os.getpid(), signal.SIGKILL)


def _read_payload(fd: int) -> Payload:
    # With its own offset: the head wrote through the same open file, whose offset is at the end.
    with os.fdopen(fd, "rb") as file:
        file.seek(0)
        return msgspec.msgpack.decode(file.read(), type=Payload)


def _settle_in(payload: Payload) -> None:
    Path("/proc/self/comm").write_text(payload.name[:15], encoding="utf-8")
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr] # it is the interpreter's own stream
    sys.path[:] = payload.path
    os.environ.update(payload.env)
    os.environ["TMPDIR"] = payload.directory
    tempfile.tempdir = None
    if (numpy_random := sys.modules.get("numpy.random")) is not None:
        # Forked siblings would all draw the same numbers; the random module reseeds itself.
        numpy_random.seed()


def _call(payload: Payload) -> int:
    module_name, _, path = payload.entry.partition(":")
    function: Callable[..., Any] = importlib.import_module(module_name)  # type: ignore[assignment] # until the loop
    for attribute in path.split("."):
        function = getattr(function, attribute)
    try:
        function(**payload.kwargs)
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return end.code or 0
        print(end.code, file=sys.stderr)
        return 1
    return 0


def _flush(stream: Any) -> None:
    try:
        stream.flush()
    except (OSError, ValueError):
        # The reader is gone, or the entry closed the stream: nobody is left to be told.
        return
