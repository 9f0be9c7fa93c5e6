"""What a pipeline is: stages, how each feeds the next, and what follows from that."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import attrs

from omni_trio.bridges import (
    Bridge,
    BridgeSpec,
    Expand,
    ExpandSpec,
    Placeholder,
    resolve_bridge,
    resolve_expand,
    resolve_placeholder,
)
from omni_trio.errors import ConfigError
from omni_trio.messages import Modality

from ._kinds import StageKind, nearest
from ._modes import check_modes, why_no_sessions
from ._stage import StageSpec, check_stage

__all__ = ["Pipeline"]


def _stage_tuple(stages: Iterable[StageSpec]) -> tuple[StageSpec, ...]:
    return tuple(stages)


@attrs.frozen
class Pipeline:
    """Stages in order, each fed by an earlier one. Validated when made.

    The stages form a tree: the first has no source, every other names one earlier stage (by default the one
    before it), and several stages may share a source.

    Raises:
        ConfigError: where the stages do not fit together; it names the stage and the key.
    """

    stages: tuple[StageSpec, ...] = attrs.field(converter=_stage_tuple)
    name: str = "pipeline"
    expand: Expand | str | None = None
    """Makes the companions of a request: ``package.module:function``, or the callable itself (see
    `omni_trio.bridges.Expand`). They run at the first stage, on the replica of the request itself; what the first
    stage feeds starts once all of them have ended, and finds their outputs in `BridgeContext.companions`."""
    bundle_timeout: float = 60.0
    """With `expand`: seconds that a request whose first stage is ready to feed the next waits for its companions."""
    sources: tuple[int | None, ...] = attrs.field(init=False, repr=False, eq=False)
    """Per stage: the id of the stage that feeds it."""
    children: tuple[tuple[int, ...], ...] = attrs.field(init=False, repr=False, eq=False)
    """Per stage: the ids of the stages it feeds."""
    bridges: tuple[BridgeSpec | None, ...] = attrs.field(init=False, repr=False, eq=False)
    """Per stage: the bridge in front of it; None for the first. A decode stage and one with ``feed = "connector"`` have
    ``original_prompt`` here, but no bridge is asked for them."""
    finals: tuple[bool, ...] = attrs.field(init=False, repr=False, eq=False)
    """Per stage: whether its outputs go to the user."""
    modalities: tuple[Modality, ...] = attrs.field(init=False, repr=False, eq=False)
    """Per stage: what its output is."""
    reads_text: tuple[bool, ...] = attrs.field(init=False, repr=False, eq=False)
    """Per stage: whether its text goes to a user or a bridge, so that it has to be detokenized."""
    pair: tuple[int, int] | None = attrs.field(init=False, repr=False, eq=False)
    """The ids of the prefill stage and of its decode stage, where there are such."""
    expander: ExpandSpec | None = attrs.field(init=False, repr=False, eq=False)
    """What `expand` stands for."""
    placeholders: tuple[Placeholder | None, ...] = attrs.field(init=False, repr=False, eq=False)
    """Per stage: what its `StageSpec.placeholder` stands for."""
    no_sessions: str | None = attrs.field(init=False, repr=False, eq=False)
    """Why the pipeline can not take streaming input; None: it can."""

    def __attrs_post_init__(self) -> None:
        if not self.stages:
            raise ConfigError("a pipeline needs at least one stage", key="stages")
        for index, stage in enumerate(self.stages):
            check_stage(stage, index)
        names = [stage.name for stage in self.stages]
        for name in names:
            if names.count(name) > 1:
                raise ConfigError(f"two stages are called {name!r}; names must be unique", key=f"stages.{name}.name")
        sources = tuple(_source_of(self.stages, index) for index in range(len(self.stages)))
        children = tuple(
            tuple(child for child, source in enumerate(sources) if source == index) for index in range(len(names))
        )
        finals = tuple(
            (not children[index]) if stage.final_output is None else stage.final_output
            for index, stage in enumerate(self.stages)
        )
        for index, stage in enumerate(self.stages):
            if not children[index] and not finals[index]:
                raise ConfigError(
                    "the stage feeds no other and its output goes to nobody; set final_output = true or remove it",
                    key=f"stages.{stage.name}.final_output",
                )
        bridges = tuple(
            None if source is None else resolve_bridge(_bridge_of(stage), key=f"stages.{stage.name}.bridge")
            for stage, source in zip(self.stages, sources, strict=True)
        )
        modalities = tuple(_modality_of(stage) for stage in self.stages)
        reads_text = tuple(
            (finals[index] and modalities[index] == "text") or any(_reads_text(bridges[c]) for c in children[index])
            for index in range(len(names))
        )
        expander = None if self.expand is None else resolve_expand(self.expand, key="expand")
        for field, value in (
            ("sources", sources),
            ("children", children),
            ("bridges", bridges),
            ("finals", finals),
            ("modalities", modalities),
            ("reads_text", reads_text),
            ("expander", expander),
            ("placeholders", tuple(_placeholder_of(stage) for stage in self.stages)),
        ):
            object.__setattr__(self, field, value)
        object.__setattr__(self, "pair", check_modes(self))
        object.__setattr__(self, "no_sessions", why_no_sessions(self))

    def stage_id(self, name: str) -> int:
        """Return the index of a stage.

        Raises:
            KeyError: no stage is called `name`; the message lists those that exist.
        """
        for index, stage in enumerate(self.stages):
            if stage.name == name:
                return index
        known = [stage.name for stage in self.stages]
        raise KeyError(f"no stage is called {name!r}{nearest(name, known)} (stages: {', '.join(known)})")

    def path_to(self, stage_id: int) -> tuple[int, ...]:
        """Return the ids of the stages from the first one to `stage_id`, both included."""
        path = [stage_id]
        while (source := self.sources[path[-1]]) is not None:
            path.append(source)
        return tuple(reversed(path))


def _reads_text(bridge: BridgeSpec | None) -> bool:
    return bridge is not None and "text" in bridge.reads


def _bridge_of(stage: StageSpec) -> Bridge | str:
    if stage.bridge is not None:
        return stage.bridge
    # Where no bridge is asked, the prompt stands for one: nobody is to take the source's text for wanted.
    if stage.role == "decode" or stage.feed == "connector" or stage.kind == "diffusion":
        return "original_prompt"
    return "tokens" if stage.kind in ("llm", "pooling") else "output"


def _placeholder_of(stage: StageSpec) -> Placeholder | None:
    if stage.placeholder is None:
        return None
    return resolve_placeholder(stage.placeholder, key=f"stages.{stage.name}.placeholder")


def _modality_of(stage: StageSpec) -> Modality:
    if stage.modality is not None:
        return stage.modality
    defaults: dict[StageKind, Modality] = {
        "llm": "text",
        "pooling": "embedding",
        "worker": "data",
        "diffusion": "image",
        "simulated": "text",
    }
    return defaults[stage.kind]


def _source_of(stages: Sequence[StageSpec], index: int) -> int | None:
    stage = stages[index]
    key = f"stages.{stage.name}.source"
    if index == 0:
        if stage.source is not None:
            raise ConfigError("the first stage is fed by the user's prompt and can have no source", key=key)
        if stage.bridge is not None:
            raise ConfigError(
                "the first stage is fed by the user's prompt and can have no bridge", key=f"stages.{stage.name}.bridge"
            )
        return None
    if stage.source is None:
        return index - 1
    earlier = [other.name for other in stages[:index]]
    if stage.source not in earlier:
        raise ConfigError(
            f"no earlier stage is called {stage.source!r}{nearest(stage.source, earlier)} "
            f"(earlier stages: {', '.join(earlier)})",
            key=key,
        )
    return earlier.index(stage.source)
