"""How the commands end."""

from __future__ import annotations

import sys
from typing import NoReturn

import click

from omni_trio.config import load_pipeline
from omni_trio.errors import ConfigError
from omni_trio.pipeline import Pipeline

__all__ = ["ENGINE", "INTERRUPTED", "OK", "REQUEST_FAILED", "USAGE", "fail", "load"]

OK = 0
REQUEST_FAILED = 1
USAGE = 2
ENGINE = 3
INTERRUPTED = 130


def fail(message: str, status: int) -> NoReturn:
    """Say what went wrong on stderr and end the program."""
    click.echo(message, err=True)
    sys.exit(status)


def load(path: str) -> Pipeline:
    """Load a pipeline, or end the program with the reason."""
    try:
        return load_pipeline(path)
    except ConfigError as error:
        fail(str(error), USAGE)
