"""Bridges of model families: what their stages hand to each other, as declared callables.

A family's module has instances, ready to be named in a pipeline file, such as
``bridge = "omni_trio.bridges.families.qwen_omni:thinker_to_talker"``, and the frozen classes behind them. Every token
id, size and key of a model is a field of such a class: for a checkpoint that differs, make an instance of your own with
`attrs.evolve`, in a module beside the pipeline file.

All of them keep the same promises. They never raise anything but `omni_trio.InvalidRequest`; what they return shares
no memory with what they were given; they are deterministic; and over a streaming edge or in a session what they send
adds up to what they would have sent for the whole.

Data is looked up by dotted key, such as ``codes.audio``: flat first (successive outputs of a source add up under flat
keys, see `omni_trio.merging`), then nested.
"""

from __future__ import annotations

from .image import ArToImage, CfgExpand, HandOver
from .qwen_omni import Qwen2ThinkerToTalker, Qwen3ThinkerToTalker, TalkerPromptLength
from .tts import TextToSpeech
from .vocoder import CodecToWave

__all__ = [
    "ArToImage",
    "CfgExpand",
    "CodecToWave",
    "HandOver",
    "Qwen2ThinkerToTalker",
    "Qwen3ThinkerToTalker",
    "TalkerPromptLength",
    "TextToSpeech",
]
