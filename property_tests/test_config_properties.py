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
from omni_trio.config import _TomlLines, dump_pipeline, load_pipeline
from omni_trio.errors import ConfigError
from omni_trio.pipeline import MODALITIES, Pipeline, StageSpec

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


@st.composite
def stages(draw, index: int, name: str, earlier: list[str]) -> StageSpec:
    kind = draw(st.sampled_from(("llm", "pooling", "worker", "simulated")))
    engine = kind in ("llm", "pooling")
    chat = kind == "llm" and draw(st.booleans())
    replicas, per_replica = draw(st.tuples(st.integers(1, 3), st.integers(1, 2)))
    count = draw(st.sampled_from((0, per_replica, replicas * per_replica)))
    settings = draw(tables(VALUES))
    return StageSpec(
        name=name,
        kind=kind,
        # Begins with what no folder here has, so that it is never taken for a path.
        model="hub:" + draw(TEXTS) if engine else None,
        target="json:dumps" if kind == "worker" else None,
        engine_args=settings if engine else {},
        options={} if engine else settings,
        replicas=replicas,
        devices=[str(number) for number in range(count)],
        devices_per_replica=per_replica,
        sampling=draw(tables(VALUES)),
        source=draw(st.none() | st.sampled_from(earlier)) if earlier else None,
        bridge=draw(st.none() | st.sampled_from((*BUILTIN, "json:dumps"))) if earlier else None,
        stream=not engine and index > 0 and draw(st.booleans()),
        final_output=draw(st.none() | st.just(True)),
        modality=draw(st.none() | st.sampled_from(MODALITIES)),
        requires_multimodal_data=draw(st.booleans()),
        prompt_format="chat" if chat else "raw",
        system=draw(st.none() | TEXTS) if chat else None,
        env=draw(tables(TEXTS)),
        path=draw(st.lists(NAMES.map("/{}".format), max_size=2)) if kind == "worker" else (),
        start_timeout=draw(SECONDS),
        probe_interval=draw(SECONDS),
        probe_timeout=draw(SECONDS),
    )


@st.composite
def pipelines(draw) -> Pipeline:
    names = draw(st.lists(NAMES, min_size=1, max_size=4, unique=True))
    return Pipeline([draw(stages(index, name, names[:index])) for index, name in enumerate(names)], name=draw(TEXTS))


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
    assert loaded(yaml.safe_dump(data, sort_keys=False), ".yaml") == pipeline
    assert loaded(f"name = {toml(data['name'])}\nstages = {toml(data['stages'])}\n", ".toml") == pipeline


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
    lines = _TomlLines(text)
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
