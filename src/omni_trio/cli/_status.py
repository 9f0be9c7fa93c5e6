"""How the commands end."""

from __future__ import annotations

import sys
from typing import NoReturn

import click

from omni_trio.config import load_pipeline
from omni_trio.errors import ConfigError
from omni_trio.pipeline import Pipeline
from omni_trio.testing.simulated import SimStage

__all__ = ["BROKEN_PIPE", "ENGINE", "INTERRUPTED", "OK", "REQUEST_FAILED", "USAGE", "fail", "load"]

OK = 0
REQUEST_FAILED = 1
USAGE = 2
ENGINE = 3
INTERRUPTED = 130
BROKEN_PIPE = 141


def fail(message: str, status: int) -> NoReturn:
    """Say what went wrong on stderr and end the program."""
    click.echo(message, err=True)
    sys.exit(status)


def load(path: str) -> Pipeline:
    """Load a pipeline, or end the program with the reason."""
    try:
        pipeline = load_pipeline(path)
    except ConfigError as error:
        fail(str(error), USAGE)
    try:
        for stage in pipeline.stages:
            if stage.kind == "simulated":
                SimStage.from_options(stage.options, stage=stage.name)
    except ConfigError as error:
        fail(f"{path}: {error}", USAGE)
    return pipeline
