"""What is known of a request while the engine works on it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final, TypeAlias

from ._sessions import Session

__all__ = ["FOR_GOOD", "Ending", "Leg"]

Ending: TypeAlias = tuple[str | None, str | None, bool]
"""`finish_reason`, `completion_finish_reason` and `segment_end` of an output."""

_GOES_ON: Final[Ending] = (None, None, False)

FOR_GOOD: Final = frozenset(("abort", "error"))
"""Reasons for which the engine ends a session; all others end a segment."""


class Leg:
    """One request, and the engine's requests that it is made of.

    Args:
        request_id: the runtime's.
        engine_ids: the ids of the engine's requests, one per completion.
        raw: whether outputs go out as the engine makes them, past vLLM's output processor; in a session each segment
            has its own way.
        task: the pooling task; None for a request that generates.
        prompt_tokens: length of the prompt.
        session: set for a request whose input comes in pieces.
        params: the parameters that more input of a session gets if it brings none.
        source: where the request's KV cache comes from, in words.
        remote_cached_tokens: how much of the prompt was cached where its KV cache comes from, if that is known.
    """

    __slots__ = (
        "cached_tokens",
        "engine_ids",
        "open",
        "params",
        "prompt_tokens",
        "raw",
        "remote_cached_tokens",
        "request_id",
        "session",
        "source",
        "task",
    )

    def __init__(
        self,
        request_id: str,
        engine_ids: Iterable[str] = (),
        *,
        raw: bool,
        task: str | None = None,
        prompt_tokens: int = 0,
        session: Session | None = None,
        params: Any = None,
        source: str | None = None,
        remote_cached_tokens: int | None = None,
    ) -> None:
        self.request_id = request_id
        self.engine_ids = tuple(engine_ids) or (request_id,)
        self.open = {engine_id: index for index, engine_id in enumerate(self.engine_ids)}
        """By engine id: the index of each completion that has not ended."""
        self.raw = raw
        self.task = task
        self.prompt_tokens = prompt_tokens
        """Length of the prompt until it has been told, 0 afterwards."""
        self.cached_tokens = 0
        """How much of the prompt the prefix cache had, once that is known."""
        self.session = session
        self.params = params
        self.source = source
        self.remote_cached_tokens = remote_cached_tokens

    def index(self, engine_id: str) -> int:
        """Return which completion one of the engine's requests is."""
        return self.open.get(engine_id, 0) if len(self.engine_ids) > 1 else 0

    def tell_prompt(self, cached_tokens: int) -> tuple[int, int]:
        """Return the lengths of the prompt and of its cached part the first time, zeros afterwards.

        In a session they grow with each piece of input, and are told anew.
        """
        tokens, self.prompt_tokens = self.prompt_tokens, 0
        if not tokens:
            return 0, 0
        if self.remote_cached_tokens is not None:
            # What came from the other engine is no hit of this one's cache.
            cached_tokens = self.remote_cached_tokens
        self.cached_tokens += cached_tokens
        return tokens, self.cached_tokens

    def ending(self, engine_id: str, reason: str | None) -> Ending:
        """Take note that the engine ended one of its requests, if it did, and say what that means for the whole."""
        if reason is None:
            return _GOES_ON
        if self.session is not None:
            if reason in FOR_GOOD or self.session.done():
                return reason, None, False
            return None, None, True
        self.open.pop(engine_id, None)
        if self.open and reason != "error":
            return None, reason, False
        return reason, None, False
