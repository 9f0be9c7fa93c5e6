"""What tests of the runtime share: a virtual clock with an outer bound, and pipelines of simulated stages."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import trio
import trio.testing

from omni_trio.pipeline import Pipeline, StageSpec
from omni_trio.runtime import open_runtime
from omni_trio.testing import SimStage

T = TypeVar("T")

ONE_DAY = 86_400.0


def run(function: Callable[[], Awaitable[T]], *, instruments: Any = ()) -> T:
    """Run on a virtual clock that jumps over waits; what hangs for a virtual day fails at once."""

    async def bounded() -> T:
        with trio.fail_after(ONE_DAY):
            return await function()

    clock = trio.testing.MockClock(autojump_threshold=0)
    return trio.run(bounded, clock=clock, instruments=instruments)


def stage(name: str, **fields: Any) -> StageSpec:
    return StageSpec(name=name, kind="simulated", **fields)


P1 = Pipeline([stage("only")])
P3 = Pipeline([stage("thinker", final_output=True), stage("talker"), stage("vocoder")])


@asynccontextmanager
async def simulated(pipeline: Pipeline, *stages: SimStage, **options: Any):
    """Open a runtime with one `SimStage` per stage; those not given are plain."""
    given = [*stages, *(SimStage() for _ in pipeline.stages[len(stages) :])]
    clients = {spec.name: sim for spec, sim in zip(pipeline.stages, given, strict=True)}
    async with open_runtime(pipeline, clients=clients, **options) as runtime:
        yield runtime


def assert_empty(runtime: Any) -> None:
    """Nothing of any request is left anywhere (I5)."""
    orchestrator = runtime._orchestrator
    assert not orchestrator.tasks
    for replica in orchestrator.replicas():
        assert not replica.legs
        assert replica.load == 0
        work = getattr(replica.client, "_work", {})
        assert not work, f"{replica.spec.name} still works on {sorted(work)}"
