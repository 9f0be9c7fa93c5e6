"""What a simulated stage does with a request, as data: frozen, and printed as the call that makes it again."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, TypeAlias

import attrs

__all__ = [
    "Chunk",
    "Die",
    "Error",
    "Finish",
    "FinishSilently",
    "KvReady",
    "LateChunk",
    "Reject",
    "Script",
    "Stall",
    "Step",
    "Verb",
    "Wait",
    "tokens",
]


def _ids(token_ids: Iterable[int]) -> tuple[int, ...]:
    return tuple(token_ids)


@attrs.frozen
class Wait:
    """Let virtual time pass."""

    seconds: float


@attrs.frozen
class Chunk:
    """Give an output that is not the last one."""

    token_ids: tuple[int, ...] = attrs.field(default=(), converter=_ids)
    text: str | None = None
    """None: one word per token."""
    data: Mapping[str, Any] | None = None


@attrs.frozen
class Finish:
    """Give the last output, with whatever `token_ids` are left to give.

    In a session it ends the segment; the last segment's ends the request.
    """

    reason: str = "stop"
    token_ids: tuple[int, ...] = attrs.field(default=(), converter=_ids)
    kv: Mapping[str, Any] | None = None
    """``kv_transfer_params`` for the stage that takes over."""


@attrs.frozen
class KvReady:
    """Tell that the request's KV cache can be had, and go on."""


@attrs.frozen
class Step:
    """Tell how far the work has come, in steps."""

    step: int
    total: int


@attrs.frozen
class FinishSilently:
    """End the request with an output that carries nothing but its reason."""

    reason: str = "stop"


@attrs.frozen
class Error:
    """Fail this request and no other."""

    message: str = "simulated error"


@attrs.frozen
class Reject:
    """Refuse the request at `submit`. Only meaningful as the first verb."""

    message: str = "simulated refusal"


@attrs.frozen
class Stall:
    """Never answer again, until aborted."""


@attrs.frozen
class Die:
    """The whole replica dies here."""

    message: str = "simulated death"
    exit_code: int = -9


@attrs.frozen
class LateChunk:
    """From here on, an abort is answered with one more output: the step that was in flight."""

    token_ids: tuple[int, ...] = attrs.field(default=(-1,), converter=_ids)


Verb: TypeAlias = Wait | Chunk | KvReady | Step | Finish | FinishSilently | Error | Reject | Stall | Die | LateChunk
Script: TypeAlias = tuple[Verb, ...]
"""What happens to one request, in order. A script that does not end it ends with `Stall`."""


def tokens(count: int, *, first: int = 0, each: float = 0.0, prefill: float = 0.0, reason: str = "length") -> Script:
    """The usual script: `count` tokens one by one.

    Args:
        count: how many tokens.
        first: the first token's id; the others count up from it.
        each: seconds per token.
        prefill: seconds before the first token, on top.
        reason: the finish reason, which comes with the last token.
    """
    verbs: list[Verb] = [Wait(prefill)] if prefill else []
    for index in range(count):
        if each:
            verbs.append(Wait(each))
        token = (first + index,)
        verbs.append(Chunk(token) if index + 1 < count else Finish(reason, token))
    return tuple(verbs) if count else (Finish(reason),)
