"""Stdin, stdout and stderr, whatever the shell has made of them."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["CanNotWriteError", "say", "set_up", "writing"]


class CanNotWriteError(Exception):
    """What was made can not be written; the text says where, and why."""


def set_up() -> None:
    """Make the standard streams safe to use."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            # The shell has closed it. The next file or socket would get its number, and what is written to stderr.
            os.open(os.devnull, os.O_RDWR)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # What an encoding does not have, or a lone surrogate in a model's text, is shown by its number.
            stream.reconfigure(errors="backslashreplace")


@contextmanager
def writing() -> Iterator[None]:
    """Write to stdout in this block, and flush it.

    Raises:
        BrokenPipeError: whoever read it has left. From here on stdout leads nowhere.
        CanNotWriteError: it is closed or full. From here on it leads nowhere.
    """
    if sys.stdout is None:
        raise CanNotWriteError("can not write to stdout: it is closed")
    try:
        yield
        sys.stdout.flush()
    except OSError as error:
        # Python would complain of what is left in it when it flushes at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if isinstance(error, BrokenPipeError):
            raise
        raise CanNotWriteError(f"can not write to stdout: {error.strerror}") from error


def say(text: str) -> None:
    """Write to stdout, and let it be seen at once; raises as `writing` does."""
    with writing():
        sys.stdout.write(text)
