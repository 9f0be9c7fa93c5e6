"""The speaking stage: a Piper voice in a worker process."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from omni_trio.worker import Reply, Worker, WorkItem

from .voice import Voice

__all__ = ["Speaker"]


class Speaker(Worker):
    """Reads aloud what it is given, one answer per sentence: ``audio`` and its ``sample_rate``.

    Args:
        options: those of `Voice`.
    """

    def __init__(self, **options: Any) -> None:
        self._voice = Voice(**options)

    def process(self, batch: Sequence[WorkItem]) -> Iterator[tuple[WorkItem, Reply]]:
        """Speak each item's text; every sentence is on its way before the next one is begun."""
        for item in batch:
            for words, audio in self._voice.speak(item.input.text or ""):
                yield item, Reply(data={"audio": audio, "sample_rate": self._voice.sample_rate, "words": [words]})
