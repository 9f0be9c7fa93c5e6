"""The ZeroMQ helper: nothing lost, nothing stuck, in both directions at once."""

from __future__ import annotations

import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing
import zmq

from omni_trio.engines.zmq_trio import ZmqSocket, open_zmq_context


def run(function: Callable[..., Awaitable[Any]], *args: Any) -> None:
    async def guarded() -> None:
        with trio.fail_after(30):
            await function(*args)

    trio.run(guarded)


async def wait_for_connection(near: ZmqSocket, far: ZmqSocket) -> None:
    """`far` has connected to `near`, which can send only once that is done."""
    far.send([b"hello"])
    assert [frame.bytes for frame in await near.receive()] == [b"hello"]


def test_both_directions_at_once_lose_no_wake_up(tmp_path: Path) -> None:
    # A send takes back the descriptor's word that a message is there: without a second look this hangs.
    async def send(sock: ZmqSocket, count: int, every: int) -> None:
        for number in range(count):
            sock.send([b"%d" % number, b"x" * (number % 50)])
            if number % every == 0:
                await trio.lowlevel.checkpoint()

    async def receive(sock: ZmqSocket, count: int) -> None:
        for number in range(count):
            first, second = await sock.receive()
            assert first.bytes == b"%d" % number
            assert len(second) == number % 50

    async def main() -> None:
        address = f"ipc://{tmp_path}/s"
        async with open_zmq_context() as context:
            with (
                ZmqSocket(context, zmq.DEALER, bind=address) as near,
                ZmqSocket(context, zmq.DEALER, connect=address) as far,
            ):
                await wait_for_connection(near, far)
                async with trio.open_nursery() as nursery:
                    for sock, every in ((near, 1), (far, 3)):
                        nursery.start_soon(send, sock, 5000, every)
                        nursery.start_soon(receive, sock, 5000)

    run(main)


def test_a_send_that_finds_a_message_wakes_the_receiver(tmp_path: Path) -> None:
    # The same, made to happen: the peer's messages arrive while the receiver can not run, between its parking
    # and our send.
    async def main() -> None:
        address = f"ipc://{tmp_path}/s"
        async with open_zmq_context() as context:
            with (
                ZmqSocket(context, zmq.DEALER, bind=address) as near,
                ZmqSocket(context, zmq.DEALER, connect=address) as far,
            ):
                await wait_for_connection(near, far)
                for number in range(200):
                    async with trio.open_nursery() as nursery:
                        got: list[bytes] = []

                        async def receive(got: list[bytes] = got) -> None:
                            got.extend(frame.bytes for frame in await near.receive())

                        nursery.start_soon(receive)
                        await trio.testing.wait_all_tasks_blocked()
                        far.send([b"%d" % number])
                        while not near._readable():
                            pass  # reading the events takes back the word, as a send may
                        near.send([b"away"])
                    assert got == [b"%d" % number]

    run(main)


def test_batches_are_bounded_and_in_order(tmp_path: Path) -> None:
    async def main() -> None:
        address = f"ipc://{tmp_path}/s"
        async with open_zmq_context() as context:
            with (
                ZmqSocket(context, zmq.PULL, bind=address) as near,
                ZmqSocket(context, zmq.PUSH, connect=address) as far,
            ):
                for number in range(100):
                    far.send([b"%d" % number])
                got: list[int] = []
                while len(got) < 100:
                    batch = await near.receive_batch(7)
                    assert 1 <= len(batch) <= 7
                    got += [int(frames[0].bytes) for frames in batch]
                assert got == list(range(100))

    run(main)


def test_cancelled_receives_lose_nothing(tmp_path: Path) -> None:
    async def main() -> None:
        address = f"ipc://{tmp_path}/s"
        async with open_zmq_context() as context:
            with (
                ZmqSocket(context, zmq.DEALER, bind=address) as near,
                ZmqSocket(context, zmq.DEALER, connect=address) as far,
            ):
                await wait_for_connection(near, far)
                got: list[int] = []
                for number in range(500):
                    far.send([b"%d" % number])
                    with trio.move_on_after(0 if number % 3 else 0.0005):
                        got.append(int((await near.receive())[0].bytes))
                while len(got) < 500:
                    got.append(int((await near.receive())[0].bytes))
                assert got == list(range(500))

    run(main)


def test_receive_is_a_checkpoint_either_way(tmp_path: Path) -> None:
    async def main() -> None:
        address = f"ipc://{tmp_path}/s"
        async with open_zmq_context() as context:
            with (
                ZmqSocket(context, zmq.PULL, bind=address) as near,
                ZmqSocket(context, zmq.PUSH, connect=address) as far,
            ):
                far.send([b"1"])
                far.send([b"2"])
                await near.receive()
                while not near._readable():
                    await trio.lowlevel.checkpoint()
                with trio.testing.assert_checkpoints():
                    assert (await near.receive())[0].bytes == b"2"
                with trio.move_on_after(0) as scope:
                    await near.receive()
                assert scope.cancelled_caught

    run(main)


def test_closing_wakes_the_receiver_and_is_final(tmp_path: Path) -> None:
    async def main() -> None:
        async with open_zmq_context() as context:
            sock = ZmqSocket(context, zmq.PULL, bind=f"ipc://{tmp_path}/s")
            async with trio.open_nursery() as nursery:

                async def receive() -> None:
                    with pytest.raises(trio.ClosedResourceError):
                        await sock.receive()

                nursery.start_soon(receive)
                await trio.testing.wait_all_tasks_blocked()
                with pytest.raises(trio.BusyResourceError):
                    await sock.receive()
                sock.close()
            sock.close()
            with pytest.raises(trio.ClosedResourceError):
                sock.receive_nowait()
            with pytest.raises(trio.ClosedResourceError):
                sock.send([b"x"])

    run(main)


def test_sending_to_nobody(tmp_path: Path) -> None:
    async def main() -> None:
        async with open_zmq_context() as context:
            with ZmqSocket(context, zmq.DEALER, bind=f"ipc://{tmp_path}/s") as sock:
                with pytest.raises(trio.BrokenResourceError, match="nobody is connected"):
                    sock.send([b"x"])
                with pytest.raises(trio.WouldBlock):
                    sock.receive_nowait()

    run(main)


def test_an_address_is_needed_and_a_bad_one_leaves_no_socket(tmp_path: Path) -> None:
    async def main() -> None:
        async with open_zmq_context() as context:
            for addresses in ({}, {"bind": "inproc://a", "connect": "inproc://b"}):
                with pytest.raises(ValueError, match="exactly one"):
                    ZmqSocket(context, zmq.PULL, **addresses)
            with pytest.raises(zmq.ZMQError):
                ZmqSocket(context, zmq.PULL, bind=f"ipc://{tmp_path}/missing/s")

    run(main)


def test_large_messages_start_no_thread_and_an_open_socket_does_not_hold_up_the_context(tmp_path: Path) -> None:
    before = set(threading.enumerate())

    async def main() -> None:
        address = f"ipc://{tmp_path}/s"
        async with open_zmq_context() as context:
            near = ZmqSocket(context, zmq.PULL, bind=address)
            far = ZmqSocket(context, zmq.PUSH, connect=address)
            data = bytes(range(256)) * 4096
            far.send([data, memoryview(data)])
            frames = await near.receive()
            assert [bytes(frame.buffer) for frame in frames] == [data, data]
            assert not [t.name for t in set(threading.enumerate()) - before if "trio" not in t.name.lower()]
            far.send([data])

    run(main)
