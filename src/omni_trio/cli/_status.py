"""How the commands end."""

from __future__ import annotations

import sys
from typing import NoReturn

import click

__all__ = ["BROKEN_PIPE", "ENGINE", "FAILED", "INTERRUPTED", "OK", "USAGE", "fail"]

OK = 0
FAILED = 1
"""A request failed, or what came of it can not be written."""
USAGE = 2
ENGINE = 3
INTERRUPTED = 130
BROKEN_PIPE = 141


def fail(message: str, status: int) -> NoReturn:
    """Say what went wrong on stderr and end the program."""
    click.echo(message, err=True)
    sys.exit(status)
