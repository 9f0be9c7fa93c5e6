"""Qwen-Omni: a thinker that understands and replies, a talker that makes codec frames of it, a vocoder.

Token ids, sizes and keys are those of the published checkpoints Qwen2.5-Omni and Qwen3-Omni. What a thinker has to
put out: hidden states of shape [tokens, hidden], one row per token of its context, prompt first, under the keys that
the classes name, and ``ids.prompt``, the token ids of its prompt. In a session each segment adds to both.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import attrs

from omni_trio.bridges._contract import BridgeContext, BridgeSpec
from omni_trio.errors import InvalidRequest
from omni_trio.messages import StageInput

from ._common import declared, find, multimodal, one_of, row_count, rows, said_by_user, whole_number
from ._progress import Piece, next_piece
from .vocoder import CodecToWave

__all__ = [
    "Qwen2ThinkerToTalker",
    "Qwen3ThinkerToTalker",
    "TalkerPromptLength",
    "talker_prompt_length",
    "talker_to_code2wav",
    "talker_to_code2wav_chunks",
    "thinker_to_talker",
    "v2_5_talker_to_code2wav",
    "v2_5_talker_to_code2wav_chunks",
    "v2_5_thinker_to_talker",
]


@attrs.frozen(kw_only=True)
class TalkerPromptLength:
    """A `Placeholder`: how long the talker's prompt is, by the turns of the thinker's chat template.

    A turn goes from one start of turn to the next; the token behind the start says whose it is. The user's turns count
    in full, a last turn of the assistant counts a fixed length, anything else nothing. A start of turn that nothing
    follows is a turn of nobody's.
    """

    start_of_turn: int = 151644
    """``<|im_start|>``."""
    user: int = 872
    """``user``. The system's role, 8948, counts nothing, as any other."""
    assistant: int = 77091
    """``assistant``."""
    assistant_tokens: int = attrs.field(default=9, validator=whole_number(0))
    """What the talker puts for the assistant's turn: 3 tokens of its head, 4 of padding, 1 begin, 1 first text."""

    def __call__(self, prompt: StageInput) -> int:
        """Return the length in tokens, at least 1.

        Raises:
            InvalidRequest: the prompt is not given in token ids.
        """
        if prompt.token_ids is None:
            raise InvalidRequest("how long the talker's prompt is can be told of a prompt in token ids only")
        return self.of(prompt.token_ids)

    def of(self, token_ids: Sequence[int], reply: int = 0) -> int:
        """Return the length for a prompt that is followed by `reply` tokens, which belong to its last turn."""
        ids = tuple(token_ids)
        starts = []
        at = -1
        for _ in range(ids.count(self.start_of_turn)):
            at = ids.index(self.start_of_turn, at + 1)
            starts.append(at)
        length = 0
        ends = [*starts, len(ids) + reply][1:]
        for start, end in zip(starts, ends, strict=True):
            role = ids[start + 1] if start + 1 < len(ids) else None
            if role == self.user:
                length += end - start
            elif role == self.assistant and start == starts[-1]:
                length += self.assistant_tokens
        return max(length, 1)


@attrs.frozen(kw_only=True)
class Qwen3ThinkerToTalker:
    """Qwen3-Omni's thinker to its talker.

    Over ``feed = "finish"`` all goes at once; in a session by segment; over ``feed = "output"`` the prompt first, as
    soon as all of its rows are there, then what is new.
    """

    embeds: str = "hidden_states.layer_0"
    """Key of the thinker's word embeddings."""
    hidden: str = "hidden_states.layer_24"
    """Key of its hidden states at the talker's ``accept_hidden_layer``."""
    marks: tuple[str, ...] = ("tts_bos", "tts_eos", "tts_pad")
    """Names in ``embed`` of the embeddings of special tokens, [1, hidden], which are handed on once where given."""
    user_keys: tuple[str, ...] = ("speaker", "language")
    """What is taken over from the user's prompt."""
    placeholder: int = 0
    """The token that the talker's prompt is made of: its embeddings replace it."""
    length: TalkerPromptLength = attrs.field(factory=TalkerPromptLength)
    inline: bool = True
    """False where embeddings and hidden states go from engine to engine, and only ids and length from here."""
    last_row: bool = False
    """Whether the last token of a segment has a row too."""

    @property
    def __omni_trio_bridge__(self) -> BridgeSpec:
        return declared(self, ("tokens", "data"), "thread")

    def __call__(self, context: BridgeContext) -> StageInput | None:
        """Make the talker's next input.

        Raises:
            InvalidRequest: the thinker has not put out what is needed, or not in the right form.
        """
        arrays = {key: find(context.data, key) for key in (self.embeds, self.hidden)}
        given = [row_count(value, f"data[{key!r}]") for key, value in arrays.items() if value is not None]
        piece = next_piece(context, min(given) if len(given) == len(arrays) else None, last_row=self.last_row)
        if piece is None:
            return None
        info: dict[str, Any] = {"meta": {"finished": context.finished}}
        if piece.prompt:
            info["ids"] = {"all": [*piece.prompt, *piece.output], "prompt": [*piece.prompt]}
            info |= said_by_user(context, self.user_keys)
        else:
            info["ids"] = {"output": [*piece.output]}
        if self.inline:
            form = "prefill" if piece.prompt else "decode"
            info["embed"] = {form: rows(arrays[self.embeds], piece.start, piece.stop)}
            info["hidden_states"] = {"output": rows(arrays[self.hidden], piece.start, piece.stop)}
            if piece.first:
                info["embed"] |= self._marks(context)
        count = self.length.of(piece.prompt, len(piece.output)) if piece.prompt else 0
        return _talker_input(context, piece, (self.placeholder,) * count, info)

    def _marks(self, context: BridgeContext) -> dict[str, Any]:
        found = {}
        for name in self.marks:
            if (value := find(context.data, f"embed.{name}")) is not None:
                total = row_count(value, f"data['embed.{name}']")
                # A source that gives it with each output has them added up.
                found[name] = rows(value, max(total - 1, 0), total)
        return found


