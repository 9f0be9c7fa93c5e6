"""From a talker's codec frames to the input of a vocoder, all at once or in chunks with some frames before them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any, TypeAlias

import attrs

from omni_trio.bridges._contract import BridgeContext, BridgeSpec
from omni_trio.errors import InvalidRequest
from omni_trio.messages import StageInput

from ._common import declared, find, ids_from, said_by_user, whole_number

__all__ = ["CodecToWave"]

_Frame: TypeAlias = Sequence[int]

_STATE = "codec"


@attrs.define
class _Progress:
    """What has been read of the talker, and what has been sent of it."""

    read: int = 0
    """Rows, or single codes, of the source that have been looked at."""
    sent: int = 0
    """Frames."""
    base: int = 0
    """Frames that had been sent when the last segment was worked off: chunks are counted from there."""
    loose: list[int] = attrs.field(factory=list)
    """Codes of a frame that is not complete yet."""
    before: list[_Frame] = attrs.field(factory=list)
    """The last frames that were sent, as context."""
    waiting: list[_Frame] = attrs.field(factory=list)
    """Frames that are to be sent."""


@attrs.frozen(kw_only=True)
class CodecToWave:
    """Codec frames to a vocoder: a token per code, codebook after codebook.

    Frames with a special token in them, which is any code outside of the codebooks, are left out. With `chunk`, frames
    go as soon as there are enough of them; each time as many whole chunks as there are, together. What is left goes at
    the end, in a session at the end of each segment.
    """

    codes: str | None = "codes.audio"
    """Key of the frames: an array of integers, [frames, codebooks], or flat, frame after frame. None: the talker's
    tokens are the codes, frame after frame."""
    codebooks: int = attrs.field(default=16, validator=whole_number(1))
    """Codes per frame."""
    codebook_size: int = attrs.field(default=2048, validator=whole_number(1))
    """Entries of a codebook."""
    drop_zeros: bool = True
    """Whether frames of zeros alone are left out: some talkers pad with them."""
    chunk: int = attrs.field(default=0, validator=whole_number(0))
    """Frames per chunk; 0: all at once."""
    first_chunk: int = attrs.field(default=0, validator=whole_number(0))
    """Frames of the first chunk, to be heard sooner; 0: as the others."""
    left_context: int = attrs.field(default=0, validator=whole_number(0))
    """Frames sent already that go before the new ones, so that the vocoder can make a seamless joint."""
    reference: str | None = None
    """Key of frames of the voice to be imitated, which go before the first new ones; in the form of `codes`."""
    reference_length: str = "meta.ref_code_len"
    """Key of how many frames of the reference count, where not all of them do."""
    user_keys: tuple[str, ...] = ()
    """What is taken over from the user's prompt."""

    @property
    def __omni_trio_bridge__(self) -> BridgeSpec:
        key_data = () if self.codes is None and self.reference is None else ("data",)
        return declared(self, ("tokens", *key_data), "thread")

    def __call__(self, context: BridgeContext) -> StageInput | None:
        """Make the vocoder's next input: ``additional_information["meta"]["left_context_size"]`` frames are context.

        Raises:
            InvalidRequest: what the talker put out are no codec frames.
        """
        progress: _Progress = context.state.setdefault(_STATE, _Progress())
        progress.waiting += self._new_frames(context, progress)
        complete = context.finished or context.segment_end
        count = len(progress.waiting) if complete else self._ready(progress)
        if count == 0:
            self._close(progress, complete)
            return None
        new = progress.waiting[:count]
        before = progress.before if progress.sent else self._reference(context)
        frames = [*before, *new]
        del progress.waiting[:count]
        progress.before = frames[-self.left_context :] if self.left_context else []
        progress.sent += count
        self._close(progress, complete)
        meta = {"left_context_size": len(before), "finished": context.finished}
        return StageInput(
            token_ids=tuple(chain.from_iterable(zip(*frames, strict=True))),
            data={"additional_information": {"meta": meta, **said_by_user(context, self.user_keys)}},
        )

    def _ready(self, progress: _Progress) -> int:
        """Return how many of the frames that wait make up whole chunks."""
        if not self.chunk:
            return 0
        first = self.first_chunk or self.chunk
        begun = progress.sent - progress.base
        total = begun + len(progress.waiting)
        if total < first:
            return 0
        return first + (total - first) // self.chunk * self.chunk - begun

    @staticmethod
    def _close(progress: _Progress, complete: bool) -> None:
        if complete:
            progress.base = progress.sent
            progress.loose.clear()

    def _new_frames(self, context: BridgeContext, progress: _Progress) -> list[_Frame]:
        value: Any
        if self.codes is None:
            value, what = context.token_ids, f"the tokens of {context.source!r}"
        else:
            value, what = find(context.data, self.codes), f"data[{self.codes!r}] of {context.source!r}"
        if value is None:
            return []
        new = _plain(value, what, progress.read)
        if len(value) < progress.read:
            raise InvalidRequest(
                f"{what} had {progress.read} parts, and now there are {len(value)}: they do not add up; put them out "
                "under a flat key"
            )
        progress.read += len(new)
        if self.codes is None:  # special tokens stand alone, not in a frame
            new = [code for code in ids_from(new, what) if 0 <= code < self.codebook_size]
        return [frame for frame in self._frames(new, what, progress.loose) if self._speaks(frame)]

    def _reference(self, context: BridgeContext) -> list[_Frame]:
        value = None if self.reference is None else find(context.data, self.reference)
        if isinstance(value, list) and len(value) == 1 and hasattr(value[0], "tolist"):
            (value,) = value
        if value is None:
            return []
        what = f"data[{self.reference!r}] of {context.source!r}"
        loose: list[int] = []
        frames = self._frames(_plain(value, what), what, loose)
        if loose:
            raise InvalidRequest(f"{what} ends within a frame")
        length = find(context.data, self.reference_length)
        if hasattr(length, "tolist"):
            length = length.reshape(-1).tolist()
        if isinstance(length, list | tuple):
            length = length[-1] if length else None
        return frames[:length] if isinstance(length, int) and length > 0 else frames

    def _frames(self, value: Sequence[Any], what: str, loose: list[int]) -> list[_Frame]:
        """Return complete frames; `loose` has the codes of one that has begun, before and after."""
        if value and isinstance(value[0], list | tuple):
            frames = [ids_from(frame, f"a frame of {what}") for frame in value]
            if any(len(frame) != self.codebooks for frame in frames):
                raise InvalidRequest(f"{what} must have {self.codebooks} codes in each frame")
            return list(frames)
        if self.codebooks == 1:
            return [(code,) for code in ids_from(value, what)]
        loose += ids_from(value, what)
        whole = len(loose) - len(loose) % self.codebooks
        frames = [loose[start : start + self.codebooks] for start in range(0, whole, self.codebooks)]
        del loose[:whole]
        return list(frames)

    def _speaks(self, frame: _Frame) -> bool:
        return min(frame) >= 0 and max(frame) < self.codebook_size and (not self.drop_zeros or any(frame))


def _plain(value: Any, what: str, start: int = 0) -> Sequence[Any]:
    """Return what an array or a list has from `start` on, as a list."""
    if not isinstance(value, list | tuple) and not (hasattr(value, "tolist") and len(getattr(value, "shape", ())) > 0):
        raise InvalidRequest(f"{what} must be an array of codes, not {type(value).__name__}")
    part = value[start:]
    plain: Sequence[Any] = part.tolist() if hasattr(part, "tolist") else part
    return plain
