"""What is dumped loads as the same pipeline, in both formats; and every key is found on its line."""

from __future__ import annotations

import json
import math
import string
import tempfile
from pathlib import Path

import attrs
import yaml
from hypothesis import given
from hypothesis import strategies as st

from omni_trio.bridges import BUILTIN
from omni_trio.config import dump_pipeline, load_pipeline
from omni_trio.config._lines import TomlLines
from omni_trio.errors import ConfigError
from omni_trio.pipeline import ENGINE_KINDS, MODALITIES, WORKER_KINDS, Pipeline, StageSpec

NAMES = st.text(string.ascii_letters + string.digits + "-_", min_size=1, max_size=8).filter(lambda n: n.strip("-_"))
# TOML has no surrogates and, like YAML, no control characters outside of escapes; JSON's escapes serve both.
TEXTS = st.text(st.characters(exclude_categories=("Cs",)), max_size=12) | st.sampled_from(
    ["${HOME}", "$${HOME}", "${", "$", "}", "no", "1", "~", "# x", "[[stages]]", '"""', "'''", "\\", "a\nb", "\x85"]
)
SCALARS = TEXTS | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False)


def tables(values):
    return st.dictionaries(TEXTS, values, max_size=3)


VALUES = st.recursive(SCALARS, lambda inner: st.lists(inner, max_size=3) | tables(inner), max_leaves=6)
SECONDS = st.floats(min_value=0, exclude_min=True) | st.integers(1, 1000).map(float)


WAITS = SECONDS | st.just(0.0)

KINDS = ("llm", "pooling", "worker", "diffusion", "simulated")
FEEDS = {
    "llm": ("finish", "kv", "connector"),
    "pooling": ("finish",),
    "worker": ("finish", "output", "kv", "connector"),
    "diffusion": ("finish", "kv", "connector"),
    "simulated": ("finish", "output", "kv", "connector"),
}
"""By kind of the receiver."""
REFUSED_BY = {
    "llm": (),
    "pooling": ("kv", "connector"),
    "worker": ("kv",),
    "diffusion": ("kv",),
    "simulated": (),
}
"""Of these, by kind of the source: what it can not do."""


@st.composite
def fed(draw, kind: str, source: StageSpec, *, companions: bool) -> dict:
    """How a stage is fed by a source that is not a prefill stage."""
    refused = (*REFUSED_BY[source.kind], *(("output", "connector") if companions else ()))
    feed = draw(st.sampled_from([feed for feed in FEEDS[kind] if feed not in refused]))
    if feed != "connector":
        return {"feed": feed, "bridge": draw(st.none() | st.sampled_from((*BUILTIN, "json:dumps")))}
    placeholder = draw(st.none() | st.sampled_from(("math:ceil", math.floor))) if kind in ("llm", "simulated") else None
    return {"feed": feed, "placeholder": placeholder, "chunk_timeout": draw(SECONDS)}


@st.composite
def stages(draw, name: str, kind: str, like: StageSpec | None = None, **fields) -> StageSpec:
    """A stage by itself; `like` is the prefill stage for which it is to decode."""
    engine = kind in ENGINE_KINDS
    chat = kind == "llm" and draw(st.booleans())
    replicas, per_replica = draw(st.tuples(st.integers(1, 3), st.integers(1, 2)))
    count = draw(st.sampled_from((0, per_replica, replicas * per_replica)))
    settings = draw(tables(VALUES))
    if engine and fields.get("role"):
        settings["kv_transfer_config"] = {"kv_connector": "NixlConnector", "kv_role": "kv_both", **draw(tables(VALUES))}
    alike = {
        # Begins with what no folder here has, so that it is never taken for a path.
        "model": "hub:" + draw(TEXTS) if engine else None,
        "prompt_format": "chat" if chat else "raw",
        "system": draw(st.none() | TEXTS) if chat else None,
    }
    if like is not None:
        alike = {key: getattr(like, key) for key in alike}
    return StageSpec(
        name=name,
        kind=kind,
        target="json:dumps" if kind in WORKER_KINDS else None,
        engine_args=settings if engine else {},
        options={} if engine else settings,
        replicas=replicas,
        devices=[str(number) for number in range(count)],
        devices_per_replica=per_replica,
        sampling=draw(tables(VALUES)),
        dispatch_timeout=draw(WAITS),
        modality=draw(st.none() | st.sampled_from(MODALITIES)),
        requires_multimodal_data=draw(st.booleans()),
        env=draw(tables(TEXTS)),
        path=draw(st.lists(NAMES.map("/{}".format), max_size=2)) if kind in WORKER_KINDS else (),
        start_timeout=draw(SECONDS),
        probe_interval=draw(SECONDS),
        probe_timeout=draw(SECONDS),
        **alike,
        **fields,
    )


@st.composite
def pairs(draw, names: list[str]) -> list[StageSpec]:
    kind = draw(st.sampled_from(("llm", "simulated")))
    when_empty, handoff = draw(st.sampled_from(("fail", "skip"))), draw(st.sampled_from(("params", "content")))
    prefill = draw(stages(names[0], kind, role="prefill", when_empty=when_empty))
    decode = draw(stages(names[1], kind, prefill, role="decode", handoff=handoff, final_output=True))
    return [prefill, decode]


