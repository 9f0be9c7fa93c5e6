"""From a pipeline to the data of a file."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import attrs

from omni_trio.bridges import resolve_bridge, resolve_expand, resolve_placeholder
from omni_trio.errors import ConfigError
from omni_trio.pipeline import WORKER_KINDS, Pipeline, StageSpec

from ._words import in_words

__all__ = ["dump_pipeline"]


def dump_pipeline(pipeline: Pipeline) -> dict[str, Any]:
    """Return the plain data that, written as YAML or TOML, loads as an equal pipeline.

    Fields that have their default are left out. Functions are written by name. Text is escaped, so that no ``${`` in
    it is taken for a variable.

    Raises:
        ConfigError: a bridge, expand or placeholder function is a callable that no module has under its own name, or
            a value is no plain data (text, number, boolean, None, list or table).
    """
    data: dict[str, Any] = {"name": _escape(pipeline.name)}
    if pipeline.expand is not None:
        data["expand"] = _escape(_name_of(pipeline.expand, "expand", "expand"))
    if pipeline.bundle_timeout != attrs.fields(Pipeline).bundle_timeout.default:
        data["bundle_timeout"] = pipeline.bundle_timeout
    data["stages"] = [_dump_stage(stage) for stage in pipeline.stages]
    return data


def _dump_stage(stage: StageSpec) -> dict[str, Any]:
    data: dict[str, Any] = {}
    defaults = StageSpec(name=stage.name)
    for field in attrs.fields(StageSpec):
        value = getattr(stage, field.name)
        key = f"stages.{stage.name}.{field.name}"
        # A worker's path is written even where it is empty: left out, it would become the file's folder.
        always = field.name in ("name", "kind") or (field.name == "path" and stage.kind in WORKER_KINDS)
        if field.name in _FUNCTIONS and value is not None:
            value = _name_of(value, field.name, key)
        if always or value != getattr(defaults, field.name):
            data[field.name] = _thaw(value, key)
    return data


_FUNCTIONS: Mapping[str, Callable[[Any, str], object]] = {
    "bridge": lambda reference, key: resolve_bridge(reference, key=key).function,
    "expand": lambda reference, key: resolve_expand(reference, key=key).function,
    "placeholder": lambda reference, key: resolve_placeholder(reference, key=key),
}
"""By field: how its value becomes the function itself."""


def _name_of(value: Any, what: str, key: str) -> str:
    """Return the name under which a file can have a function: that of a callable must lead back to it."""
    if isinstance(value, str):
        return value
    resolve = _FUNCTIONS[what]
    function = resolve(value, key)
    name = f"{getattr(function, '__module__', '?')}:{getattr(function, '__qualname__', repr(function))}"
    try:
        found = resolve(name, key)
    except ConfigError as error:
        raise ConfigError(
            f"the {what} {name!r} can not be written to a file, since it can not be imported by that name; "
            "make it a function at the top of a module",
            key=key,
        ) from error
    if found is not function:
        raise ConfigError(f"the {what} can not be written to a file: {name!r} names another object", key=key)
    return name


def _escape(text: str) -> str:
    return text.replace("${", "$${")


def _thaw(value: Any, key: str) -> Any:
    match value:
        case str():
            return _escape(value)
        case None | bool() | int() | float():
            return value
        case Mapping():
            return {str(name): _thaw(item, f"{key}.{name}") for name, item in value.items()}
        case list() | tuple():
            return [_thaw(item, f"{key}.{index}") for index, item in enumerate(value)]
    raise ConfigError(f"{in_words(value)} can not be written to a file", key=key)
