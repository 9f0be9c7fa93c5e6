"""Text to speech: words to a talker sentence by sentence, and a talker's codec frames to its vocoder.

Sizes and keys of `talker_to_code2wav` are those of the published checkpoints Qwen3-TTS at 12 Hz.
"""

from __future__ import annotations

from typing import Final

import attrs

from omni_trio.bridges._contract import BridgeContext, BridgeSpec
from omni_trio.messages import StageInput

from ._common import declared, said_by_user, whole_number
from .vocoder import CodecToWave

__all__ = ["TextToSpeech", "talker_to_code2wav", "talker_to_code2wav_chunks", "text_to_speech"]

_STATE = "spoken"


@attrs.frozen(kw_only=True)
class TextToSpeech:
    """A language model's words to a talker.

    Over ``feed = "output"`` whole sentences go as soon as they are complete, so that speech can begin; what is left
    goes at the end, in a session at the end of each segment. White space goes with the words that follow it, and is
    left out where none do.
    """

    ends: tuple[str, ...] = (". ", "! ", "? ", "… ", ".\n", "!\n", "?\n", "\n", "。", "！", "？")  # noqa: RUF001
    """What sentences end with."""
    shortest: int = attrs.field(default=1, validator=whole_number(1))
    """Characters that must be there before any are sent early; the more, the better a talker's melody."""
    user_keys: tuple[str, ...] = ("task_type", "speaker", "language", "instruct")
    """What is taken over from the user's prompt."""

    @property
    def __omni_trio_bridge__(self) -> BridgeSpec:
        return declared(self, ("text",), "inline")

    def __call__(self, context: BridgeContext) -> StageInput | None:
        """Make the talker's next input: words, the same in ``additional_information["text"]``, and what the user said.

        Raises:
            InvalidRequest: what the user said under `user_keys` can not be copied.
        """
        spoken = context.state.get(_STATE, 0)
        left = context.text[spoken:]
        complete = context.finished or context.segment_end
        said = left[: len(left) if complete else self._sentences(left)].rstrip()
        if not said or (len(said) < self.shortest and not complete):
            return None
        context.state[_STATE] = spoken + len(said)
        information = {"text": [said], **said_by_user(context, self.user_keys)}
        return StageInput(text=said, data={"additional_information": information})

    def _sentences(self, text: str) -> int:
        """Return how many characters are of complete sentences."""
        found = ((text.rfind(end), end) for end in self.ends)
        return max((at + len(end) for at, end in found if at >= 0), default=0)


text_to_speech: Final = TextToSpeech()
"""Any language model to any talker that takes words."""

talker_to_code2wav: Final = CodecToWave(reference="codes.ref", user_keys=("speaker", "language"))
"""Qwen3-TTS: all frames at once, behind those of the voice to be imitated."""

talker_to_code2wav_chunks: Final = attrs.evolve(talker_to_code2wav, chunk=25, left_context=25)
"""Qwen3-TTS, for ``feed = "output"``: 25 frames (2 s) at a time, with 25 before them."""
