"""What the tests of the launcher run in child processes."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from multiprocessing import shared_memory
from pathlib import Path
from typing import Any

import msgspec


def report(path: str, value: Any) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.sendto(msgspec.msgpack.encode(value), path)


def return_normally() -> None:
    return


def exit_with(code: object) -> None:
    sys.exit(code)  # type: ignore[arg-type]


def fail(message: str) -> None:
    raise RuntimeError(message)


def kill_self(number: int) -> None:
    os.kill(os.getpid(), number)


def write(out: str, err: str) -> None:
    print(out)
    print(err, file=sys.stderr)


def write_much(lines: int) -> None:
    for number in range(lines):
        print(f"line {number} " + "x" * 100)


def leave_thread_and_exit_handler() -> None:
    import atexit

    atexit.register(print, "an exit handler ran")
    threading.Thread(target=threading.Event().wait).start()


def describe(path: str, keys: list[str], echo: Any) -> None:
    fds = {}
    for entry in Path("/proc/self/fd").iterdir():
        try:
            fds[entry.name] = str(entry.readlink())
        except FileNotFoundError:
            continue
    report(
        path,
        {
            "pid": os.getpid(),
            "pgid": os.getpgid(0),
            "env": {key: os.environ.get(key) for key in keys},
            "tempdir": tempfile.gettempdir(),
            "fds": fds,
            "sigint_default": signal.getsignal(signal.SIGINT) is signal.default_int_handler,
            "sigchld_default": signal.getsignal(signal.SIGCHLD) is signal.SIG_DFL,
            "wakeup_fd": signal.set_wakeup_fd(-1),
            "stdin": sys.stdin.read(),
            "comm": Path("/proc/self/comm").read_text().strip(),
            "echo": echo,
        },
    )


def run_for_ever(path: str, grandchildren: int = 0, ignore_sigterm: bool = False) -> None:
    if ignore_sigterm:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    started = [subprocess.Popen(["sleep", "1000"]).pid for _ in range(grandchildren)]
    report(path, {"pid": os.getpid(), "grandchildren": started})
    while True:
        signal.pause()


def leave_grandchild(path: str, go: str) -> None:
    """Start a process that outlives us in our group, and end when told."""
    pid = subprocess.Popen(["sleep", "1000"]).pid
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.bind(go)
        report(path, {"grandchildren": [pid]})
        sock.recv(1)


def leak_shared_memory(path: str) -> None:
    memory = shared_memory.SharedMemory(create=True, size=4096)
    report(path, {"pid": os.getpid(), "grandchildren": [], "shm": memory.name})
    while True:
        signal.pause()