@attrs.frozen(kw_only=True)
class Qwen2ThinkerToTalker:
    """Qwen2.5-Omni's thinker to its talker: as `Qwen3ThinkerToTalker`, with one kind of rows, and in 32 bits."""

    hidden: str = "latent"
    """Key of the thinker's hidden states."""
    codec_pad: int = 8292
    codec_bos: int = 8293
    codec_eos: int = 8294
    user_keys: tuple[str, ...] = ("speaker", "language")
    dtype: str | None = attrs.field(default="float32", validator=one_of(None, "float32", "float16"))
    """What the rows are converted to; None: they stay as they are."""
    last_row: bool = False

    @property
    def __omni_trio_bridge__(self) -> BridgeSpec:
        return declared(self, ("tokens", "data"), "thread")

    def __call__(self, context: BridgeContext) -> StageInput | None:
        """Make the talker's next input.

        Raises:
            InvalidRequest: the thinker has not put out what is needed, or not in the right form.
        """
        hidden = find(context.data, self.hidden)
        total = None if hidden is None else row_count(hidden, f"data[{self.hidden!r}]")
        piece = next_piece(context, total, last_row=self.last_row)
        if piece is None:
            return None
        middle = min(piece.start + len(piece.prompt), piece.stop)
        result = rows(hidden, middle, piece.stop, self.dtype)
        info: dict[str, Any] = {
            "thinker_result": result,
            "thinker_result_shape": [*result.shape],
            "thinker_output_token_ids": [*piece.output],
        }
        if not piece.prompt:
            return _talker_input(context, piece, (), info)
        embeds = rows(hidden, piece.start, middle, self.dtype)
        info |= {
            "prompt_embeds": embeds,
            "prompt_embeds_shape": [*embeds.shape],
            "prompt_token_ids": [*piece.prompt],
            **said_by_user(context, self.user_keys),
        }
        ids = (self.codec_bos, *(self.codec_pad,) * len(piece.prompt), self.codec_eos)
        return _talker_input(context, piece, ids, info)


def _talker_input(context: BridgeContext, piece: Piece, token_ids: tuple[int, ...], info: dict[str, Any]) -> StageInput:
    passed_on = multimodal(context.prompt) if piece.first and context.requires_multimodal_data else {}
    return StageInput(token_ids=token_ids or None, data={**passed_on, "additional_information": info})


talker_prompt_length: Final = TalkerPromptLength()
"""For the talker of either, with ``feed = "connector"``."""

thinker_to_talker: Final = Qwen3ThinkerToTalker()
"""Qwen3-Omni."""

talker_to_code2wav: Final = CodecToWave()
"""Qwen3-Omni: all frames at once, or by segment. 16 codebooks of 2048 entries; ids beyond are special tokens."""

talker_to_code2wav_chunks: Final = CodecToWave(chunk=25, left_context=25)
"""Qwen3-Omni, for ``feed = "output"``: 25 frames (2 s) at a time, with 25 before them."""

v2_5_thinker_to_talker: Final = Qwen2ThinkerToTalker()
"""Qwen2.5-Omni."""

v2_5_talker_to_code2wav: Final = CodecToWave(codes=None, codebooks=1, codebook_size=8192, drop_zeros=False)
"""Qwen2.5-Omni: the talker's tokens are the frames; those from 8192 on are special (pad, begin, end, mask)."""

v2_5_talker_to_code2wav_chunks: Final = attrs.evolve(v2_5_talker_to_code2wav, chunk=50, left_context=50)
"""Qwen2.5-Omni, for ``feed = "output"``: 50 frames (1 s) at a time, with 50 before them."""
