"""ZeroMQ sockets driven from trio: no asyncio, no Python threads, no lost wake-ups.

A ZeroMQ socket has a file descriptor that says "something happened", once, and whichever call on the socket
comes next takes that word back, a send included. Three rules follow, and `ZmqSocket` keeps them: always try to
receive first, and wait for the descriptor only after ``EAGAIN``; look again after each send while somebody
waits; and never leave a loop over waiting messages without a checkpoint.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Final, TypeAlias, final

import trio
import zmq

__all__ = ["SharedZmqContext", "ZmqFrames", "ZmqSocket", "open_zmq_context"]

ZmqFrames: TypeAlias = list[zmq.Frame]
"""One received message: `zmq.Frame.buffer` is a frame's content without a copy, `zmq.Frame.bytes` with one."""

_BATCH: Final = 8
"""Messages that are taken in one go. Larger ones delay the other tasks' turns."""


@asynccontextmanager
async def open_zmq_context() -> AsyncIterator[zmq.Context[zmq.Socket[bytes]]]:
    """Open a ZeroMQ context; leaving the block closes what sockets it still has, and drops what they hold."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=1)
    try:
        yield context
    finally:
        await _destroy(context)


@final
class SharedZmqContext:
    """One ZeroMQ context, with its one I/O thread, for as many users as there are; gone with the last of them."""

    def __init__(self) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._users = 0

    @asynccontextmanager
    async def open(self) -> AsyncIterator[zmq.Context[zmq.Socket[bytes]]]:
        """Use the context; close what sockets were made in it before leaving the block."""
        if self._context is None:
            self._context = zmq.Context(io_threads=1)
        context = self._context
        self._users += 1
        try:
            yield context
        finally:
            self._users -= 1
            if not self._users:
                self._context = None
                await _destroy(context)


async def _destroy(context: zmq.Context[zmq.Socket[bytes]]) -> None:
    # Bounded without a deadline: with linger=0 it waits for no peer. In a thread, since it does wait for
    # ZeroMQ's own, which may be in the middle of freeing a lot of memory.
    with trio.CancelScope(shield=True):
        await trio.to_thread.run_sync(context.destroy, 0)


@final
class ZmqSocket:
    """A ZeroMQ socket for trio. Close it before its context is.

    Queues are unlimited in both directions, so that sending never blocks: whoever sends bounds what is in
    flight. One task at a time may receive; any task may send.

    Args:
        context: from `open_zmq_context`.
        kind: such as `zmq.DEALER` or `zmq.PULL`.
        bind: the address to bind, such as ``ipc:///tmp/x``; or
        connect: the address to connect to.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        kind: int,
        *,
        bind: str | None = None,
        connect: str | None = None,
    ) -> None:
        if (bind is None) == (connect is None):
            raise ValueError("give exactly one of bind and connect")
        self._socket = context.socket(kind)
        try:
            self._socket.setsockopt(zmq.LINGER, 0)
            self._socket.setsockopt(zmq.SNDHWM, 0)
            self._socket.setsockopt(zmq.RCVHWM, 0)
            if bind is not None:
                self._socket.bind(bind)
            if connect is not None:
                self._socket.connect(connect)
            self._fd: int = self._socket.getsockopt(zmq.FD)  # type: ignore[assignment] # an int, for this option
        except BaseException:
            self._socket.close(0)
            raise
        self._waiting: trio.CancelScope | None = None

    def __enter__(self) -> ZmqSocket:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def raw(self) -> zmq.Socket[bytes]:
        """The pyzmq socket, for its options. Do not send or receive with it."""
        return self._socket

    def close(self) -> None:
        """Close it. A task that waits in it gets `trio.ClosedResourceError`. A second time does nothing."""
        if not self._socket.closed:
            trio.lowlevel.notify_closing(self._fd)
            self._socket.close(0)

    def send(self, frames: Sequence[bytes | memoryview | zmq.Frame]) -> None:
        """Send one message, at once; the frames are copied.

        Raises:
            trio.BrokenResourceError: nobody is connected to take it (kinds that do not drop it then).
            trio.ClosedResourceError: the socket is closed.
        """
        if self._socket.closed:
            raise trio.ClosedResourceError("this ZeroMQ socket is closed")
        try:
            # A copy is what keeps pyzmq from starting a thread that waits for large frames to be sent.
            self._socket.send_multipart(frames, zmq.NOBLOCK, copy=True)
        except zmq.Again as error:
            raise trio.BrokenResourceError("nobody is connected to this ZeroMQ socket") from error
        waiting = self._waiting
        if waiting is not None and self._readable():
            # This send has taken the word that a message is there, which the receiver waits for.
            waiting.cancel("a send found a message waiting")

    def receive_nowait(self) -> ZmqFrames:
        """Return a message that is there already.

        Raises:
            trio.WouldBlock: there is none.
            trio.ClosedResourceError: the socket is closed.
        """
        if self._socket.closed:
            raise trio.ClosedResourceError("this ZeroMQ socket is closed")
        try:
            return self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
        except zmq.Again:
            raise trio.WouldBlock from None

    async def receive(self) -> ZmqFrames:
        """Wait for a message and return it. Being cancelled loses none.

        Raises:
            trio.BusyResourceError: another task is waiting already.
            trio.ClosedResourceError: the socket is closed, or was while waiting.
        """
        await trio.lowlevel.checkpoint_if_cancelled()
        try:
            frames = self.receive_nowait()
        except trio.WouldBlock:
            return await self._wait()
        await trio.lowlevel.cancel_shielded_checkpoint()
        return frames

    async def receive_batch(self, limit: int = _BATCH) -> list[ZmqFrames]:
        """Wait for a message and return it with those that are there too, up to `limit`. As `receive` otherwise."""
        batch = [await self.receive()]
        while len(batch) < limit:
            try:
                batch.append(self.receive_nowait())
            except trio.WouldBlock:
                break
        return batch

    async def _wait(self) -> ZmqFrames:
        if self._waiting is not None:
            raise trio.BusyResourceError("another task is receiving from this ZeroMQ socket")
        while True:
            self._waiting = trio.CancelScope()
            try:
                with self._waiting:
                    await trio.lowlevel.wait_readable(self._fd)
            finally:
                self._waiting = None
            try:
                return self.receive_nowait()
            except trio.WouldBlock:
                # The descriptor spoke of something else: a connection, or room to send.
                continue

    def _readable(self) -> bool:
        events: int = self._socket.getsockopt(zmq.EVENTS)  # type: ignore[assignment] # an int, for this option
        return bool(events & zmq.POLLIN)
