"""A session: one request of the engine that is given its input in pieces and answers it in segments.

vLLM's own rules for such requests: each message with more input makes it generate until its parameters stop it; the
last token that was sampled is put out but does not become part of the context; and a request that waits for more
input ends without a word. Everything else is decided here, so that there is one way through it:

- The engine is given the next piece when it has answered the one before. It could queue them itself, but it checks
  none of them against its longest context, and dies of the first token beyond it. The price is one trip between two
  processes per segment, and only where input has come early.
- A piece that completes no segment is prefilled once another one is behind it: the engine samples one token from it,
  which is dropped on both sides. The newest such piece is kept back, so that whatever completes the segment, even
  without input of its own, has something left to answer.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import attrs

__all__ = ["Piece", "Session", "unsegmented"]


@attrs.define(eq=False)
class Piece:
    """One piece of input."""

    request: Any
    """The engine's request; None for a segment that has no input of its own."""
    tokens: int
    """Length of the prompt in it."""
    answered: bool
    """Whether it completes a segment."""
    raw: bool = True
    """Whether the answer goes out as the engine makes it."""


class Session:
    """What the engine has, works on and is still to be given. Does nothing by itself.

    Args:
        longest: tokens that the context can hold.
    """

    __slots__ = ("_closed", "_length", "_longest", "_pieces", "_produced", "at_work", "given")

    def __init__(self, longest: int) -> None:
        self._longest = longest
        self._pieces: deque[Piece] = deque()
        self._closed = False
        self._length = 0
        self._produced = 0
        self.at_work: Piece | None = None
        """What the engine works on."""
        self.given = 0
        """Tokens of input that the engine has been given so far."""

    @property
    def answering(self) -> bool:
        """Whether the engine works on something that is to be answered."""
        return self.at_work is not None and self.at_work.answered

    @property
    def closed(self) -> bool:
        """Whether there will be no more input."""
        return self._closed

    def complaint(self, tokens: int) -> str | None:
        """Say why the engine can not take so many more tokens now; None where it can, or where nobody knows yet."""
        if self.at_work is not None or self._pieces:
            return None
        return self._too_long(tokens)

    def add(self, piece: Piece | None, *, segment_end: bool, last: bool) -> None:
        """Take more input, or none, and what it completes."""
        if piece is not None:
            self._pieces.append(piece)
        elif segment_end or last:
            if self._pieces and not self._pieces[-1].answered:
                self._pieces[-1].answered = True
            elif not last:
                self._pieces.append(Piece(None, 0, True))
        self._closed = self._closed or last

    def next(self) -> Piece | None:
        """Return the piece whose turn it is, which is at work from now on; None while there is nothing to be done.

        Raises:
            ValueError: the engine can not take it: says the numbers.
        """
        if self.at_work is not None or not self._pieces:
            return None
        if len(self._pieces) == 1 and not self._pieces[0].answered:
            return None
        piece = self._pieces.popleft()
        if (complaint := self._too_long(piece.tokens)) is not None:
            raise ValueError(complaint)
        self.at_work = piece
        self._produced = 0
        self.given += piece.tokens
        return piece

    def produced(self, tokens: int) -> None:
        """Take note of tokens that the engine has made of the piece at work."""
        self._produced += tokens

    def done(self) -> bool:
        """Take note that the piece at work is answered; return whether that was the end of the session."""
        assert self.at_work is not None  # the engine has just ended it
        self._length += self.at_work.tokens + max(self._produced - 1, 0)
        self.at_work = None
        return self.over

    @property
    def over(self) -> bool:
        """Whether everything is answered and nothing will follow."""
        return self._closed and self.at_work is None and not self._pieces

    def _too_long(self, tokens: int) -> str | None:
        # One token has to be left for the answer.
        if self._length + tokens < self._longest:
            return None
        return (
            f"the session has {self._length} tokens by now; with the {tokens} of this input it would leave no room for "
            f"an answer within the {self._longest} tokens that max_model_len allows"
        )


def unsegmented(params: Any) -> str | None:
    """Say why a session can not have these SamplingParams; None where it can."""
    if params.n != 1:
        return f"n must be 1, not {params.n}, in a session: each segment goes on from the one answer before"
    if params.stop:
        return (
            "stop strings can not end a segment of a session, as the engine does not know of them; use stop_token_ids"
        )
    if params.structured_outputs is not None:
        return "structured_outputs can not be had in a session: the engine holds to them in its first segment only"
    for name in ("prompt_logprobs", "prompt_logprob_token_ids"):
        if getattr(params, name, None) is not None:
            return f"{name} can not be had in a session: the prompt comes in pieces"
    return None
