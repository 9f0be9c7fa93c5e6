"""The bridge between thinker and speaker: hands on each sentence as soon as it is complete."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import pairwise

from omni_trio.bridges import BridgeContext, bridge
from omni_trio.messages import StageInput

__all__ = ["finished_until", "sentences", "split"]

# A sentence ends with its mark, whatever closes after it, and white space: only that tells that "3." was not the
# beginning of "3.14". A line break ends one too: headings and verses have no mark.
END = re.compile(r"[.!?\u2026]+[\"')\]*_\u201d\u2019]*\s+|\s*\n\s*")
NOT_AN_END = re.compile(
    r"(?:^|[\s(\"'\u201c\u2018])(?:Mr|Mrs|Ms|Dr|St|Mt|Prof|Jr|Sr|vs|etc|e\.g|i\.e|[A-Z]|\d{1,2})\.\s*$"
)


@bridge(reads=("text",))
def sentences(context: BridgeContext) -> StageInput | None:
    """Hand on what has been completed since the last call: whole sentences, or all that is left at the end."""
    sent: int = context.state.get("sent", 0)
    new = context.text[sent:]
    end = len(new) if context.finished else finished_until(new)
    piece = new[:end]
    if not piece.strip():
        return None
    context.state["sent"] = sent + end
    return StageInput(text=piece)


def finished_until(text: str) -> int:
    """Return the length of the beginning of `text` that holds only whole sentences; 0 where the first goes on."""
    end = 0
    for end in _ends(text):  # noqa: B007 - the last one is wanted
        pass
    return end


def split(text: str) -> list[str]:
    """Return the sentences of a whole text, without the white space between them."""
    bounds = [0, *_ends(text), len(text)]
    pieces = (text[start:end].strip() for start, end in pairwise(bounds))
    return [piece for piece in pieces if piece]


def _ends(text: str) -> Iterator[int]:
    start = 0
    for match in END.finditer(text):
        if "\n" in match[0] or not NOT_AN_END.search(text[start : match.end()]):
            start = match.end()
            yield start
