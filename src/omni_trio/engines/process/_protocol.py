"""What the head process and the zygote say to each other, and what a forked child is told.

Every message is one packet of a ``SOCK_SEQPACKET`` socket, msgpack inside, with file descriptors alongside
where its docstring says so. Head to zygote, on the control socket: `OpenSession`; the end of that socket is
the head's end. Head to zygote, on a session's socket: `Spawn`; shutting it down ends the session. Zygote to
head, on a session's socket: the others; it closes the socket when the session's last process is gone.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

__all__ = [
    "MAX_FDS",
    "MAX_PACKET",
    "Event",
    "Exited",
    "Gone",
    "OpenSession",
    "Payload",
    "Spawn",
    "SpawnRefused",
    "Spawned",
    "check_entry",
    "plain",
    "receive_packet",
]

MAX_PACKET: Final = 65536
MAX_FDS: Final = 3

_ENTRY = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*(\.[^\W\d]\w*)*")


class OpenSession(msgspec.Struct, frozen=True, kw_only=True):
    """Serve one launcher. Alongside: the zygote's end of the session's socket."""

    directory: str
    """The session's private directory: removed when the session is over."""


class Spawn(msgspec.Struct, frozen=True, kw_only=True):
    """Fork a child. Alongside: its `Payload` in a memory file, its log (write end), its death pipe (read end).

    A death pipe whose other end is closed by now says that the head no longer wants the child.
    """

    child_id: int


class Spawned(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The child runs. Alongside: a pidfd of it."""

    child_id: int
    pid: int


class SpawnRefused(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The child could not be forked."""

    child_id: int
    message: str


class Exited(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The child is dead and reaped; what was left of its process group has been sent SIGKILL."""

    child_id: int
    returncode: int


class Gone(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The last process of the child's group is gone too."""

    child_id: int


Event = Spawned | SpawnRefused | Exited | Gone


class Payload(msgspec.Struct, frozen=True, kw_only=True):
    """What a child is told. The zygote passes it on unread."""

    name: str
    entry: str
    kwargs: dict[str, Any]
    env: dict[str, str]
    directory: str
    path: list[str]
    """The head's ``sys.path`` of now: the zygote may be older than some of it."""


def receive_packet(sock: socket.socket, *, flags: int = 0) -> tuple[bytes, list[int]]:
    """Receive one packet with its descriptors, which are not passed on to executed programs; empty at the end."""
    try:
        data, fds, _, _ = socket.recv_fds(sock, MAX_PACKET, MAX_FDS, flags | socket.MSG_CMSG_CLOEXEC)
    except ConnectionResetError:
        # The other side died with packets of ours unread: an end like any other.
        return b"", []
    return data, fds


def check_entry(entry: str) -> None:
    """Raise `ValueError` unless `entry` has the form ``package.module:function``."""
    if not _ENTRY.fullmatch(entry):
        raise ValueError(f"an entry has the form 'package.module:function', not {entry!r}")


def plain(value: Any, where: str) -> Any:
    """Copy `value` into None, booleans, numbers, strings, bytes, lists and dicts with string keys.

    Args:
        value: what shall travel to a child.
        where: what the value is called in an error, such as ``kwargs['model']``.

    Raises:
        TypeError: something in it is of another type; says what and where.
    """
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int):
        if not -(1 << 63) <= value < 1 << 64:
            raise TypeError(f"{where} is an integer of more than 64 bits, which msgpack can not carry")
        return int(value)
    if isinstance(value, float):
        return float(value)
    if isinstance(value, str):
        return str(value)
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value)
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise TypeError(f"{where} has the key {key!r}; keys must be strings")
        return {str(key): plain(item, f"{where}[{key!r}]") for key, item in value.items()}
    if isinstance(value, Sequence):
        return [plain(item, f"{where}[{index}]") for index, item in enumerate(value)]
    raise TypeError(
        f"{where} is of type {type(value).__module__}.{type(value).__qualname__}; only plain data can travel to a "
        "child process: None, booleans, numbers, strings, bytes, lists and dicts of these"
    )
