"""A pipeline file as the commands read it."""

from __future__ import annotations

from omni_trio.config import load_pipeline
from omni_trio.errors import ConfigError
from omni_trio.pipeline import Pipeline
from omni_trio.testing.simulated import SimStage

from . import _status

__all__ = ["load"]


def load(path: str) -> Pipeline:
    """Load a pipeline, or end the program with the reason."""
    try:
        return load_pipeline(path, check=_check)
    except ConfigError as error:
        _status.fail(str(error), _status.USAGE)


def _check(pipeline: Pipeline) -> None:
    for stage in pipeline.stages:
        if stage.kind == "simulated":
            SimStage.from_options(stage.options, stage=stage.name)
