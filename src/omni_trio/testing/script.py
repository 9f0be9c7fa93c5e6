"""What a simulated stage does with a request, as data: frozen, and printed as the call that makes it again."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

import msgspec

__all__ = [
    "ENDINGS",
    "FAULTS",
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
    "ends",
    "is_sound",
    "played",
    "says",
    "takes",
    "tokens",
]


class Wait(msgspec.Struct, frozen=True, tag=True, repr_omit_defaults=True):
    """Let virtual time pass."""

    seconds: float


class Chunk(msgspec.Struct, frozen=True, tag=True, repr_omit_defaults=True):
    """Give an output that is not the last one."""

    token_ids: tuple[int, ...] = ()
    text: str | None = None
    """None: one word per token."""
    data: Mapping[str, Any] | None = None


class Finish(msgspec.Struct, frozen=True, tag=True, repr_omit_defaults=True):
    """Give the last output, with whatever `token_ids` are left to give.

    In a session it ends the segment; the last segment's ends the request.
    """

    reason: str = "stop"
    token_ids: tuple[int, ...] = ()
    kv: Mapping[str, Any] | None = None
    """``kv_transfer_params`` for the stage that takes over."""


class KvReady(msgspec.Struct, frozen=True, tag=True, repr_omit_defaults=True):
    """Tell that the request's KV cache can be had, and go on."""


class Step(msgspec.Struct, frozen=True, tag=True, repr_omit_defaults=True):
    """Tell how far the work has come, in steps."""

    step: int
    total: int


class FinishSilently(msgspec.Struct, frozen=True, tag=True, repr_omit_defaults=True):
    """End the request with an output that carries nothing but its reason."""

    reason: str = "stop"


class Error(msgspec.Struct, frozen=True, tag=True, repr_omit_defaults=True):
    """Fail this request and no other."""

    message: str = "simulated error"


class Reject(msgspec.Struct, frozen=True, tag=True, repr_omit_defaults=True):
    """Refuse the request at `submit`. Only meaningful as the first verb."""

    message: str = "simulated refusal"


class Stall(msgspec.Struct, frozen=True, tag=True, repr_omit_defaults=True):
    """Never answer again, until aborted."""


class Die(msgspec.Struct, frozen=True, tag=True, repr_omit_defaults=True):
    """The whole replica dies here."""

    message: str = "simulated death"
    exit_code: int = -9


class DieOnSubmit(msgspec.Struct, frozen=True, tag=True, repr_omit_defaults=True):
    """The whole replica dies while the request is handed to it. Only meaningful as the first verb."""

    message: str = "simulated death at submission"
    exit_code: int = -9


class LateChunk(msgspec.Struct, frozen=True, tag=True, repr_omit_defaults=True):
    """From here on, an abort is answered with one more output: the step that was in flight."""

    token_ids: tuple[int, ...] = (-1,)


class Duplicate(msgspec.Struct, frozen=True, tag=True, repr_omit_defaults=True):
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


FAULTS = Error | Reject | Stall | Die | DieOnSubmit
"""The verbs that end a script badly."""

ENDINGS = Finish | FinishSilently
"""The verbs that end a script well."""


def played(script: Script) -> Script:
    """Return the part of a script that is played: up to the verb that ends it."""
    for index, verb in enumerate(script):
        if isinstance(verb, FAULTS | ENDINGS):
            return script[: index + 1]
    return script


def ends(script: Script) -> bool:
    """Whether a script comes to a good end."""
    return any(isinstance(verb, ENDINGS) for verb in played(script)[-1:])


def is_sound(script: Script) -> bool:
    """Whether a stage does nothing but its work by a script, to a good end, and keeps to its contract."""
    return ends(script) and not any(isinstance(verb, Duplicate) for verb in script)


def takes(script: Script) -> float:
    """Return the seconds that a script waits in all."""
    return sum(verb.seconds for verb in played(script) if isinstance(verb, Wait))


def says(script: Script) -> tuple[int, ...]:
    """Return the tokens that are given by a script."""
    return tuple(token for verb in played(script) if isinstance(verb, Chunk | Finish) for token in verb.token_ids)


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
