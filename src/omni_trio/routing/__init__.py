"""DECIDE: what each fact about a request means for it. Plain synchronous Python; does no I/O, owns no clock."""

from __future__ import annotations

from .flow import Decision, Fail, Finish, Forward, ProtocolError, RequestFlow, Submit, Update
from .plan import RoutePlan
from .states import LEG_TRANSITIONS, Fact, LegState

__all__ = [
    "LEG_TRANSITIONS",
    "Decision",
    "Fact",
    "Fail",
    "Finish",
    "Forward",
    "LegState",
    "ProtocolError",
    "RequestFlow",
    "RoutePlan",
    "Submit",
    "Update",
]
