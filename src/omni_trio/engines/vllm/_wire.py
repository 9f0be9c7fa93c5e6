"""The zmq side of one engine: three sockets, bound in a private directory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final, Self

import msgspec
import trio
import zmq

from omni_trio.engines.zmq_trio import ZmqFrames, ZmqSocket

__all__ = ["ABORT", "ADD", "DEAD", "UTILITY", "Wire"]

# Kinds of messages to an engine core.
ADD: Final = b"\x00"
ABORT: Final = b"\x01"
UTILITY: Final = b"\x03"

DEAD: Final = b"ENGINE_CORE_DEAD"
"""What an engine core sends, alone, when it dies of an exception."""

_BATCH: Final = 2
"""Messages that are taken before other tasks get their turn: one can be a millisecond's work."""


class Wire:
    """The sockets of one engine; a synchronous context manager that closes them.

    Args:
        context: one for all engines: its input and output threads are the only ones.
        directory: where the sockets' files go; its owner removes it.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], directory: Path) -> None:
        self._identity = b""
        input_, output, hello = (f"ipc://{directory / name}" for name in ("in", "out", "hello"))
        with ExitStack() as stack:
            self._input = stack.enter_context(ZmqSocket(context, zmq.ROUTER, bind=input_))
            self._output = stack.enter_context(ZmqSocket(context, zmq.PULL, bind=output))
            self._hello = stack.enter_context(ZmqSocket(context, zmq.ROUTER, bind=hello))
            self._close = stack.pop_all()
        self.handshake_address = hello
        """Where the engine says hello."""
        self._addresses = {"inputs": [input_], "outputs": [output]}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._close.close()

    async def hello(self) -> dict[str, Any]:
        """Wait for the next message of the handshake; answer the first one."""
        identity, payload = await self._hello.receive()
        message: dict[str, Any] = msgspec.msgpack.decode(payload.buffer)
        if message.get("status") == "HELLO":
            answer = {"addresses": self._addresses, "parallel_config": {}}
            self._hello.send([identity, msgspec.msgpack.encode(answer)])
        return message

    async def ready(self) -> dict[str, Any]:
        """Wait until the engine takes requests; return what it says of itself. Ends the handshake."""
        identity, payload = await self._input.receive()
        self._identity = identity.bytes
        self._hello.close()
        message: dict[str, Any] = msgspec.msgpack.decode(payload.buffer)
        return message

    def send(self, kind: bytes, frames: Sequence[Any]) -> None:
        """Send to the engine. Never blocks; to a dead engine it is lost."""
        self._input.send([self._identity, kind, *frames])

    async def receive(self, take: Callable[[ZmqFrames], bool]) -> None:
        """Hand every message of the engine to `take`, until that returns False."""
        while True:
            for frames in await self._output.receive_batch(_BATCH):
                if not take(frames):
                    return

    def drain(self, take: Callable[[ZmqFrames], bool]) -> None:
        """Hand over what has arrived by now, without waiting."""
        try:
            while take(self._output.receive_nowait()):
                pass
        except trio.WouldBlock:
            return
