"""What tests of worker and diffusion stages share: one client of one real process, without a runtime."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import trio

from omni_trio.engines._open import open_clients
from omni_trio.messages import StageInput, StageOutput, StageRequest
from omni_trio.pipeline import Pipeline, StageSpec
from omni_trio.stages import ReplicaContext

HERE = str(Path(__file__).parent)
ENDLESS = {"num_inference_steps": 1_000_000_000}
"""Parameters of a denoising that only an abort ends."""


class Stage:
    """A client, and what it has put out."""

    def __init__(self, client: Any) -> None:
        self.client = client
        self.outputs: list[StageOutput] = []

    async def submit(self, request_id: str, given: StageInput | str, params: Any = None, **more: Any) -> None:
        await self._send(self.client.submit, request_id, given, params=self.client.resolve_params(params), **more)

    async def update(self, request_id: str, given: StageInput | str, **more: Any) -> None:
        await self._send(self.client.update, request_id, given, **more)

    async def _send(self, send: Any, request_id: str, given: StageInput | str, **more: Any) -> None:
        words = StageInput(text=given) if isinstance(given, str) else given
        await send(StageRequest(request_id=request_id, input=words, **more))

    def of(self, request_id: str) -> list[StageOutput]:
        return [output for output in self.outputs if output.request_id == request_id]

    def steps(self, request_id: str) -> int:
        """How far the request has come, as far as has been heard."""
        return max((output.progress[0] for output in self.of(request_id) if output.progress), default=0)

    async def until(self, happened: Callable[[], bool]) -> None:
        while not happened():
            self.outputs += await self.client.receive()

    async def until_finished(self, *request_ids: str) -> None:
        await self.until(lambda: all(any(output.finished for output in self.of(one)) for one in request_ids))

    async def result(self, request_id: str, given: StageInput | str, params: Any = None, **more: Any) -> StageOutput:
        await self.submit(request_id, given, params, **more)
        await self.until_finished(request_id)
        return self.of(request_id)[-1]

    async def runs(self) -> list[tuple[set[str], int]]:
        """Which requests' samples each step was done for, and how often in a row."""
        return [(set(together), times) for together, times in await self.client.call("runs")]


def spec(target: str, *, kind: str = "diffusion", path: str = HERE, **fields: Any) -> StageSpec:
    fields.setdefault("start_timeout", 30.0)
    target = target if ":" in target else f"worker_targets:{target}"
    return StageSpec(name="denoiser", kind=kind, target=target, path=(path,), **fields)


@asynccontextmanager
async def opened(zygote: Any, target: str = "Denoiser", **fields: Any):
    stage = spec(target, **fields)
    context = ReplicaContext(
        stage=stage, stage_id=0, replica_id=0, want_text=True, report=lambda _: None, close_timeout=5.0
    )
    async with (
        open_clients(Pipeline([stage]), given={}, zygote=zygote) as factories,
        factories[stage.name](context) as client,
    ):
        yield Stage(client)


def run(main, seconds: float = 60):
    async def bounded():
        with trio.fail_after(seconds):
            return await main()

    return trio.run(bounded)
