"""Stages that cost next to nothing, so that what is measured is the runtime alone."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from contextlib import asynccontextmanager
from typing import Any

import trio

from omni_trio.bridges import BridgeContext, bridge
from omni_trio.messages import StageInput, StageOutput, StageRequest
from omni_trio.pipeline import Pipeline, StageSpec
from omni_trio.runtime import open_runtime
from omni_trio.stages import ClientStatistics

PROMPT = (1, 2, 3, 4, 5, 6, 7, 8)
BATCH = 64


@bridge(reads=())
def eight_tokens(context: BridgeContext) -> StageInput:
    """Hand on eight tokens, whatever came."""
    return StageInput(token_ids=PROMPT)


class FakeClient:
    """One replica.

    `instant`: a submission puts its outputs out at once, each as a batch of its own. `step`: while requests run,
    every `receive` makes one step: an output for each of the next `BATCH` requests in turn, after one checkpoint.
    """

    def __init__(self, mode: str, outputs: int) -> None:
        self.mode = mode
        self.outputs = outputs
        """Per request; 0: no end."""
        self.held = False
        """Whether requests are admitted and kept silent."""
        self.aborted_at: list[float] = []
        self._ready: deque[list[StageOutput]] = deque()
        self._running: deque[list[Any]] = deque()
        self._gone: set[str] = set()
        self._news = trio.Event()

    def release(self) -> None:
        """Let those that were held go on."""
        self.held = False
        self._news.set()

    def resolve_params(self, params: Any) -> Any:
        return params

    async def submit(self, request: StageRequest) -> None:
        request_id, count = request.request_id, self.outputs
        if self.mode == "instant" and not self.held:
            for index in range(count):
                self._ready.append([_output(request_id, index, last=index == count - 1)])
        else:
            self._running.append([request_id, 0])
        if not self.held:
            self._news.set()

    async def update(self, request: StageRequest) -> None:
        raise AssertionError("nothing streams here")

    async def abort(self, request_ids: Sequence[str]) -> None:
        self.aborted_at.append(time.perf_counter())
        self._gone.update(request_ids)
        await trio.lowlevel.checkpoint()

    async def receive(self) -> Sequence[StageOutput]:
        while True:
            if self._ready:
                return self._ready.popleft()
            if self._running and not self.held:
                await trio.lowlevel.checkpoint()
                if step := self._step():
                    return step
                continue
            self._news = trio.Event()
            await self._news.wait()

    async def call(self, method: str, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        return None

    def statistics(self) -> ClientStatistics:
        return ClientStatistics()

    def _step(self) -> list[StageOutput]:
        running, outputs = self._running, []
        for _ in range(min(BATCH, len(running))):
            entry = running.popleft()
            request_id, index = entry
            if request_id in self._gone:
                self._gone.discard(request_id)
                continue
            last = index + 1 == self.outputs
            outputs.append(_output(request_id, index, last=last))
            if not last:
                entry[1] = index + 1
                running.append(entry)
        return outputs


def _output(request_id: str, index: int, *, last: bool) -> StageOutput:
    return StageOutput(request_id=request_id, token_ids=(index,), text="x", finish_reason="length" if last else None)


@asynccontextmanager
async def fake_runtime(stages: int, *, mode: str = "instant", outputs: Sequence[int] | None = None, replicas: int = 1):
    """Open a runtime over a chain of fake stages; gives it and, per stage, its clients."""
    clients: list[list[FakeClient]] = [[] for _ in range(stages)]

    def factory(index: int):
        @asynccontextmanager
        async def open_client(context):
            client = FakeClient(mode, 1 if outputs is None else outputs[index])
            clients[index].append(client)
            yield client

        return open_client

    pipeline = Pipeline(
        [
            StageSpec(
                name=f"stage{index}",
                kind="simulated",
                final_output=True,
                bridge=eight_tokens if index else None,
                replicas=replicas,
            )
            for index in range(stages)
        ]
    )
    factories = {f"stage{index}": factory(index) for index in range(stages)}
    async with open_runtime(pipeline, clients=factories, max_in_flight=1_000_000) as runtime:
        yield runtime, clients
