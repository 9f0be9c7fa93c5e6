"""What can go wrong between us and a child process, and how its end reads in words."""

from __future__ import annotations

import signal
from typing import Final, final

from omni_trio.errors import OmniTrioError

__all__ = ["UNKNOWN_RETURNCODE", "LaunchFailed", "describe_exit", "signal_name"]

UNKNOWN_RETURNCODE: Final = -255
"""Stands for a return code that nobody could collect, because the zygote was gone. No signal has this number."""


@final
class LaunchFailed(OmniTrioError):
    """A child process could not be started, or could not be got rid of.

    Engine clients turn it into `omni_trio.errors.StartupFailed` with the stage that it is about.

    Attributes:
        log_tail: the last lines that the zygote wrote, where that helps.
    """

    def __init__(self, message: str, *, log_tail: str = "") -> None:
        self.log_tail = log_tail
        super().__init__(message)


def signal_name(number: int) -> str:
    """Return ``SIGTERM`` for 15, ``signal 70`` for one without a name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def describe_exit(returncode: int | None) -> str:
    """Say in words how a process ended, to follow the process's name in a sentence.

    Args:
        returncode: as `subprocess.Popen.returncode`, `UNKNOWN_RETURNCODE`, or None while it runs.
    """
    if returncode is None:
        return "still runs"
    if returncode == UNKNOWN_RETURNCODE:
        return "ended (its exit code is not known: the zygote that would tell it is gone)"
    if returncode == -signal.SIGKILL:
        return "was killed by SIGKILL (the out-of-memory killer does that)"
    if returncode < 0:
        return f"was killed by {signal_name(-returncode)}"
    return f"exited with code {returncode}"
