"""Which modes go together in one pipeline: ways of feeding, the prefill/decode pair, companions, sessions.

What each way of feeding asks of the two stages at its edge, and what passes over it:

=========  ==================  ===========================  ===================================================
feed       source              receiver                     input
=========  ==================  ===========================  ===================================================
finish     any                 any                          what the bridge makes, once
output     any                 worker, simulated            what the bridge makes, at each output
kv         llm, simulated      any but pooling              what the bridge makes, once, maybe before the end
connector  any but pooling     any but pooling              a placeholder; no bridge is asked
the pair   prefill, the first  decode, of kind and model    the prompt and the KV cache; no bridge is asked
           stage               of the prefill stage
=========  ==================  ===========================  ===================================================

Each edge has its own way, whatever those beside, before or after it have: a source may feed several stages in
several ways, two of them by ``kv``; connectors may form a chain, whose stages are all submitted at once; what a decode
stage feeds is fed as by any other stage. What a pipeline has as a whole asks more:

===========  ======  ==========================  ==========
             a pair  companions                  a session
===========  ======  ==========================  ==========
output       yes     not from the first stage    yes
kv           yes     yes                         no
connector    yes     not from the first stage    yes
a pair       one     no                          no
companions           one function                no
===========  ======  ==========================  ==========

A session is the caller's choice, so the reason against it is kept (`why_no_sessions`); all the rest is refused when
the pipeline is made, so that no request ever meets a combination that can not work. Each error gives the reason.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NoReturn

import attrs

from omni_trio.errors import ConfigError

if TYPE_CHECKING:
    from ._pipeline import Pipeline
    from ._stage import StageSpec

__all__ = ["check_modes", "why_no_sessions"]


def check_modes(pipeline: Pipeline) -> tuple[int, int] | None:
    """Check that the pipeline's modes go together.

    Returns:
        The ids of the prefill stage and of its decode stage, where there are such.

    Raises:
        ConfigError: they do not; it names the key and the reason.
    """
    _check_feeds(pipeline)
    pair = _pair_of(pipeline)
    _check_companions(pipeline, pair)
    return pair


def why_no_sessions(pipeline: Pipeline) -> str | None:
    """Return why the pipeline can not take streaming input, or None where it can."""
    if pipeline.pair is not None:
        return "a prefill/decode pair hands one KV cache over, once"
    if pipeline.expand is not None:
        return "companions are made of a whole prompt"
    for stage in pipeline.stages:
        if stage.feed == "kv":
            return f"stage {stage.name!r} starts once, when the KV cache of its source is ready"
        if stage.kind in ("pooling", "diffusion"):
            return f"stage {stage.name!r} is of kind {stage.kind!r}, which takes its input at once"
    return None


def _fail(stage: StageSpec, key: str, message: str) -> NoReturn:
    raise ConfigError(message, key=f"stages.{stage.name}.{key}")


def _check_feeds(pipeline: Pipeline) -> None:
    for stage, source_id in zip(pipeline.stages, pipeline.sources, strict=True):
        if source_id is None:
            continue
        source = pipeline.stages[source_id]
        if stage.feed == "kv" and source.kind not in ("llm", "simulated"):
            _fail(
                stage, "feed", f"its source {source.name!r} is of kind {source.kind!r}, which has no KV cache to offer"
            )
        if stage.feed == "connector" and source.kind == "pooling":
            _fail(stage, "feed", f"its source {source.name!r} is of kind 'pooling', which sends nothing by connector")


# The pair


def _pair_of(pipeline: Pipeline) -> tuple[int, int] | None:
    prefills = [index for index, stage in enumerate(pipeline.stages) if stage.role == "prefill"]
    decodes = [index for index, stage in enumerate(pipeline.stages) if stage.role == "decode"]
    for index in (*prefills[1:], *decodes[1:]):
        _fail(pipeline.stages[index], "role", "a pipeline has one prefill/decode pair at most")
    if not prefills and not decodes:
        return None
    if not decodes:
        _fail(pipeline.stages[prefills[0]], "role", "a prefill stage needs a stage with role = 'decode' that it feeds")
    if not prefills:
        _fail(pipeline.stages[decodes[0]], "role", "a decode stage needs a stage with role = 'prefill' as its source")
    prefill, decode = prefills[0], decodes[0]
    first, second = pipeline.stages[prefill], pipeline.stages[decode]
    if prefill != 0:
        _fail(first, "role", "only the first stage can prefill: its decode stage gets the user's own prompt")
    if pipeline.sources[decode] != prefill:
        _fail(second, "source", f"its source must be the prefill stage, {first.name!r}")
    for child in pipeline.children[prefill]:
        if child != decode:
            _fail(
                pipeline.stages[child],
                "source",
                f"a prefill stage feeds its decode stage only; take {second.name!r} as the source",
            )
    if pipeline.finals[prefill]:
        _fail(
            first, "final_output", "a prefill stage makes one token, which the decode stage makes again; leave it out"
        )
    _check_alike(first, second)
    if first.kind == "llm":
        _check_kv_config(first, second)
    return prefill, decode


_PAIR_REASONS: Mapping[str, str] = {
    "kind": "one takes over the other's KV cache",
    "model": "a model can not read another one's KV cache",
    "prompt_format": "both make tokens of the same prompt, and a KV cache fits its own tokens only",
    "system": "both make tokens of the same prompt, and a KV cache fits its own tokens only",
}
"""What must be the same in both halves of the pair, and why."""


def _check_alike(prefill: StageSpec, decode: StageSpec) -> None:
    for key, reason in _PAIR_REASONS.items():
        ours, theirs = getattr(decode, key), getattr(prefill, key)
        if ours != theirs:
            _fail_unlike(decode, key, ours, theirs, f": {reason}")


def _fail_unlike(decode: StageSpec, key: str, ours: Any, theirs: Any, reason: str = "") -> NoReturn:
    said = "the prefill stage has {}, this one {}".format(*("none" if v is None else repr(v) for v in (theirs, ours)))
    _fail(decode, key, f"{said}; both need the same{reason}")


def _check_kv_config(prefill: StageSpec, decode: StageSpec) -> None:
    key = "engine_args.kv_transfer_config"
    first, second = (
        _kv_config(stage, role, key) for stage, role in ((prefill, "kv_producer"), (decode, "kv_consumer"))
    )
    for name in ("kv_connector", "kv_buffer_device", "kv_buffer_size"):
        ours, theirs = _value(second, name), _value(first, name)
        # A buffer that is given on one side only is left to the connector, which has a default for the other.
        if ours != theirs and None not in (ours, theirs):
            _fail_unlike(decode, f"{key}.{name}", ours, theirs)
    ours, theirs = (stage.engine_args.get("tensor_parallel_size", 1) for stage in (decode, prefill))
    if ours != theirs:
        _fail_unlike(decode, "engine_args.tensor_parallel_size", ours, theirs)


def _kv_config(stage: StageSpec, role: str, key: str) -> Any:
    config = stage.engine_args.get("kv_transfer_config")
    if config is None:
        _fail(stage, key, f"a {stage.role} stage needs one, with a kv_connector and kv_role = '{role}' or 'kv_both'")
    if isinstance(config, str):
        _fail(stage, key, f"expected a table with a kv_connector and a kv_role, not the text {config!r}")
    if (found := _value(config, "kv_role")) not in (role, "kv_both"):
        given = "none is given" if found is None else f"not {found!r}"
        _fail(stage, f"{key}.kv_role", f"expected '{role}' or 'kv_both', {given}")
    if not _value(config, "kv_connector"):
        _fail(stage, f"{key}.kv_connector", "expected the name of a connector, such as 'NixlConnector'; none is given")
    return config


def _value(config: Any, name: str) -> Any:
    """Return a setting of a table, or of a ``KVTransferConfig``."""
    return config.get(name) if isinstance(config, Mapping) else getattr(config, name, None)


# Companions


def _check_companions(pipeline: Pipeline, pair: tuple[int, int] | None) -> None:
    timeout = pipeline.bundle_timeout
    if not timeout > 0:  # so written, it catches nan as well
        raise ConfigError(f"expected a number of seconds above 0, not {timeout!r}", key="bundle_timeout")
    if pipeline.expand is None:
        if timeout != attrs.fields(type(pipeline)).bundle_timeout.default:
            raise ConfigError("it bounds the waiting for companions, and there is no 'expand' that makes any; "
                              "leave it out", key="bundle_timeout")  # fmt: skip
        return
    first = pipeline.stages[0]
    if first.kind not in ("llm", "simulated"):
        raise ConfigError(
            f"companions run beside a request at an llm stage; the first stage is of kind {first.kind!r}", key="expand"
        )
    if pair is not None:
        raise ConfigError("companions and a prefill/decode pair do not go together: only a request's own KV cache is "
                          "handed over", key="expand")  # fmt: skip
    if not pipeline.children[0]:
        raise ConfigError("companions are for the stage that the first one feeds, and it feeds none", key="expand")
    for child in pipeline.children[0]:
        stage = pipeline.stages[child]
        if stage.feed in ("output", "connector"):
            _fail(stage, "feed", f"with companions it can not start before all of them have ended: {stage.feed!r} "
                                 "does not go together with 'expand'")  # fmt: skip
