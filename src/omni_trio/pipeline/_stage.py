"""What one stage is, and what makes its description valid by itself."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal, TypeAlias

import attrs

from omni_trio.bridges import Bridge, Placeholder
from omni_trio.errors import ConfigError
from omni_trio.messages import Modality

from ._kinds import ENGINE_KINDS, FEEDS, KINDS, MODALITIES, WORKER_KINDS, Feed, StageKind, nearest

__all__ = ["StageSpec", "check_stage"]


def _frozen_mapping(value: Mapping[str, Any] | None) -> Mapping[str, Any]:
    return MappingProxyType(dict(value or {}))


def _optional_tuple(value: Sequence[str] | None) -> tuple[str, ...]:
    return tuple(value or ())


_CHUNK_TIMEOUT = 120.0


@attrs.frozen(kw_only=True)
class StageSpec:
    """One logical step of a pipeline; its replicas are alike."""

    name: str
    """Unique in the pipeline: what errors, events and files call the stage."""
    kind: StageKind = "llm"
    model: str | None = None
    """llm, pooling: path or name of the model, as vLLM takes it."""
    target: str | None = None
    """worker, diffusion: ``package.module:name`` of an `omni_trio.worker.Worker` subclass or of a plain function; for
    diffusion, of an `omni_trio.worker.DiffusionWorker` subclass."""
    engine_args: Mapping[str, Any] = attrs.field(factory=dict, converter=_frozen_mapping)
    """llm, pooling: arguments of `vllm.EngineArgs`."""
    options: Mapping[str, Any] = attrs.field(factory=dict, converter=_frozen_mapping)
    """worker, diffusion: keyword arguments of the target; simulated: the script's settings."""
    replicas: int = 1
    devices: tuple[str, ...] = attrs.field(default=(), converter=_optional_tuple)
    """Device ids, such as ``("0", "1")``: replicas x d of them are dealt out in groups; exactly d of them,
    numbered from 0, are a template that replica r shifts by r x d. Empty: the engine's default."""
    devices_per_replica: int = 1
    sampling: Mapping[str, Any] = attrs.field(factory=dict, converter=_frozen_mapping)
    """Default parameters: sampling params (llm), pooling params (pooling), free-form (worker, diffusion)."""
    source: str | None = None
    """Name of the stage whose output feeds this one; None: the stage before it; the first stage has none."""
    bridge: Bridge | str | None = None
    """How the source's output becomes this stage's input: a name of a built-in (``tokens``, ``text``,
    ``original_prompt``, ``prompt_embeds``), ``package.module:function``, or the callable itself.
    None: ``tokens`` for llm and pooling stages, ``original_prompt`` for diffusion stages, ``output`` for the others.
    The decode stage of a prefill/decode pair gets the original prompt, and a stage with ``feed = "connector"`` a
    placeholder: they have no bridge."""
    feed: Feed = "finish"
    """When the stage gets its input from its source. ``finish``: once, when the source has ended. ``output``: in
    pieces, at each output of the source (worker, simulated). ``kv``: once, as soon as the source's KV cache can be had,
    or when it has ended. ``connector``: it is submitted together with its source, with a placeholder, and the data
    travels from engine to engine."""
    placeholder: Placeholder | str | None = None
    """``feed = "connector"``, llm and simulated: ``package.module:function``, or the callable itself, which is given
    the user's prompt (a `StageInput`) and returns the length of the placeholder prompt, in tokens. None: as many as the
    prompt has, where it is given in token ids. Worker and diffusion stages get the user's prompt itself."""
    chunk_timeout: float = _CHUNK_TIMEOUT
    """``feed = "connector"``: seconds without a sign of life of the stage or its source, for one request, after which
    the request fails with `DeadlineExceeded`. The one place where waiting for a chunk is bounded."""
    role: Literal["prefill", "decode"] | None = None
    """llm: which half of a prefill/decode pair the stage is. The ``prefill`` stage is the first of the pipeline and the
    source of the ``decode`` stage, and feeds no other."""
    handoff: Literal["params", "content"] = "params"
    """decode: ``params``: the prefill ends with ``kv_transfer_params``, without which decoding is impossible;
    ``content``: the connector finds the KV cache by the prompt's content."""
    dispatch_timeout: float = 0.0
    """Seconds that a request waits where no replica of the stage is ready, before it fails with
    `NoReplicaAvailable`. 0: it fails at once."""
    when_empty: Literal["fail", "skip"] = "fail"
    """prefill: what happens to a request where no replica is ready after `dispatch_timeout`: ``skip`` has the decode
    stage do the prefill itself."""
    final_output: bool | None = None
    """Whether the stage's outputs go to the user. None: True for a stage that feeds no other."""
    modality: Modality | None = None
    """What the stage's output is. None: text (llm), embedding (pooling), data (worker), image (diffusion), text
    (simulated)."""
    requires_multimodal_data: bool = False
    """Whether built-in bridges pass on the original prompt's `StageInput.data`."""
    prompt_format: Literal["raw", "chat"] = "raw"
    """llm: ``chat`` puts a prompt in words through the model's chat template."""
    system: str | None = None
    """llm with ``prompt_format = "chat"``: the system message."""
    env: Mapping[str, str] = attrs.field(factory=dict, converter=_frozen_mapping)
    """Environment variables of the replica's process."""
    path: tuple[str, ...] = attrs.field(default=(), converter=_optional_tuple)
    """worker, diffusion: folders put in front of ``sys.path`` in the worker process, so that `target` can be a module
    in one of them. `load_pipeline` puts the pipeline file's own folder here unless the file says otherwise."""
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


