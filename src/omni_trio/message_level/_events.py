"""What an orchestrator tells. Field names are those of vLLM-Omni's messages; what we add comes after them.

Every event has a literal `type`, by which `msgspec` also tells them apart in an encoded form.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Final, Literal, TypeAlias

import msgspec

from omni_trio.errors import RequestError
from omni_trio.messages import Output, StageMetrics

__all__ = [
    "STATUS_CODES",
    "AbortResult",
    "CollectiveRpcResult",
    "ErrorEvent",
    "Event",
    "OutputEvent",
    "StageMetricsEvent",
    "error_event",
]


class _Event(msgspec.Struct, frozen=True, kw_only=True, tag_field="type"):
    pass


class OutputEvent(_Event, frozen=True, kw_only=True, tag="output"):
    """What a stage has produced for a request since its previous output: a delta."""

    type: ClassVar[Literal["output"]] = "output"

    request_id: str
    stage_id: int
    engine_outputs: Output
    """What is new. Its own `Output.finished` tells that the stage has ended with the request."""
    metrics: StageMetrics | None = None
    """What the stage's work has cost; set where the stage has ended with the request."""
    finished: bool = False
    """Whether the request is over; nothing of it follows."""
    replica_id: int | None = None
    """None where no replica of the stage has said anything: the end of a request that was aborted before."""


class StageMetricsEvent(_Event, frozen=True, kw_only=True, tag="stage_metrics"):
    """A stage whose outputs are not wanted has ended with a request."""

    type: ClassVar[Literal["stage_metrics"]] = "stage_metrics"

    request_id: str
    stage_id: int
    metrics: StageMetrics
    replica_id: int


class ErrorEvent(_Event, frozen=True, kw_only=True, tag="error"):
    """Something went wrong: a request has failed, a command is refused, or everything ends."""

    type: ClassVar[Literal["error"]] = "error"

    error: str
    fatal: bool = False
    """Whether the orchestrator ends. There is one such event per request, and a last one without a `request_id`."""
    request_id: str | None = None
    """The request that has ended with this; nothing of it follows. None: no request ends here."""
    stage_id: int | None = None
    status_code: int = 500
    """What HTTP would say."""
    error_type: str = "OmniTrioError"
    """Name of the class of `omni_trio.errors` (or ``NotSupported``)."""
    replica_id: int | None = None
    refused: str | None = None
    """The `type` of the command that is refused by this; it has changed nothing."""
    refused_id: str | None = None
    """What the refused command was about: the id of a request, companion or call."""


class AbortResult(_Event, frozen=True, kw_only=True, tag="abort_result"):
    """The answer to an `Abort` that has an `rpc_id`: no stage holds any of the requests.

    It comes after the last events of the requests.
    """

    type: ClassVar[Literal["abort_result"]] = "abort_result"

    rpc_id: str
    success: bool
    """False where a stage did not acknowledge."""
    error: str | None = None
    abort_outputs: Sequence[OutputEvent] = ()
    """The last events of the requests that ended by this."""


class CollectiveRpcResult(_Event, frozen=True, kw_only=True, tag="collective_rpc_result"):
    """The answer to a `CollectiveRpc`.

    The three lists run in parallel: one entry per replica, in the order of the stages asked.
    """

    type: ClassVar[Literal["collective_rpc_result"]] = "collective_rpc_result"

    rpc_id: str
    method: str
    stage_ids: Sequence[int] = ()
    results: Sequence[Any] = ()
    """What the replica returned; or, where it failed, a mapping: ``supported`` (False), ``error``, ``error_type``."""
    replica_ids: Sequence[int] = ()
    error: str | None = None
    """Why nobody was asked, or not all have been heard; the lists are empty then."""
    error_type: str | None = None


Event: TypeAlias = OutputEvent | StageMetricsEvent | ErrorEvent | AbortResult | CollectiveRpcResult

STATUS_CODES: Final = {
    "InvalidRequest": 400,
    "SessionClosed": 409,
    "Overloaded": 429,
    "RequestAborted": 499,
    "StageFailed": 500,
    "BridgeFailed": 500,
    "EngineDied": 500,
    "NotSupported": 501,
    "NoReplicaAvailable": 503,
    "ReplicaLost": 503,
    "ShutDown": 503,
    "Paused": 503,
    "DeadlineExceeded": 504,
}
"""By `ErrorEvent.error_type`; 500 for all else."""


def error_event(
    error: BaseException,
    *,
    request_id: str | None = None,
    fatal: bool = False,
    refused: str | None = None,
    refused_id: str | None = None,
) -> ErrorEvent:
    """Say an error in a message."""
    kind = type(error).__name__
    about = error if isinstance(error, RequestError) else None
    return ErrorEvent(
        error=str(error) or kind,
        fatal=fatal,
        request_id=request_id,
        stage_id=None if about is None else about.stage_id,
        replica_id=None if about is None else about.replica_id,
        status_code=STATUS_CODES.get(kind, 500),
        error_type=kind,
        refused=refused,
        refused_id=refused_id,
    )