@st.composite
def pipelines(draw) -> Pipeline:
    names = draw(st.lists(NAMES, min_size=1, max_size=4, unique=True))
    mode = draw(st.sampled_from(("plain", "pair", "companions"))) if len(names) > 1 else "plain"
    if mode == "pair":
        made = draw(pairs(names))
    else:
        kind = draw(st.sampled_from(("llm", "simulated") if mode == "companions" else KINDS))
        made = [draw(stages(names[0], kind, final_output=draw(st.none() | st.just(True))))]
    for name in names[len(made) :]:
        sources = made[1:] if mode == "pair" else made
        source = draw(st.sampled_from(sources))
        kind = draw(st.sampled_from(KINDS))
        feeding = draw(fed(kind, source, companions=mode == "companions" and source is made[0]))
        named = source.name if source is not made[-1] or draw(st.booleans()) else None
        final = draw(st.none() | st.just(True))
        made.append(draw(stages(name, kind, source=named, final_output=final, **feeding)))
    more: dict = {}
    if mode == "companions":
        # Functions of modules written in C and in Python: both have names that lead back to them.
        expand = draw(st.sampled_from(("json:dumps", json.dumps, math.ceil)))
        more = {"expand": expand, "bundle_timeout": draw(SECONDS)}
    return Pipeline(made, name=draw(TEXTS), **more)


def by_name(pipeline: Pipeline) -> Pipeline:
    """The same with its functions given by name, as a file has them."""

    def name(function):
        return f"{function.__module__}:{function.__qualname__}" if callable(function) else function

    named = [attrs.evolve(stage, placeholder=name(stage.placeholder)) for stage in pipeline.stages]
    return attrs.evolve(pipeline, stages=named, expand=name(pipeline.expand))


def toml(value) -> str:
    """Write a value as TOML, tables inline: JSON's text escapes are TOML's, but for the surrogate pairs."""
    match value:
        case dict():
            return "{" + ", ".join(f"{toml(key)} = {toml(item)}" for key, item in value.items()) + "}"
        case list():
            return "[" + ", ".join(map(toml, value)) + "]"
        case float() if math.isinf(value):
            return "inf" if value > 0 else "-inf"
        case str():
            return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
        case _:
            return json.dumps(value)


def loaded(text: str, suffix: str) -> Pipeline:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"pipeline{suffix}"
        path.write_bytes(text.encode())
        return load_pipeline(path)


@given(pipelines())
def test_what_is_dumped_loads_as_the_same(pipeline):
    data = dump_pipeline(pipeline)
    expected = by_name(pipeline)
    again = loaded(yaml.safe_dump(data, sort_keys=False), ".yaml")
    assert again == expected
    assert loaded("".join(f"{key} = {toml(value)}\n" for key, value in data.items()), ".toml") == expected
    # Derived fields take no part in equality.
    assert (again.pair, again.no_sessions, again.placeholders) == (
        pipeline.pair,
        pipeline.no_sessions,
        pipeline.placeholders,
    )


@given(pipelines())
def test_dumping_is_stable_and_shares_nothing(pipeline):
    data = dump_pipeline(pipeline)
    again = dump_pipeline(loaded(yaml.safe_dump(data), ".yml"))
    assert again == data
    assert set(data["stages"][0]) <= {field.name for field in attrs.fields(StageSpec)}


@st.composite
def documents(draw):
    """A TOML text in one of many layouts, and the line of each key that it has."""
    lines: list[str] = []
    found = {}

    def noise() -> None:
        lines.extend(draw(st.lists(st.sampled_from(["", "  ", "# [[stages]] x = 1", "\t# '''"]), max_size=2)))

    for index in range(draw(st.integers(1, 3))):
        noise()
        lines.append(draw(st.sampled_from(["[[stages]]", " [[ stages ]] # x", '[["stages"]]'])))
        found["stages", index] = len(lines)
        for key in draw(st.lists(NAMES, max_size=4, unique=True)):
            noise()
            value = draw(VALUES)
            written = draw(st.sampled_from([key, toml(key), f"'{key}'"]))
            lines.append(f"  {written} = {toml(value)}{draw(st.sampled_from(['', ' # =', '  ']))}")
            found["stages", index, key] = len(lines)
            if draw(st.booleans()):
                lines.append(f"{key}-list = [ # [")
                lines.append(f"  {toml(value)}, {{ {written} = '''")
                lines.append("[[stages]]")
                lines.append("x = 1''' },")
                found["stages", index, f"{key}-list", 1, key] = len(lines) - 2
                lines.append("]")
                found["stages", index, f"{key}-list"] = len(lines) - 4
        if draw(st.booleans()):
            lines.append("[stages.sub-table]")
            found["stages", index, "sub-table"] = len(lines)
            lines.append("a.b = 1")
            found["stages", index, "sub-table", "a", "b"] = len(lines)
    return "\n".join(lines), found


@given(documents())
def test_keys_are_found_on_their_lines(document):
    import tomllib  # noqa: PLC0415 - only to skip what is no TOML

    text, found = document
    try:
        tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        return  # a key that the layout happened to give twice
    lines = TomlLines(text)
    assert {key: lines.line(key) for key in found} == found


@given(st.text(st.sampled_from("[]{}=\"'\n#,.ab1 \\-:&*!|>%@`?<\t"), max_size=40), st.sampled_from([".toml", ".yaml"]))
def test_any_text_gives_a_pipeline_or_a_config_error(text, suffix):
    try:
        loaded(text, suffix)
    except ConfigError as error:
        problem = error
    else:
        return
    assert problem.file is not None
    assert problem.line is None or 1 <= problem.line <= text.count("\n") + 1
