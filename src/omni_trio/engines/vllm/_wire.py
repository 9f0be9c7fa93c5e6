"""The zmq side of one engine: three sockets, bound in a private directory, driven from trio."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import trio
import zmq

__all__ = ["ABORT", "ADD", "DEAD", "UTILITY", "Wire"]

ADD = b"\x00"
ABORT = b"\x01"
UTILITY = b"\x03"
DEAD = b"ENGINE_CORE_DEAD"
"""What an engine core sends, alone, when it dies of an exception."""


async def _receive(socket: zmq.Socket[bytes]) -> list[bytes]:
    # The descriptor tells of changes, not of messages: so ask for one first, and wait only where there is none.
    while True:
        try:
            return socket.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            await trio.lowlevel.wait_readable(socket.FD)


class Wire:
    """The sockets of one engine. Everything is sent and received from the trio thread.

    Args:
        context: shared by all engines: its input and output threads are the only ones there are.
        directory: where the sockets' files go.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], directory: Path) -> None:
        self._identity = b""
        self._paths = [directory / name for name in ("in", "out", "hello")]
        self._addresses = [f"ipc://{path}" for path in self._paths]
        self._sockets: list[zmq.Socket[bytes]] = []
        try:
            for address, kind in zip(self._addresses, (zmq.ROUTER, zmq.PULL, zmq.ROUTER), strict=True):
                socket = context.socket(kind)
                self._sockets.append(socket)
                socket.linger = 0
                # Unbounded, so that a send never blocks and an engine never waits for us.
                socket.sndhwm = socket.rcvhwm = 0
                socket.bind(address)
        except BaseException:
            self.close()
            raise
        self._input, self._output, self._hello = self._sockets

    @property
    def handshake_address(self) -> str:
        """Where the engine says hello."""
        return self._addresses[2]

    async def hello(self) -> dict[str, Any]:
        """Wait for the next message of the handshake, and answer the first one."""
        identity, payload = await _receive(self._hello)
        message: dict[str, Any] = msgspec.msgpack.decode(payload)
        if message.get("status") == "HELLO":
            answer = {
                "addresses": {"inputs": [self._addresses[0]], "outputs": [self._addresses[1]]},
                "parallel_config": {},
            }
            self._hello.send_multipart([identity, msgspec.msgpack.encode(answer)], zmq.NOBLOCK)
        return message

    async def ready(self) -> dict[str, Any]:
        """Wait until the engine takes requests; return what it says of itself. Ends the handshake."""
        self._identity, payload = await _receive(self._input)
        self._hello.close()
        self._paths[2].unlink(missing_ok=True)
        message: dict[str, Any] = msgspec.msgpack.decode(payload)
        return message

    def send(self, kind: bytes, frames: Sequence[Any]) -> None:
        """Send to the engine. Never blocks; to a dead engine it is lost."""
        self._input.send_multipart([self._identity, kind, *frames], zmq.NOBLOCK)

    async def receive(self, take: Callable[[Sequence[zmq.Frame]], bool]) -> None:
        """Hand every message of the engine to `take`, until that returns False.

        Others get their turn after every second message: one may take a millisecond to work on.
        """
        fd: int = self._output.FD
        receive = self._output.recv_multipart
        taken = 0
        while True:
            try:
                frames = receive(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                taken = 0
                await trio.lowlevel.wait_readable(fd)
                continue
            if not take(frames):
                return
            taken += 1
            if taken == 2:
                taken = 0
                await trio.lowlevel.checkpoint()

    def drain(self, take: Callable[[Sequence[zmq.Frame]], bool]) -> None:
        """Hand over what has arrived by now, without waiting."""
        with contextlib.suppress(zmq.Again):
            while take(self._output.recv_multipart(zmq.NOBLOCK, copy=False)):
                pass

    def close(self) -> None:
        """Close the sockets and remove their files. May be called twice."""
        for socket in self._sockets:
            socket.close()
        for path in self._paths:
            path.unlink(missing_ok=True)
