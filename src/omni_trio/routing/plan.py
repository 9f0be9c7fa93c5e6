"""Which stages a request passes and what follows from an output at each: worked out once per final stage."""

from __future__ import annotations

import attrs

from omni_trio.pipeline import Pipeline

__all__ = ["RoutePlan"]


@attrs.frozen
class RoutePlan:
    """The part of a pipeline that one kind of request uses. Shared by all requests of that kind."""

    pipeline: Pipeline
    final_stage: int | None
    """The stage at which the request ends; None: it passes the whole pipeline."""
    stages: frozenset[int] = attrs.field(init=False)
    """The ids of the stages that the request passes."""
    emits: tuple[bool, ...] = attrs.field(init=False)
    """Per stage: whether its outputs go to the user. The final stage's always do."""
    needed: frozenset[int] = attrs.field(init=False)
    """The stages whose end, all together, is the end of the request."""
    streams_to: tuple[tuple[int, ...], ...] = attrs.field(init=False)
    """Per stage: the stages that want each of its outputs as it comes."""
    feeds: tuple[tuple[int, ...], ...] = attrs.field(init=False)
    """Per stage: all stages that it feeds."""

    def __attrs_post_init__(self) -> None:
        pipeline = self.pipeline
        every = range(len(pipeline.stages))
        stages = frozenset(every) if self.final_stage is None else frozenset(pipeline.path_to(self.final_stage))
        emits = tuple(index in stages and (pipeline.finals[index] or index == self.final_stage) for index in every)
        feeds = tuple(
            tuple(child for child in pipeline.children[index] if child in stages) if index in stages else ()
            for index in every
        )
        streams_to = tuple(tuple(child for child in feeds[index] if pipeline.stages[child].stream) for index in every)
        for field, value in (
            ("stages", stages),
            ("emits", emits),
            ("needed", frozenset(index for index in every if emits[index])),
            ("feeds", feeds),
            ("streams_to", streams_to),
        ):
            object.__setattr__(self, field, value)