def check_stage(stage: StageSpec, index: int) -> None:
    """Check one stage by itself.

    Raises:
        ConfigError: it names the key.
    """
    for check in (_check_words, _check_numbers, _check_kind, _check_prompt, _check_feed, _check_devices):
        for key, message in check(stage, index):
            raise ConfigError(message, key=f"stages.{stage.name or index}.{key}")


_Complaints: TypeAlias = Iterator[tuple[str, str]]
"""Keys, and what is wrong with their values."""


def _check_words(stage: StageSpec, index: int) -> _Complaints:
    del index
    parts = [part for part in stage.name.replace("-", "_").split("_") if part]
    if not parts or not all(part.isalnum() for part in parts):
        yield "name", f"{stage.name!r} is not a name: use letters, digits, '-' and '_'"
    for key, words in _WORDS.items():
        value = getattr(stage, key)
        if value is not None and value not in words:
            yield key, f"no such {key} {value!r}{nearest(str(value), words)} ({_plural(key)}: {', '.join(words)})"


_WORDS: Mapping[str, tuple[str, ...]] = {
    "kind": KINDS,
    "modality": MODALITIES,
    "feed": FEEDS,
    "role": ("prefill", "decode"),
    "handoff": ("params", "content"),
    "when_empty": ("fail", "skip"),
    "prompt_format": ("raw", "chat"),
}


def _plural(key: str) -> str:
    return {"modality": "modalities", "kind": "kinds"}.get(key, "expected one of")


def _check_kind(stage: StageSpec, index: int) -> _Complaints:
    del index
    kind = stage.kind
    if kind in ENGINE_KINDS:
        if not stage.model:
            yield "model", f"a stage of kind {kind!r} needs a model: a path, or a name that vLLM knows"
        if stage.target is not None:
            yield "target", "only worker and diffusion stages have a target; name the model with 'model'"
        if stage.options:
            yield "options", f"a stage of kind {kind!r} takes 'engine_args', not 'options'"
    else:
        if stage.model is not None:
            yield "model", f"only llm and pooling stages have a model; a {kind} stage takes 'options'"
        if stage.system is not None:
            yield "system", f"only llm stages have a system message; a {kind} stage takes 'options'"
        if stage.engine_args:
            yield "engine_args", f"only llm and pooling stages have engine_args; a {kind} stage takes 'options'"
    if kind in WORKER_KINDS:
        if not stage.target:
            yield "target", f"a {kind} stage needs a target, such as 'package.module:Vocoder'"
        elif stage.target.count(":") != 1 or not all(stage.target.split(":")):
            yield "target", f"{stage.target!r} is not of the form 'package.module:name'"
    elif stage.target is not None:
        yield "target", "only worker and diffusion stages have a target; a simulated stage takes 'options'"
    if stage.path and kind not in WORKER_KINDS:
        yield "path", "only worker and diffusion stages import their target from a path"
    if stage.role is not None and kind not in ("llm", "simulated"):
        yield "role", f"only llm stages prefill or decode; this one is of kind {kind!r}"


