"""Puts together what came in piece by piece, for workers that want it as a whole."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from omni_trio.merging import merge_data
from omni_trio.messages import StageInput

from ._base import WorkItem

__all__ = ["gather"]


def gather(item: WorkItem) -> StageInput | None:
    """Return all the input of a request (in a session: of a segment) once it is complete, and None until then.

    Also None where the item only closes a session whose segments have all been returned. Pieces wait in the item's
    `state`.
    """
    pieces: list[StageInput] = item.state.setdefault("pieces", [])
    if item.number and item.last and item.empty and not pieces:
        return None
    pieces.append(item.input)
    if not (item.last or item.segment_end):
        return None
    item.state["pieces"] = []
    return _merge(pieces)


def _merge(pieces: Sequence[StageInput]) -> StageInput:
    if len(pieces) == 1:
        return pieces[0]
    embeds = [{"embeds": piece.embeds} for piece in pieces if piece.embeds is not None]
    token_ids = [piece.token_ids for piece in pieces if piece.token_ids is not None]
    texts = [piece.text for piece in pieces if piece.text is not None]
    messages = [piece.messages for piece in pieces if piece.messages is not None]
    batches = [piece.batch for piece in pieces if piece.batch is not None]
    return StageInput(
        text="".join(texts) if texts else None,
        token_ids=tuple(itertools.chain.from_iterable(token_ids)) if token_ids else None,
        messages=tuple(itertools.chain.from_iterable(messages)) if messages else None,
        embeds=merge_data(embeds).get("embeds"),
        data=merge_data(piece.data for piece in pieces),
        batch=tuple(itertools.chain.from_iterable(batches)) if batches else None,
    )
