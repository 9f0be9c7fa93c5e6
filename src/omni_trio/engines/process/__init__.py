"""Child processes under trio: forked by a preloaded zygote in milliseconds, and gone for certain afterwards."""

from __future__ import annotations

from ._child import ChildProcess
from ._errors import UNKNOWN_RETURNCODE, LaunchFailed, describe_exit, signal_name
from ._launcher import Launcher, open_launcher
from ._nursery import ServiceNursery, open_service_nursery
from ._zygote import Zygote

__all__ = [
    "UNKNOWN_RETURNCODE",
    "ChildProcess",
    "LaunchFailed",
    "Launcher",
    "ServiceNursery",
    "Zygote",
    "describe_exit",
    "open_launcher",
    "open_service_nursery",
    "signal_name",
]
