"""What routing says in words becomes the error that a user meets."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from omni_trio.errors import BridgeFailed, DeadlineExceeded, RequestError, StageFailed
from omni_trio.routing import Fail

__all__ = ["failure", "locate"]


def failure(decision: Fail, place: Mapping[str, Any]) -> RequestError:
    """Make the error for a `Fail`, which concerns the request and the stage of `place`."""
    if decision.kind == "bundle":
        return DeadlineExceeded(f"{decision.reason}; if it needs more, raise the pipeline's bundle_timeout", **place)
    if decision.kind == "handoff":
        return StageFailed(decision.reason, **place)
    return BridgeFailed(decision.reason, **place)


def locate(error: RequestError, place: Mapping[str, Any]) -> None:
    """Say where an error happened, as far as it does not say so itself."""
    for field, value in place.items():
        if getattr(error, field) is None:
            setattr(error, field, value)
