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
    """The stages whose end, all together, is the end of the request: those whose outputs go to the user, and those
    that send them their data by connector, since only these can tell whether all of it was sent."""
    feeds: tuple[tuple[int, ...], ...] = attrs.field(init=False)
    """Per stage: the stages that it feeds through a bridge."""
    pieces_to: tuple[tuple[int, ...], ...] = attrs.field(init=False)
    """Per stage: those of `feeds` that want each of its outputs as it comes."""
    early_to: tuple[tuple[int, ...], ...] = attrs.field(init=False)
    """Per stage: those of `feeds` that start as soon as its KV cache can be had."""
    collects: tuple[bool, ...] = attrs.field(init=False)
    """Per stage: whether a bridge will look at what it made."""
    connects: tuple[tuple[int, ...], ...] = attrs.field(init=False)
    """Per stage: the stages that are submitted together with it, since their data comes by connector."""
    handoff: int | None = attrs.field(init=False)
    """The decode stage that takes over from the first stage, where that is a prefill stage."""
    watches: tuple[bool, ...] = attrs.field(init=False)
    """Per stage: whether somebody waits for a sign of life of it, because its data comes or goes by connector."""

    def __attrs_post_init__(self) -> None:
        pipeline = self.pipeline
        specs = pipeline.stages
        every = range(len(specs))
        stages = frozenset(every) if self.final_stage is None else frozenset(pipeline.path_to(self.final_stage))
        emits = tuple(index in stages and (pipeline.finals[index] or index == self.final_stage) for index in every)
        children = tuple(
            tuple(child for child in pipeline.children[index] if child in stages) if index in stages else ()
            for index in every
        )
        handoff = pipeline.pair[1] if pipeline.pair is not None and pipeline.pair[1] in stages else None
        connects = tuple(
            tuple(child for child in children[index] if specs[child].feed == "connector") for index in every
        )
        feeds = tuple(
            tuple(child for child in children[index] if specs[child].feed != "connector" and child != handoff)
            for index in every
        )
        collects = [bool(feeds[index]) for index in every]
        if handoff is not None and feeds[handoff]:
            collects[0] = True  # the bridges behind the decode stage may want what the prefill made
        senders = {index for index in every if connects[index]}
        for field, value in (
            ("stages", stages),
            ("emits", emits),
            ("needed", frozenset(index for index in every if emits[index]) | senders),
            ("feeds", feeds),
            ("pieces_to", _those(feeds, pipeline, "output")),
            ("early_to", _those(feeds, pipeline, "kv")),
            ("collects", tuple(collects)),
            ("connects", connects),
            ("handoff", handoff),
            (
                "watches",
                tuple(index in senders or (index in stages and specs[index].feed == "connector") for index in every),
            ),
        ):
            object.__setattr__(self, field, value)


def _those(feeds: tuple[tuple[int, ...], ...], pipeline: Pipeline, feed: str) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(child for child in children if pipeline.stages[child].feed == feed) for children in feeds)
