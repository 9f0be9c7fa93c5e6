"""What a worker's client and its process say to each other.

One message is an envelope, msgpack in the first frame, and for those that say so a value after it, as the
codec makes it. They are apart so that a value that can not be decoded still has a request to fail.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from omni_trio.messages import StageInput

__all__ = [
    "Abort",
    "Add",
    "AddValue",
    "Answer",
    "Call",
    "CallValue",
    "FromWorker",
    "Out",
    "Ping",
    "Ready",
    "Shutdown",
    "StartFailed",
    "Started",
    "ToWorker",
    "envelope",
]


class Add(msgspec.Struct, frozen=True, kw_only=True, tag="add"):
    """Input for a request, a new one unless it is known. Followed by an `AddValue`."""

    request_id: str
    first: bool
    last: bool
    segment_end: bool
    priority: int


class AddValue(msgspec.Struct, frozen=True, kw_only=True):
    """The value after an `Add`."""

    input: StageInput
    params: Mapping[str, Any]
    kv_senders: Mapping[str, Mapping[str, Any]]


class Abort(msgspec.Struct, frozen=True, kw_only=True, tag="abort"):
    """Let go of requests; answered."""

    call_id: int
    request_ids: list[str]


class Call(msgspec.Struct, frozen=True, kw_only=True, tag="call"):
    """Call a method between two batches; answered with its result. Followed by a `CallValue`."""

    call_id: int
    method: str


class CallValue(msgspec.Struct, frozen=True, kw_only=True):
    """The value after a `Call`."""

    args: list[Any]
    kwargs: dict[str, Any]


class Ping(msgspec.Struct, frozen=True, kw_only=True, tag="ping"):
    """Show a sign of life; answered."""

    call_id: int


class Shutdown(msgspec.Struct, frozen=True, kw_only=True, tag="shutdown"):
    """Close, and exit."""


class Started(msgspec.Struct, frozen=True, kw_only=True, tag="started"):
    """The process runs and can be spoken to; it begins to load."""


class StartFailed(msgspec.Struct, frozen=True, kw_only=True, tag="start_failed"):
    """The target could not be imported or made. The process waits to be killed."""

    message: str


class Ready(msgspec.Struct, frozen=True, kw_only=True, tag="ready"):
    """The worker takes requests."""


class Out(msgspec.Struct, frozen=True, kw_only=True, tag="out"):
    """Something of a request. Followed by a `StageOutput`."""

    request_id: str
    running: int
    waiting: int


class Answer(msgspec.Struct, frozen=True, kw_only=True, tag="answer"):
    """Followed by the result, unless there is an error."""

    call_id: int
    running: int
    waiting: int
    error: str | None = None


ToWorker = Add | Abort | Call | Ping | Shutdown
FromWorker = Started | StartFailed | Ready | Out | Answer


def envelope(message: ToWorker | FromWorker) -> bytes:
    """Encode an envelope."""
    return msgspec.msgpack.encode(message)