def _check_prompt(stage: StageSpec, index: int) -> _Complaints:
    del index
    if stage.prompt_format == "chat" and stage.kind != "llm":
        yield "prompt_format", "only llm stages have a chat template"
    if stage.system is not None and stage.prompt_format != "chat":
        yield "system", "a system message needs prompt_format = 'chat'"


def _check_feed(stage: StageSpec, index: int) -> _Complaints:
    if stage.feed != "finish" and index == 0:
        yield "feed", "the first stage is fed by the user's prompt, at once; leave it out"
    if stage.feed == "output" and stage.kind not in ("worker", "simulated"):
        yield "feed", f"only worker and simulated stages take their input in pieces, not those of kind {stage.kind!r}"
    if stage.feed in ("kv", "connector") and stage.kind == "pooling":
        yield "feed", "a pooling stage needs all of its input at once; leave it out"
    if stage.feed == "connector":
        if stage.bridge is not None:
            yield "bridge", "with feed = 'connector' data goes from engine to engine; no bridge is asked, leave it out"
        if stage.placeholder is not None and stage.kind in WORKER_KINDS:
            yield "placeholder", f"a {stage.kind} stage gets the user's prompt itself; leave it out"
    else:
        if stage.placeholder is not None:
            yield "placeholder", "only a stage with feed = 'connector' is submitted with a placeholder"
        if stage.chunk_timeout != _CHUNK_TIMEOUT:
            yield "chunk_timeout", "only a stage with feed = 'connector' waits for chunks; leave it out"
    if stage.role == "decode":
        if stage.feed != "finish":
            yield "feed", "a decode stage starts when its prefill stage has ended; leave it out"
        if stage.bridge is not None:
            yield "bridge", "a decode stage gets the original prompt and the KV cache; no bridge is asked, leave it out"
    elif stage.handoff != "params":
        yield "handoff", "only a stage with role = 'decode' takes over a KV cache this way"
    if stage.when_empty == "skip" and stage.role != "prefill":
        yield "when_empty", "only a prefill stage can be skipped: its decode stage can do the work"


def _check_numbers(stage: StageSpec, index: int) -> _Complaints:
    del index
    for key in ("replicas", "devices_per_replica"):
        if getattr(stage, key) < 1:
            yield key, f"expected at least 1, not {getattr(stage, key)}"
    for key in ("start_timeout", "probe_interval", "probe_timeout", "chunk_timeout"):
        value = getattr(stage, key)
        if not value > 0:  # so written, it catches nan as well
            yield key, f"expected a number of seconds above 0, not {value!r}"
    if not stage.dispatch_timeout >= 0:
        yield "dispatch_timeout", f"expected a number of seconds from 0 up, not {stage.dispatch_timeout!r}"


def _check_devices(stage: StageSpec, index: int) -> _Complaints:
    del index
    counts = (stage.devices_per_replica, stage.replicas * stage.devices_per_replica)
    if stage.devices and len(stage.devices) not in counts:
        needs = f"{stage.replicas} replicas with {stage.devices_per_replica} devices each need {counts[1]} devices"
        yield "devices", f"{needs}, or {counts[0]} as a template; {len(stage.devices)} are given"
    if stage.devices and len(stage.devices) != counts[1] and not all(d.isdecimal() for d in stage.devices):
        yield "devices", "a device template must be numbers, counted from 0"
