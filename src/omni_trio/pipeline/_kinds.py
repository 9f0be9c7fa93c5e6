"""The words that a pipeline's description is made of."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Literal, TypeAlias, get_args

from omni_trio.messages import Modality

__all__ = [
    "ENGINE_KINDS",
    "FEEDS",
    "KINDS",
    "MODALITIES",
    "WORKER_KINDS",
    "Feed",
    "StageKind",
    "nearest",
]

StageKind: TypeAlias = Literal["llm", "pooling", "worker", "diffusion", "simulated"]
"""``llm``: a vLLM engine that generates; ``pooling``: a vLLM engine that embeds, classifies or scores;
``worker``: a torch module or any callable in a process of its own; ``diffusion``: a worker that denoises in steps;
``simulated``: a script on the clock."""

Feed: TypeAlias = Literal["finish", "output", "kv", "connector"]
"""When a stage gets its input from its source.

``finish``: once, when the source has ended (in a session: at the end of each segment).
``output``: in pieces, at each output of the source.
``kv``: once, when the source's KV cache can be had or the source has ended, whichever is first.
``connector``: the stage is submitted together with its source, with a placeholder; the data travels from engine to
engine (vLLM-Omni calls this async chunk).
"""

KINDS: tuple[str, ...] = get_args(StageKind)
FEEDS: tuple[str, ...] = get_args(Feed)
MODALITIES: tuple[str, ...] = get_args(Modality)

ENGINE_KINDS: tuple[StageKind, ...] = ("llm", "pooling")
"""The kinds that have a model in a vLLM engine."""
WORKER_KINDS: tuple[StageKind, ...] = ("worker", "diffusion")
"""The kinds that have a target in a worker process."""


def nearest(word: str, choices: Iterable[str]) -> str:
    """Return ``; did you mean 'x'?`` for the nearest of `choices`, or nothing where none is near."""
    match = difflib.get_close_matches(word, list(choices), n=1)
    return f"; did you mean {match[0]!r}?" if match else ""
