"""What a pipeline is: stages, how each feeds the next, defaults, and what makes it valid."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal, TypeAlias, get_args

import attrs

from .bridges import Bridge, BridgeSpec, resolve_bridge
from .errors import ConfigError
from .messages import Modality

__all__ = ["Pipeline", "StageKind", "StageSpec", "nearest"]

StageKind: TypeAlias = Literal["llm", "pooling", "worker", "simulated"]
"""``llm``: a vLLM engine that generates; ``pooling``: a vLLM engine that embeds, classifies or scores;
``worker``: a torch module or any callable in a process of its own; ``simulated``: a script on the clock."""

KINDS: tuple[str, ...] = get_args(StageKind)
MODALITIES: tuple[str, ...] = get_args(Modality)


def nearest(word: str, choices: Iterable[str]) -> str:
    """Return ``; did you mean 'x'?`` for the nearest of `choices`, or nothing where none is near."""
    match = difflib.get_close_matches(word, list(choices), n=1)
    return f"; did you mean {match[0]!r}?" if match else ""


def _frozen_mapping(value: Mapping[str, Any] | None) -> Mapping[str, Any]:
    return MappingProxyType(dict(value or {}))


def _optional_tuple(value: Sequence[str] | None) -> tuple[str, ...]:
    return tuple(value or ())


def _stage_tuple(stages: Iterable[StageSpec]) -> tuple[StageSpec, ...]:
    return tuple(stages)


@attrs.frozen(kw_only=True)
class StageSpec:
    """One logical step of a pipeline; its replicas are alike."""

    name: str
    """Unique in the pipeline: what errors, events and files call the stage."""
    kind: StageKind = "llm"
    model: str | None = None
    """llm, pooling: path or name of the model, as vLLM takes it."""
    target: str | None = None
    """worker: ``package.module:name`` of an `omni_trio.worker.Worker` subclass or of a plain function."""
    engine_args: Mapping[str, Any] = attrs.field(factory=dict, converter=_frozen_mapping)
    """llm, pooling: arguments of `vllm.EngineArgs`."""
    options: Mapping[str, Any] = attrs.field(factory=dict, converter=_frozen_mapping)
    """worker: keyword arguments of the target; simulated: the script's settings."""
    replicas: int = 1
    devices: tuple[str, ...] = attrs.field(default=(), converter=_optional_tuple)
    """Device ids, such as ``("0", "1")``: replicas x d of them are dealt out in groups; exactly d of them,
    numbered from 0, are a template that replica r shifts by r x d. Empty: the engine's default."""
    devices_per_replica: int = 1
    sampling: Mapping[str, Any] = attrs.field(factory=dict, converter=_frozen_mapping)
    """Default parameters: sampling params (llm), pooling params (pooling), free-form (worker)."""
    source: str | None = None
    """Name of the stage whose output feeds this one; None: the stage before it; the first stage has none."""
    bridge: Bridge | str | None = None
    """How the source's output becomes this stage's input: a name of a built-in (``tokens``, ``text``,
    ``original_prompt``, ``prompt_embeds``), ``package.module:function``, or the callable itself.
    None: ``tokens`` for llm and pooling stages, ``output`` for the others."""
    stream: bool = False
    """True: the bridge is called at every output of the source, not only at its last one, and what it returns
    is sent on at once. For receiving stages that take input in pieces (worker, simulated)."""
    final_output: bool | None = None
    """Whether the stage's outputs go to the user. None: True for a stage that feeds no other."""
    modality: Modality | None = None
    """What the stage's output is. None: text (llm), embedding (pooling), data (worker), text (simulated)."""
    requires_multimodal_data: bool = False
    """Whether built-in bridges pass on the original prompt's `StageInput.data`."""
    prompt_format: Literal["raw", "chat"] = "raw"
    """llm: ``chat`` puts a prompt in words through the model's chat template."""
    system: str | None = None
    """llm with ``prompt_format = "chat"``: the system message."""
    env: Mapping[str, str] = attrs.field(factory=dict, converter=_frozen_mapping)
    """Environment variables of the replica's process."""
    path: tuple[str, ...] = attrs.field(default=(), converter=_optional_tuple)
    """worker: folders put in front of ``sys.path`` in the worker process, so that `target` can be a module in one
    of them. `load_pipeline` puts the pipeline file's own folder here unless the file says otherwise."""
    start_timeout: float = 300.0
    """Seconds a replica may take to come up."""
    probe_interval: float = 5.0
    """Seconds without a sign of life, while work is there, after which the replica is asked for one."""
    probe_timeout: float = 30.0
    """Seconds it may take to answer before it counts as dead."""

    def device_group(self, replica_id: int) -> tuple[str, ...]:
        """Return the devices of one replica (see `devices`)."""
        size = self.devices_per_replica
        if not self.devices:
            return ()
        if len(self.devices) == self.replicas * size:
            return self.devices[replica_id * size : (replica_id + 1) * size]
        return tuple(str(replica_id * size + int(offset)) for offset in self.devices)


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
    sources: tuple[int | None, ...] = attrs.field(init=False, repr=False, eq=False)
    """Per stage: the id of the stage that feeds it."""
    children: tuple[tuple[int, ...], ...] = attrs.field(init=False, repr=False, eq=False)
    """Per stage: the ids of the stages it feeds."""
    bridges: tuple[BridgeSpec | None, ...] = attrs.field(init=False, repr=False, eq=False)
    """Per stage: the bridge in front of it; None for the first."""
    finals: tuple[bool, ...] = attrs.field(init=False, repr=False, eq=False)
    """Per stage: whether its outputs go to the user."""
    modalities: tuple[Modality, ...] = attrs.field(init=False, repr=False, eq=False)
    reads_text: tuple[bool, ...] = attrs.field(init=False, repr=False, eq=False)
    """Per stage: whether its text goes to a user or a bridge, so that it has to be detokenized."""

    def __attrs_post_init__(self) -> None:
        if not self.stages:
            raise ConfigError("a pipeline needs at least one stage", key="stages")
        for index, stage in enumerate(self.stages):
            _check_stage(stage, index)
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
        for field, value in (
            ("sources", sources),
            ("children", children),
            ("bridges", bridges),
            ("finals", finals),
            ("modalities", modalities),
            ("reads_text", reads_text),
        ):
            object.__setattr__(self, field, value)

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
    return "tokens" if stage.kind in ("llm", "pooling") else "output"


