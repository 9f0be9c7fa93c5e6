"""From the data of a file to a pipeline."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

from omni_trio.bridges import resolve_bridge, resolve_expand, resolve_placeholder
from omni_trio.errors import ConfigError
from omni_trio.pipeline import WORKER_KINDS, Pipeline, StageSpec, nearest

from ._lines import Key, Lines
from ._modules import import_function
from ._targets import find_target
from ._values import PIPELINE_FIELDS, STAGE_FIELDS, Fields, Values
from ._words import in_words

__all__ = ["Reader"]

_Resolve: TypeAlias = Callable[[str], object]


class Reader:
    """Turns the data of one file into a pipeline, and says on which line it fails to.

    Args:
        file: path of the file, as it was given.
        lines: where its keys stand.
    """

    def __init__(self, file: str, lines: Lines) -> None:
        self._values = Values(file, lines)

    def pipeline(self, data: Any, check: Callable[[Pipeline], object] | None = None) -> Pipeline:
        """Return what `data` describes.

        Raises:
            ConfigError: it does not describe a valid pipeline, or `check` raised it.
        """
        fail = self._values.fail
        if not isinstance(data, Mapping):
            fail((), f"expected a table with 'name' and 'stages', got {in_words(data)}")
        top = self._values.table(data, ())
        self._check_keys(top, (), ("stages", *PIPELINE_FIELDS), misplaced={})
        if "stages" not in top:
            fail((), "there are no stages; add a [[stages]] table (TOML) or a 'stages' list (YAML)")
        if isinstance(top["stages"], Mapping):
            fail(("stages",), "expected a list of tables, got a table; write [[stages]] once per stage")
        stages = self._values.items(top.pop("stages"), ("stages",), "tables, one per stage")
        if not stages:
            fail(("stages",), "a pipeline needs at least one stage")
        arguments = self._arguments(top, (), PIPELINE_FIELDS)
        specs = [self._stage(stage, index) for index, stage in enumerate(stages)]
        self._check_unique([spec.name for spec in specs])
        self._import_functions(arguments, specs)
        self._find_targets(specs)
        try:
            pipeline = Pipeline(stages=specs, **arguments)
            if check is not None:
                check(pipeline)
        except ConfigError as error:
            line = self._values.line(_key_of(error.key, specs))
            raise ConfigError(error.message, file=self._values.file, line=line, key=error.key) from error.__cause__
        return pipeline

    def _stage(self, value: Any, index: int) -> StageSpec:
        key: Key = ("stages", index)
        table = self._values.table(value, key)
        if isinstance(table.get("name"), str) and table["name"]:
            self._values.labels[index] = table["name"]
        self._check_keys(table, key, tuple(STAGE_FIELDS), misplaced=_MISPLACED)
        if "name" not in table:
            self._values.fail(key, "the stage needs a name")
        arguments = self._arguments(table, key, STAGE_FIELDS)
        self._values.labels[index] = arguments["name"] or str(index)
        if arguments.get("kind") in WORKER_KINDS:
            arguments.setdefault("path", (str(self._values.folder),))
        return StageSpec(**arguments)

    def _arguments(self, table: Mapping[str, Any], key: Key, fields: Fields) -> dict[str, Any]:
        arguments: dict[str, Any] = {}
        for name, item in table.items():
            read, nullable = fields[name]
            arguments[name] = None if item is None and nullable else read(self._values, item, (*key, name))
        return arguments

    def _check_keys(
        self, table: Mapping[str, Any], key: Key, known: Sequence[str], *, misplaced: Mapping[str, str]
    ) -> None:
        for name in table:
            if name not in known:
                advice = misplaced.get(name) or nearest(name, known) or f"; known are {', '.join(known)}"
                self._values.fail((*key, name), f"there is no such key{advice}")

    def _check_unique(self, names: Sequence[str]) -> None:
        for index, name in enumerate(names):
            if name in names[:index]:
                first = self._values.line(("stages", names.index(name)))
                self._values.fail(
                    ("stages", index, "name"),
                    f"two stages are called {name!r}; names must be unique (the other is on line {first})",
                )

    def _import_functions(self, arguments: Mapping[str, Any], specs: Sequence[StageSpec]) -> None:
        """Import what `Pipeline` will look up, with the file's folder in reach, and say where it fails."""
        for key, reference, resolve in _functions(arguments, specs):
            if not isinstance(reference, str) or ":" not in reference:
                continue  # a built-in's name, or what `Pipeline` will refuse
            try:
                import_function(reference, self._values.folder, resolve)
            except ConfigError as error:
                self._values.fail(key, error.message, cause=error.__cause__)

    def _find_targets(self, specs: Sequence[StageSpec]) -> None:
        for index, spec in enumerate(specs):
            if spec.kind not in WORKER_KINDS or not spec.target:
                continue
            try:
                find_target(spec.target, spec.path)
            except ConfigError as error:
                self._values.fail(("stages", index, "target"), error.message)


_MISPLACED: Mapping[str, str] = {
    "stream": ": it has become 'feed'; write feed = \"output\" for stream = true, and nothing for stream = false",
    **{
        name: f" of a stage: {name!r} belongs to the pipeline; put it at the top of the file"
        for name in PIPELINE_FIELDS
        if name not in STAGE_FIELDS
    },
}
"""What to say of keys that a stage does not have, but that somebody may well give it."""


def _functions(arguments: Mapping[str, Any], specs: Sequence[StageSpec]) -> Iterator[tuple[Key, Any, _Resolve]]:
    yield ("expand",), arguments.get("expand"), resolve_expand
    for index, spec in enumerate(specs):
        yield ("stages", index, "bridge"), spec.bridge, resolve_bridge
        yield ("stages", index, "placeholder"), spec.placeholder, resolve_placeholder


def _key_of(dotted: str | None, specs: Sequence[StageSpec]) -> Key:
    """Return where in the file the key of an error of `Pipeline` stands."""
    if dotted is None:
        return ("stages",)
    if dotted in PIPELINE_FIELDS:
        return (dotted,)
    for index, spec in enumerate(specs):
        prefix = f"stages.{spec.name or index}."
        if dotted.startswith(prefix):
            return ("stages", index, *dotted.removeprefix(prefix).split("."))
    return ("stages",)
