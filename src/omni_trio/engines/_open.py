"""Which stage kind means which engine, and what those engines share."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Final

from omni_trio.pipeline import Pipeline
from omni_trio.stages import ClientFactory
from omni_trio.testing.simulated import SimStage

if TYPE_CHECKING:
    from .process import Launcher, Zygote

__all__ = ["open_clients"]

_ENGINES: Final = {"llm": "vllm", "pooling": "vllm", "worker": "worker", "diffusion": "worker"}
"""What runs the kinds of stages that need processes."""


@asynccontextmanager
async def open_clients(
    pipeline: Pipeline,
    *,
    given: Mapping[str, ClientFactory],
    zygote: Zygote | None = None,
    close_timeout: float = 10.0,
) -> AsyncIterator[dict[str, ClientFactory]]:
    """Give every stage of a pipeline what opens its replicas, and own what they share.

    Args:
        pipeline: the stages.
        given: by stage name, factories that go before what the stage's kind says.
        zygote: a warm one to fork engine processes from. Without it one is started if a stage needs processes,
            and ended with the block.
        close_timeout: seconds that ending the shared parts may take.
    """
    own = dict(_without_process(pipeline, given))
    rest = [stage for stage in pipeline.stages if stage.name not in own]
    if not rest:
        yield own
        return
    from .process import open_launcher  # noqa: PLC0415 - a pipeline without processes needs none of it
    from .vllm import PRELOAD  # noqa: PLC0415 - see above

    needs_vllm = zygote is None and any(_ENGINES[stage.kind] == "vllm" for stage in rest)
    preload = PRELOAD if needs_vllm else ()
    async with open_launcher(zygote=zygote, preload=preload, close_timeout=close_timeout) as launcher:
        # One factory per engine, since its replicas share what it holds, across stages too.
        factories = {engine: _with_process(engine, launcher) for engine in {_ENGINES[stage.kind] for stage in rest}}
        yield own | {stage.name: factories[_ENGINES[stage.kind]] for stage in rest}


def _without_process(pipeline: Pipeline, given: Mapping[str, ClientFactory]) -> Iterator[tuple[str, ClientFactory]]:
    for stage in pipeline.stages:
        if stage.name in given:
            yield stage.name, given[stage.name]
        elif stage.kind == "simulated":
            yield stage.name, SimStage.from_options(stage.options, stage=stage.name)


def _with_process(engine: str, launcher: Launcher) -> ClientFactory:
    if engine == "worker":
        from .worker import worker_client_factory  # noqa: PLC0415 - see above

        return worker_client_factory(launcher)
    from .vllm import vllm_client_factory  # noqa: PLC0415 - see above

    return vllm_client_factory(launcher)
