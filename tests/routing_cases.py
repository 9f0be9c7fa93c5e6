"""Pipelines and requests for tests of the pure core: any that are legal, by any means of choosing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import attrs

from omni_trio.pipeline import Pipeline
from support import stage

__all__ = ["FEEDS", "Case", "Choose", "any_case", "no_companions"]

T = TypeVar("T")
Choose = Callable[[Sequence[T]], T]
"""Picks one of several."""

FEEDS = ("finish", "output", "kv", "connector")


def no_companions(context):
    """Only says that there may be some: the flow is told who they are."""
    return ()


def _words(pipeline: Pipeline) -> str:
    return "; ".join(
        f"{one.name}"
        + (f" <- {pipeline.stages[source].name} by {one.feed}" if source is not None else "")
        + (f", {one.role} ({one.handoff})" if one.role else "")
        + (", final" if final else "")
        for one, source, final in zip(pipeline.stages, pipeline.sources, pipeline.finals, strict=True)
    )


@attrs.frozen
class Case:
    """One request at one pipeline."""

    pipeline: Pipeline = attrs.field(repr=_words)
    final_stage: int | None = None
    roles: tuple[str, ...] = ()
    session: bool = False
    threads: frozenset[int] = frozenset()
    """The stages behind bridges that take time."""


def any_case(choose: Choose[Any]) -> Case:
    """Choose a pipeline of up to five stages in any modes that go together, and a request that it can take."""
    count = choose((1, 2, 3, 3, 4, 5))
    mode = choose(("plain", "session", "session", "companions", "pair") if count > 1 else ("plain", "session"))
    sources: list[int | None] = [None]
    feeds = ["finish"]
    for index in range(1, count):
        source = choose(range(1 if mode == "pair" and index > 1 else 0, index))
        allowed: tuple[str, ...] = FEEDS
        if mode == "session":
            allowed = ("finish", "output", "connector")
        elif mode == "companions" and source == 0:
            allowed = ("finish", "kv")
        elif mode == "pair" and index == 1:
            allowed = ("finish",)
        sources.append(source)
        feeds.append(choose(allowed))
    pair = {0: "prefill", 1: "decode"} if mode == "pair" else {}
    handoff = choose(("params", "content"))
    pipeline = Pipeline(
        [
            stage(
                f"s{index}",
                source=None if source is None else f"s{source}",
                feed=feeds[index],
                role=pair.get(index),
                final_output=index not in sources or (pair.get(index) != "prefill" and choose((True, False))),
                **({"handoff": handoff} if pair.get(index) == "decode" else {}),
            )
            for index, source in enumerate(sources)
        ],
        expand=no_companions if mode == "companions" else None,
    )
    final_stage = choose((None, None, None, None, *range(count)))
    companions = choose((0, 1, 2, 3)) if mode == "companions" and final_stage != 0 else 0
    return Case(
        pipeline,
        final_stage,
        roles=tuple(f"c{index}" for index in range(companions)),
        session=mode == "session",
        threads=frozenset(index for index in range(1, count) if choose((False, False, True))),
    )
