"""Conformance kits: whether a client, a bridge, a pipeline or a balancer keeps its contract.

Each is a function that takes what it checks, or a factory of it, runs many checks and raises `ConformanceError` for the
first rule that is broken. None needs pytest, and each can be used in any test.
"""

from __future__ import annotations

from ._balancer import check_balancer
from ._bridge import SlowBridgeWarning, bridge_context, check_bridge, check_expand
from ._client import check_stage_client, run_client_program
from ._pipeline import Fault, Visit, check_pipeline, run_pipeline_round
from ._rules import BALANCER_RULES, BRIDGE_RULES, CLIENT_RULES, PIPELINE_RULES
from ._violation import Conformance, ConformanceError, Rule
from .operations import (
    Abort,
    CancelReceive,
    CancelSubmit,
    Close,
    Drain,
    More,
    Open,
    Pause,
    Receive,
    Refused,
    Submit,
    Together,
)

__all__ = [
    "BALANCER_RULES",
    "BRIDGE_RULES",
    "CLIENT_RULES",
    "PIPELINE_RULES",
    "Abort",
    "CancelReceive",
    "CancelSubmit",
    "Close",
    "Conformance",
    "ConformanceError",
    "Drain",
    "Fault",
    "More",
    "Open",
    "Pause",
    "Receive",
    "Refused",
    "Rule",
    "SlowBridgeWarning",
    "Submit",
    "Together",
    "Visit",
    "bridge_context",
    "check_balancer",
    "check_bridge",
    "check_expand",
    "check_pipeline",
    "check_stage_client",
    "run_client_program",
    "run_pipeline_round",
]
