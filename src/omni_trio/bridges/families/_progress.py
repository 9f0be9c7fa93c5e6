"""How far a thinker's output has been handed on: which tokens and rows are new, and which are the next segment's."""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from omni_trio.bridges._contract import BridgeContext
from omni_trio.errors import InvalidRequest

from ._common import find, ids_from

__all__ = ["Piece", "next_piece"]

_STATE = "progress"


@attrs.frozen
class Piece:
    """What is new: prompt and reply in token ids, and the rows of the hidden states that belong to them."""

    prompt: tuple[int, ...]
    output: tuple[int, ...]
    start: int
    """The first new row."""
    stop: int
    first: bool
    """Whether nothing has been handed on before."""


@attrs.define
class _Progress:
    """What has been handed on of a turn, and of it in the segment at hand."""

    prompt: int = 0
    output: int = 0
    rows: int = 0
    segment: int = 0
    segment_prompt: int = 0
    segment_output: int = 0
    segment_rows: int = 0
    begun: bool = False

    def enter(self, segment: int) -> None:
        if segment != self.segment:
            self.segment = segment
            self.segment_prompt, self.segment_output, self.segment_rows = self.prompt, self.output, self.rows


def next_piece(context: BridgeContext, row_total: int | None, *, last_row: bool) -> Piece | None:
    """Return what is new, and take note that it is handed on; None where there is nothing to hand on yet.

    The rows are those of the source's context, in order: in each segment the prompt's, then the reply's.

    Args:
        context: of the call. Its `state` remembers.
        row_total: rows that there are so far; None where the source has given none.
        last_row: whether a segment's last token has a row of its own. vLLM's engines give none: what was sampled last
            is never fed back.

    Raises:
        InvalidRequest: the source has ended, or worked off a segment, and has not said all that is needed.
    """
    progress: _Progress = context.state.setdefault(_STATE, _Progress())
    progress.enter(context.segment)
    complete = context.finished or context.segment_end
    prompt, told = _prompt_ids(context)
    if prompt is None:
        if not complete:
            return None
        raise InvalidRequest(
            f"{context.source!r} does not tell the token ids of its prompt (data['ids.prompt']), and the prompt was "
            "not given in token ids"
        )
    prompt_end = max(len(prompt) - (0 if context.finished else _next_prompt(context)), progress.prompt)
    output_end = max(len(context.token_ids), progress.output)
    if row_total is None:
        if not complete or (prompt_end, output_end) == (progress.prompt, progress.output):
            return None
        raise InvalidRequest(f"{context.source!r} gave no hidden states; have it put them out with its tokens")
    if row_total < progress.rows:
        raise InvalidRequest(
            f"{context.source!r} had given {progress.rows} rows of hidden states, and now there are {row_total}: they "
            "do not add up; put them out under flat keys"
        )
    new_prompt = prompt_end - progress.prompt
    missing = progress.rows + new_prompt - row_total
    if missing > 0:
        if context.finished:
            raise InvalidRequest(
                f"{context.source!r} gave hidden states for {new_prompt - missing} tokens of a prompt of {new_prompt}; "
                "it must not take them from its prefix cache"
            )
        if not complete:  # a prompt is handed on in one: it is what the receiver starts with
            return None
        prompt_end -= missing  # the source is at the next segment's prompt already
    stop = row_total
    if told and not context.finished:
        replied = output_end - progress.segment_output
        due = progress.segment_rows + prompt_end - progress.segment_prompt + replied
        stop = min(row_total, due if last_row or not replied else due - 1)
    piece = Piece(
        tuple(prompt[progress.prompt : prompt_end]),
        tuple(context.token_ids[progress.output : output_end]),
        progress.rows,
        max(stop, progress.rows),
        not progress.begun,
    )
    if not piece.prompt and not piece.output and piece.start == piece.stop:
        return None
    progress.prompt, progress.output, progress.rows, progress.begun = prompt_end, output_end, piece.stop, True
    return piece


def _prompt_ids(context: BridgeContext) -> tuple[Sequence[int] | None, bool]:
    """Return the prompt's token ids so far, and whether the source told them."""
    for key in ("ids.prompt", "prompt_token_ids"):
        if (told := find(context.data, key)) is not None:
            return ids_from(told, f"data[{key!r}] of {context.source!r}"), True
    return context.prompt.token_ids, False


def _next_prompt(context: BridgeContext) -> int:
    """Return how many of the prompt's last tokens are of a segment that has arrived but is not worked on yet."""
    told = find(context.data, "meta.new_prompt_len_snapshot")
    if told is None:
        told = context.data.get("new_prompt_len_snapshot")
    return max(int(told), 0) if isinstance(told, int) else 0
