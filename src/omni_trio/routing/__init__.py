"""DECIDE: what each fact about a request means for it. Plain synchronous Python; does no I/O, owns no clock."""

from __future__ import annotations

from .flow import (
    Decision,
    Defer,
    Fail,
    Finish,
    Forward,
    Handoff,
    ProtocolError,
    Release,
    RequestFlow,
    Submit,
    SubmitCompanion,
    Update,
)
from .plan import RoutePlan
from .states import TABLES, EdgeAction, EdgeFact, EdgeState, HoldFact, HoldState, LegFact, LegState, Tables

__all__ = [
    "TABLES",
    "Decision",
    "Defer",
    "EdgeAction",
    "EdgeFact",
    "EdgeState",
    "Fail",
    "Finish",
    "Forward",
    "Handoff",
    "HoldFact",
    "HoldState",
    "LegFact",
    "LegState",
    "ProtocolError",
    "Release",
    "RequestFlow",
    "RoutePlan",
    "Submit",
    "SubmitCompanion",
    "Tables",
    "Update",
]
