"""What a simulated stage does with a request, as data: frozen, and printed as the call that makes it again."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

import msgspec

__all__ = [
    "Chunk",
    "Die",
    "DieOnSubmit",
    "Duplicate",
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


class Wait(msgspec.Struct, frozen=True, tag=True):
    """Let virtual time pass."""

    seconds: float


class Chunk(msgspec.Struct, frozen=True, tag=True):
    """Give an output that is not the last one."""

    token_ids: tuple[int, ...] = ()
    text: str | None = None
    """None: one word per token."""
    data: Mapping[str, Any] | None = None


class Finish(msgspec.Struct, frozen=True, tag=True):
    """Give the last output, with whatever `token_ids` are left to give.

    In a session it ends the segment; the last segment's ends the request.
    """

    reason: str = "stop"
    token_ids: tuple[int, ...] = ()
    kv: Mapping[str, Any] | None = None
    """``kv_transfer_params`` for the stage that takes over."""


class KvReady(msgspec.Struct, frozen=True, tag=True):
    """Tell that the request's KV cache can be had, and go on."""


class Step(msgspec.Struct, frozen=True, tag=True):
    """Tell how far the work has come, in steps."""

    step: int
    total: int


class FinishSilently(msgspec.Struct, frozen=True, tag=True):
    """End the request with an output that carries nothing but its reason."""

    reason: str = "stop"


class Error(msgspec.Struct, frozen=True, tag=True):
    """Fail this request and no other."""

    message: str = "simulated error"


class Reject(msgspec.Struct, frozen=True, tag=True):
    """Refuse the request at `submit`. Only meaningful as the first verb."""

    message: str = "simulated refusal"


class Stall(msgspec.Struct, frozen=True, tag=True):
    """Never answer again, until aborted."""


class Die(msgspec.Struct, frozen=True, tag=True):
    """The whole replica dies here."""

    message: str = "simulated death"
    exit_code: int = -9


class DieOnSubmit(msgspec.Struct, frozen=True, tag=True):
    """The whole replica dies while the request is handed to it. Only meaningful as the first verb."""

    message: str = "simulated death at submission"
    exit_code: int = -9


class LateChunk(msgspec.Struct, frozen=True, tag=True):
    """From here on, an abort is answered with one more output: the step that was in flight."""

    token_ids: tuple[int, ...] = (-1,)


class Duplicate(msgspec.Struct, frozen=True, tag=True):
    """Breaks the contract: give the last output once more, after it has been given."""


Verb: TypeAlias = (
    Wait
    | Chunk
    | KvReady
    | Step
    | Finish
    | FinishSilently
    | Error
    | Reject
    | Stall
    | Die
    | DieOnSubmit
    | LateChunk
    | Duplicate
)
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
