"""What no runtime can beat: the same work in bare trio, and as bare function calls."""

from __future__ import annotations

from collections.abc import Callable

import trio

from omni_trio.messages import StageOutput


class Channels:
    """A chain of stages as one task each, between memory channels. No ids, no routing, no ends, no errors."""

    def __init__(self, stages: int) -> None:
        pairs = [trio.open_memory_channel[StageOutput](1_000_000) for _ in range(stages + 1)]
        self._senders = [sender for sender, _ in pairs]
        self._receivers = [receiver for _, receiver in pairs]

    async def run(self, nursery: trio.Nursery) -> None:
        for index in range(len(self._senders) - 1):
            nursery.start_soon(self._stage, self._receivers[index], self._senders[index + 1])
        await trio.lowlevel.checkpoint()

    async def _stage(self, receiver, sender) -> None:
        async for item in receiver:
            sender.send_nowait(
                StageOutput(request_id=item.request_id, token_ids=(0,), text="x", finish_reason="length")
            )

    async def request(self, request_id: str) -> None:
        self._senders[0].send_nowait(StageOutput(request_id=request_id))
        await self._receivers[-1].receive()


def calls(stages: int) -> Callable[[str], None]:
    """A chain of stages as function calls: one output and one look-up per stage."""
    table: dict[str, int] = {}

    def request(request_id: str) -> None:
        table[request_id] = 0
        for _ in range(stages):
            output = StageOutput(request_id=request_id, token_ids=(0,), text="x", finish_reason="length")
            table[output.request_id] += 1
        del table[request_id]

    return request