def _modality_of(stage: StageSpec) -> Modality:
    if stage.modality is not None:
        return stage.modality
    defaults: dict[StageKind, Modality] = {
        "llm": "text",
        "pooling": "embedding",
        "worker": "data",
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


def _check_stage(stage: StageSpec, index: int) -> None:
    def fail(key: str, message: str) -> None:
        raise ConfigError(message, key=f"stages.{stage.name or index}.{key}")

    parts = [part for part in stage.name.replace("-", "_").split("_") if part]
    if not parts or not all(part.isalnum() for part in parts):
        fail("name", f"{stage.name!r} is not a name: use letters, digits, '-' and '_'")
    if stage.kind not in KINDS:
        fail("kind", f"no such kind {stage.kind!r}{nearest(str(stage.kind), KINDS)} (kinds: {', '.join(KINDS)})")
    if stage.modality is not None and stage.modality not in MODALITIES:
        fail(
            "modality",
            f"no such modality {stage.modality!r}{nearest(str(stage.modality), MODALITIES)} "
            f"(modalities: {', '.join(MODALITIES)})",
        )
    if stage.kind in ("llm", "pooling"):
        if not stage.model:
            fail("model", f"a stage of kind {stage.kind!r} needs a model: a path, or a name that vLLM knows")
        if stage.target is not None:
            fail("target", "only worker stages have a target; name the model with 'model'")
        if stage.stream:
            fail("stream", "only worker and simulated stages take their input in pieces")
    if stage.kind == "worker":
        if not stage.target:
            fail("target", "a worker stage needs a target, such as 'package.module:Vocoder'")
        elif stage.target.count(":") != 1 or not all(stage.target.split(":")):
            fail("target", f"{stage.target!r} is not of the form 'package.module:name'")
    elif stage.target is not None and stage.kind == "simulated":
        fail("target", "only worker stages have a target; a simulated stage takes 'options'")
    if stage.path and stage.kind != "worker":
        fail("path", "only worker stages import their target from a path")
    if stage.kind in ("worker", "simulated"):
        for key in ("model", "system"):
            if getattr(stage, key) is not None:
                fail(key, f"only llm and pooling stages have a {key}; a {stage.kind} stage takes 'options'")
        if stage.engine_args:
            fail("engine_args", f"only llm and pooling stages have engine_args; a {stage.kind} stage takes 'options'")
    if stage.kind in ("llm", "pooling") and stage.options:
        fail("options", f"a stage of kind {stage.kind!r} takes 'engine_args', not 'options'")
    if stage.prompt_format not in ("raw", "chat"):
        fail("prompt_format", f"expected 'raw' or 'chat', not {stage.prompt_format!r}")
    if stage.prompt_format == "chat" and stage.kind != "llm":
        fail("prompt_format", "only llm stages have a chat template")
    if stage.system is not None and stage.prompt_format != "chat":
        fail("system", "a system message needs prompt_format = 'chat'")
    if stage.replicas < 1:
        fail("replicas", f"expected at least 1, not {stage.replicas}")
    if stage.devices_per_replica < 1:
        fail("devices_per_replica", f"expected at least 1, not {stage.devices_per_replica}")
    if stage.stream and index == 0:
        fail("stream", "the first stage is fed by the user's prompt; it has no edge to stream over")
    counts = (stage.devices_per_replica, stage.replicas * stage.devices_per_replica)
    if stage.devices and len(stage.devices) not in counts:
        fail(
            "devices",
            f"{stage.replicas} replicas with {stage.devices_per_replica} devices each need {counts[1]} devices, "
            f"or {counts[0]} as a template; {len(stage.devices)} are given",
        )
    if stage.devices and len(stage.devices) != counts[1] and not all(d.isdecimal() for d in stage.devices):
        fail("devices", "a device template must be numbers, counted from 0")
    for key in ("start_timeout", "probe_interval", "probe_timeout"):
        value = getattr(stage, key)
        if not value > 0 or math.isnan(value):
            fail(key, f"expected a number of seconds above 0, not {value!r}")
