"""A pipeline as a file: TOML or YAML in, `Pipeline` out, and back to plain data.

Both formats have the same structure: ``name``, and ``stages``, a list of tables whose keys are the fields of
`StageSpec`. All that is wrong with a file is a `ConfigError` that names the file, the line, the dotted key, what
was expected there and what was found.
"""

from __future__ import annotations

import datetime as dt
import importlib.machinery
import importlib.util
import os
import re
import sys
import tomllib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, Protocol, TypeAlias

import attrs
import yaml

from .bridges import resolve_bridge
from .errors import ConfigError
from .pipeline import Pipeline, StageSpec, nearest

__all__ = ["dump_pipeline", "load_pipeline"]

_Key: TypeAlias = tuple[str | int, ...]
"""Where in the data: keys of tables and indices of lists, from the root."""


class _Lines(Protocol):
    """Knows on which line of the file a key stands."""

    def line(self, key: _Key) -> int | None:
        """Return the 1-based line of `key`, or None where the file does not have it."""
        ...


# --------------------------------------------------------------------------------------------------------------
# Public


def load_pipeline(path: str | os.PathLike[str]) -> Pipeline:
    """Read a pipeline from a ``.toml``, ``.yaml`` or ``.yml`` file.

    * ``${NAME}`` in any text value becomes that environment variable, ``${NAME:-default}`` the default where the
      variable is unset or empty; ``$${`` stands for a literal ``${``.
    * A ``model`` that names something existing relative to the file's folder becomes an absolute path; any other is
      passed on as it is.
    * Modules that lie next to the file can be named in ``bridge`` and ``target``: the file's folder goes to the
      front of this process's ``sys.path`` where a bridge needs it, and into `StageSpec.path` of worker stages whose
      table has no ``path`` of its own. Relative entries of a given ``path`` count from the file's folder.

    Bridges are imported, and so run their modules; a worker's target is only looked for.

    Args:
        path: the file. It is read at once, so call this before `trio.run` or in a thread.

    Raises:
        ConfigError: the file can not be read, is not valid TOML or YAML, or does not describe a valid pipeline.
    """
    file = os.fspath(path)
    text = _read_text(file)
    if not text.strip():
        raise ConfigError("the file is empty; it needs a 'stages' list", file=file, line=1)
    parse = _parse_toml if Path(file).suffix.lower() == ".toml" else _parse_yaml
    data, lines = parse(text, file)
    return _Reader(file, lines).pipeline(data)


def dump_pipeline(pipeline: Pipeline) -> dict[str, Any]:
    """Return the plain data that, written as YAML or TOML, loads as an equal pipeline.

    Fields that have their default are left out. Text is escaped, so that no ``${`` in it is taken for a variable.

    Raises:
        ConfigError: a bridge is a callable that no module has under its own name, or a value is no plain data
            (text, number, boolean, None, list or table).
    """
    return {"name": _escape(pipeline.name), "stages": [_dump_stage(stage) for stage in pipeline.stages]}


# --------------------------------------------------------------------------------------------------------------
# From file to data with line numbers

_SUFFIXES = (".toml", ".yaml", ".yml")


def _read_text(file: str) -> str:
    path = Path(file)
    if path.is_dir():
        raise ConfigError("this is a folder; name the .toml or .yaml file in it", file=file)
    if path.suffix.lower() not in _SUFFIXES:
        raise ConfigError(
            f"can not tell the format from the suffix {path.suffix!r}; expected {', '.join(_SUFFIXES)}", file=file
        )
    try:
        raw = path.read_bytes()
    except FileNotFoundError as error:
        raise ConfigError("there is no such file", file=file) from error
    except (OSError, ValueError) as error:
        raise ConfigError(f"the file can not be read: {error}", file=file) from error
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise ConfigError("the file is not text in UTF-8", file=file, line=line) from error


def _parse_toml(text: str, file: str) -> tuple[Any, _Lines]:
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        message = str(error)
        place = re.search(r" \(at (?:line (\d+), column \d+|end of document)\)$", message)
        line = None
        if place is not None:
            message = message[: place.start()]
            line = int(place[1]) if place[1] else text.rstrip().count("\n") + 1
        raise ConfigError(f"this is not valid TOML: {message}", file=file, line=line) from error
    except RecursionError as error:
        raise ConfigError("the values are nested too deep", file=file) from error
    return data, _TomlLines(text)


class _TomlLines:
    """Finds the line of every key in a text that `tomllib` has accepted; so it need not check anything itself."""

    _BLANK = re.compile(r"(?:[ \t\r\n]|#[^\n]*)*")
    _SPACE = re.compile(r"[ \t]*")
    _BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")
    _STRING = re.compile(
        r'''"""(?:[^\\]|\\.)*?"{3,5}(?!")|'''
        r"""'''.*?'{3,5}(?!')|"(?:[^"\\]|\\.)*"|'[^']*'""",
        re.DOTALL,
    )
    _BARE_VALUE = re.compile(r"[^,\]}#\r\n]*")

    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0
        self._counted = (0, 1)
        self._found: dict[_Key, int] = {}
        self._lengths: dict[_Key, int] = {}
        self._document()

    def line(self, key: _Key) -> int | None:
        return self._found.get(key)

    def _skip(self, pattern: re.Pattern[str]) -> str:
        match = pattern.match(self._text, self._at)
        if match is None:  # pragma: no cover - tomllib has accepted the text
            raise AssertionError(f"no {pattern.pattern} at offset {self._at}")
        self._at = match.end()
        return match[0]

    def _next_is(self, token: str) -> bool:
        return self._text.startswith(token, self._at)

    def _here(self) -> int:
        offset, line = self._counted
        line += self._text.count("\n", offset, self._at)
        self._counted = (self._at, line)
        return line

    def _note(self, key: _Key, line: int) -> None:
        self._found.setdefault(key, line)

    def _document(self) -> None:
        table: _Key = ()
        self._skip(self._BLANK)
        while self._at < len(self._text):
            if self._next_is("["):
                table = self._header()
            else:
                self._pair(table)
            self._skip(self._BLANK)

    def _header(self) -> _Key:
        line = self._here()
        is_array = self._next_is("[[")
        self._at += 2 if is_array else 1
        parts = self._dotted_key()
        self._at += 2 if is_array else 1
        key: _Key = ()
        for position, part in enumerate(parts):
            key = (*key, part)
            self._note(key, line)
            if is_array and position == len(parts) - 1:
                self._lengths[key] = self._lengths.get(key, 0) + 1
            if key in self._lengths:
                key = (*key, self._lengths[key] - 1)
        self._found[key] = line
        return key

    def _pair(self, table: _Key) -> None:
        line = self._here()
        key = table
        for part in self._dotted_key():
            key = (*key, part)
            self._note(key, line)
        self._at += 1  # the equals sign
        self._skip(self._SPACE)
        self._value(key)

    def _dotted_key(self) -> list[str]:
        parts = []
        while True:
            self._skip(self._SPACE)
            if self._next_is('"') or self._next_is("'"):
                parts.append(str(tomllib.loads(f"key = {self._skip(self._STRING)}")["key"]))
            else:
                parts.append(self._skip(self._BARE_KEY))
            self._skip(self._SPACE)
            if not self._next_is("."):
                return parts
            self._at += 1

    def _value(self, key: _Key) -> None:
        if self._next_is("["):
            self._items("]", key, is_table=False)
        elif self._next_is("{"):
            self._items("}", key, is_table=True)
        elif self._next_is('"') or self._next_is("'"):
            self._skip(self._STRING)
        else:
            self._skip(self._BARE_VALUE)

    def _items(self, end: str, key: _Key, *, is_table: bool) -> None:
        self._at += 1
        index = 0
        self._skip(self._BLANK)
        while not self._next_is(end):
            if is_table:
                self._pair(key)
            else:
                self._note((*key, index), self._here())
                self._value((*key, index))
                index += 1
            self._skip(self._BLANK)
            if self._next_is(","):
                self._at += 1
                self._skip(self._BLANK)
        self._at += 1


class _YamlLoader(yaml.SafeLoader):
    """PyYAML's safe loader, with a mark on every error that it has."""

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep=deep)
        except (ValueError, LookupError, AttributeError, OverflowError) as error:
            kind = node.tag.rpartition(":")[2]
            raise yaml.constructor.ConstructorError(
                None, None, f"{node.value!r} is no valid {kind}", node.start_mark
            ) from error


def _parse_yaml(text: str, file: str) -> tuple[Any, _Lines]:
    try:
        loader = _YamlLoader(text)
        node = loader.get_single_node()
        if node is None:
            raise ConfigError("the file is empty; it needs a 'stages' list", file=file, line=1)
        _check_nodes(node, file)
        data = loader.construct_document(node)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        message = " ".join(part for part in (error.context, error.problem) if part)
        line = None if mark is None else mark.line + 1
        raise ConfigError(f"this is not valid YAML: {message}", file=file, line=line) from error
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise ConfigError(f"this is not valid YAML: {error.reason}", file=file, line=line) from error
    except RecursionError as error:
        raise ConfigError("the values are nested too deep", file=file) from error
    return data, _YamlLines(node)


def _check_nodes(root: yaml.Node, file: str) -> None:
    """Refuse what PyYAML lets pass: a key given twice, and an alias to what it stands in."""
    inside: set[int] = set()
    done: set[int] = set()

    def visit(node: yaml.Node) -> None:
        if id(node) in inside:
            raise ConfigError("the value contains itself", file=file, line=node.start_mark.line + 1)
        if id(node) in done or not isinstance(node, yaml.CollectionNode):
            return
        inside.add(id(node))
        if isinstance(node, yaml.MappingNode):
            seen: dict[str, int] = {}
            for key, value in node.value:
                if isinstance(key, yaml.ScalarNode) and key.tag != "tag:yaml.org,2002:merge":
                    line = key.start_mark.line + 1
                    if key.value in seen:
                        first = seen[key.value]
                        raise ConfigError(f"{key.value!r} is given twice, first on line {first}", file=file, line=line)
                    seen[key.value] = line
                visit(key)
                visit(value)
        else:
            for item in node.value:
                visit(item)
        inside.discard(id(node))
        done.add(id(node))

    visit(root)


class _YamlLines:
    """Finds lines in the tree of nodes, along the one path that is asked for."""

    def __init__(self, root: yaml.Node) -> None:
        self._root = root

    def line(self, key: _Key) -> int | None:
        node = self._root
        line = None
        for part in key:
            if isinstance(node, yaml.MappingNode):
                # Merged keys come first, a table's own last; the own one counts.
                matches = [pair for pair in node.value if pair[0].value == part]
                if not matches:
                    return None
                line = matches[-1][0].start_mark.line + 1
                node = matches[-1][1]
            elif isinstance(node, yaml.SequenceNode) and isinstance(part, int) and part < len(node.value):
                node = node.value[part]
                line = node.start_mark.line + 1
            else:
                return None
        return line


# --------------------------------------------------------------------------------------------------------------
# From data to a pipeline

_VARIABLE = re.compile(r"\$\$\{|\$\{(?P<body>[^}]*)(?P<end>\}?)")
_VARIABLE_BODY = re.compile(r"(?P<name>[A-Za-z_][A-Za-z0-9_]*)(?P<default>:-.*)?", re.DOTALL)


def _in_words(value: Any) -> str:
    match value:
        case None:
            return "nothing (null)"
        case bool():
            return f"the boolean {str(value).lower()}"
        case int():
            return f"the whole number {value}" if abs(value) < 10**30 else "a very large whole number"
        case float():
            return f"the number {value}"
        case str():
            return f"the text {value!r}" if len(value) <= 60 else f"a text of {len(value)} characters"
        case Mapping():
            return "a table" if value else "an empty table"
        case list() | tuple():
            return "a list" if value else "an empty list"
        case dt.date() | dt.time():
            return f"the date or time {value.isoformat()}"
    return f"a value of type {type(value).__name__}"


def _hint(value: Any) -> str:
    """What to do about a value that YAML or TOML reads as something other than the text that was meant."""
    return "; put it in quotes" if isinstance(value, bool | int | float | dt.date | dt.time) else ""


class _Reader:
    """Turns one file's data into a pipeline; every method takes the value and where it stands."""

    def __init__(self, file: str, lines: _Lines) -> None:
        self._file = file
        self._lines = lines
        self._folder = Path(file).absolute().parent
        self._labels: dict[int, str] = {}

    # Errors

    def _dotted(self, key: _Key) -> str | None:
        parts = [str(part) for part in key]
        if len(key) > 1 and key[0] == "stages" and isinstance(key[1], int):
            parts[1] = self._labels.get(key[1], parts[1])
        return ".".join(parts) or None

    def _line(self, key: _Key) -> int | None:
        for length in range(len(key), 0, -1):
            if (line := self._lines.line(key[:length])) is not None:
                return line
        return None

    def _fail(self, key: _Key, message: str, *, cause: BaseException | None = None) -> NoReturn:
        raise ConfigError(message, file=self._file, line=self._line(key), key=self._dotted(key)) from cause

    # Values

    def _substitute(self, text: str, key: _Key) -> str:
        def replace(match: re.Match[str]) -> str:
            if match[0] == "$${":
                return "${"
            parts = _VARIABLE_BODY.fullmatch(match["body"])
            if parts is None or not match["end"]:
                self._fail(
                    key,
                    f"{match[0]!r} names no variable: write ${{NAME}} or ${{NAME:-default}}, or $${{ for a plain ${{",
                )
            default = parts["default"]
            value = os.environ.get(parts["name"])
            if value is None and default is None:
                self._fail(
                    key,
                    f"the environment variable {parts['name']} is not set; set it, or give a default: "
                    f"${{{parts['name']}:-...}}",
                )
            return value or ("" if default is None else default[2:])

        return _VARIABLE.sub(replace, text)

    def text(self, value: Any, key: _Key) -> str:
        if not isinstance(value, str):
            self._fail(key, f"expected a text, got {_in_words(value)}{_hint(value)}")
        return self._substitute(value, key)

    def boolean(self, value: Any, key: _Key) -> bool:
        if not isinstance(value, bool):
            self._fail(key, f"expected true or false, got {_in_words(value)}")
        return value

    def whole_number(self, value: Any, key: _Key) -> int:
        if not isinstance(value, int) or isinstance(value, bool):
            self._fail(key, f"expected a whole number, got {_in_words(value)}")
        return value

    def number(self, value: Any, key: _Key) -> float:
        if not isinstance(value, int | float) or isinstance(value, bool):
            self._fail(key, f"expected a number, got {_in_words(value)}")
        try:
            return float(value)
        except OverflowError as error:
            self._fail(key, f"expected a number, got {_in_words(value)}", cause=error)

    def table(self, value: Any, key: _Key) -> dict[str, Any]:
        if not isinstance(value, Mapping):
            self._fail(key, f"expected a table, got {_in_words(value)}")
        for name in value:
            if not isinstance(name, str):
                self._fail(key, f"expected texts as keys, got {_in_words(name)}{_hint(name)}")
        return dict(value)

    def text_table(self, value: Any, key: _Key) -> dict[str, str]:
        return {name: self.text(item, (*key, name)) for name, item in self.table(value, key).items()}

    def plain_table(self, value: Any, key: _Key) -> dict[str, Any]:
        return {name: self.plain(item, (*key, name)) for name, item in self.table(value, key).items()}

    def plain(self, value: Any, key: _Key) -> Any:
        match value:
            case str():
                return self._substitute(value, key)
            case None | bool() | int() | float():
                return value
            case list():
                return [self.plain(item, (*key, index)) for index, item in enumerate(value)]
        if not isinstance(value, Mapping):
            self._fail(key, f"expected a text, number, boolean, list or table, got {_in_words(value)}{_hint(value)}")
        return self.plain_table(value, key)

    def items(self, value: Any, key: _Key, of: str) -> list[Any]:
        if not isinstance(value, list):
            self._fail(key, f"expected a list of {of}, got {_in_words(value)}")
        return value

    def texts(self, value: Any, key: _Key) -> tuple[str, ...]:
        items = self.items(value, key, "texts")
        return tuple(self.text(item, (*key, index)) for index, item in enumerate(items))

    # Fields that are more than their type

    def devices(self, value: Any, key: _Key) -> tuple[str, ...]:
        # Device ids are text (a MIG slice has a name), but nobody writes ["0", "1"] by choice.
        items = self.items(value, key, "device ids")
        return tuple(
            str(item) if isinstance(item, int) and not isinstance(item, bool) else self.text(item, (*key, index))
            for index, item in enumerate(items)
        )

    def model(self, value: Any, key: _Key) -> str:
        model = self.text(value, key)
        return str(self._beside(model)) if model and self._beside(model).exists() else model

    def path(self, value: Any, key: _Key) -> tuple[str, ...]:
        return tuple(str(self._beside(entry)) for entry in self.texts(value, key))

    def _beside(self, name: str) -> Path:
        return Path(os.path.normpath(self._folder / name))

    # The whole

    def pipeline(self, data: Any) -> Pipeline:
        if not isinstance(data, Mapping):
            self._fail((), f"expected a table with 'name' and 'stages', got {_in_words(data)}")
        top = self.table(data, ())
        self._check_keys(top, (), tuple(field.name for field in attrs.fields(Pipeline) if field.init))
        if "stages" not in top:
            self._fail((), "there are no stages; add a [[stages]] table (TOML) or a 'stages' list (YAML)")
        if isinstance(top["stages"], Mapping):
            self._fail(("stages",), "expected a list of tables, got a table; write [[stages]] once per stage")
        stages = self.items(top["stages"], ("stages",), "tables, one per stage")
        if not stages:
            self._fail(("stages",), "a pipeline needs at least one stage")
        named = {"name": self.text(top["name"], ("name",))} if "name" in top else {}
        specs = [self.stage(stage, index) for index, stage in enumerate(stages)]
        self._check_unique([spec.name for spec in specs])
        self._import_bridges(specs)
        self._find_targets(specs)
        try:
            return Pipeline(stages=specs, **named)
        except ConfigError as error:
            key = self._key_of(error.key, specs)
            raise ConfigError(error.message, file=self._file, line=self._line(key), key=error.key) from error.__cause__

    def _check_keys(self, table: Mapping[str, Any], key: _Key, known: Sequence[str]) -> None:
        for name in table:
            if name not in known:
                hint = nearest(name, known) or f"; known are {', '.join(known)}"
                self._fail((*key, name), f"there is no such key{hint}")

    def stage(self, value: Any, index: int) -> StageSpec:
        key: _Key = ("stages", index)
        table = self.table(value, key)
        if isinstance(table.get("name"), str) and table["name"]:
            self._labels[index] = table["name"]
        self._check_keys(table, key, tuple(_FIELDS))
        if "name" not in table:
            self._fail(key, "the stage needs a name")
        arguments: dict[str, Any] = {}
        for name, item in table.items():
            reader, nullable = _FIELDS[name]
            if item is None and nullable:
                arguments[name] = None
            else:
                arguments[name] = reader(self, item, (*key, name))
        self._labels[index] = arguments["name"] or str(index)
        if arguments.get("kind") == "worker":
            arguments.setdefault("path", (str(self._folder),))
        return StageSpec(**arguments)

    def _check_unique(self, names: Sequence[str]) -> None:
        for index, name in enumerate(names):
            if name in names[:index]:
                first = self._line(("stages", names.index(name)))
                self._fail(
                    ("stages", index, "name"),
                    f"two stages are called {name!r}; names must be unique (the other is on line {first})",
                )

    def _import_bridges(self, specs: Sequence[StageSpec]) -> None:
        """Import what `Pipeline` will look up, with the file's folder in reach, and say where it fails."""
        for index, spec in enumerate(specs):
            if not isinstance(spec.bridge, str) or ":" not in spec.bridge:
                continue
            key = ("stages", index, "bridge")
            module = spec.bridge.partition(":")[0]
            if str(self._folder) not in sys.path:
                sys.path.insert(0, str(self._folder))
            self._check_same_module(module.partition(".")[0], key)
            try:
                resolve_bridge(spec.bridge, key=self._dotted(key))
            except ConfigError as error:
                self._fail(key, error.message, cause=error.__cause__)
            except Exception as error:  # the user's module, which may raise anything
                self._fail(key, f"importing {module!r} raised {type(error).__name__}: {error}", cause=error)

    def _find_targets(self, specs: Sequence[StageSpec]) -> None:
        """Miss a worker's module now and not in its process; it is not imported, which may cost seconds."""
        for index, spec in enumerate(specs):
            if spec.kind != "worker" or not spec.target:
                continue
            name = spec.target.partition(":")[0].partition(".")[0]
            if name in sys.modules or importlib.machinery.PathFinder.find_spec(name, list(spec.path)) is not None:
                continue
            if not name.isidentifier() or importlib.util.find_spec(name) is None:
                here = [entry.stem for folder in spec.path for entry in Path(folder).glob("*.py")]
                where = ", ".join((*spec.path, "sys.path"))
                self._fail(("stages", index, "target"), f"there is no module {name!r} in {where}{nearest(name, here)}")

    def _check_same_module(self, name: str, key: _Key) -> None:
        """Refuse to take another folder's module of the same name, which Python would do without a word."""
        beside = self._folder / f"{name}.py"
        loaded = getattr(sys.modules.get(name), "__file__", None)
        if beside.is_file() and loaded is not None and not beside.samefile(loaded):
            self._fail(key, f"module {name!r} was already imported from {loaded}; give {beside.name} another name")

    def _key_of(self, dotted: str | None, specs: Sequence[StageSpec]) -> _Key:
        for index, spec in enumerate(specs):
            prefix = f"stages.{spec.name or index}."
            if dotted is not None and dotted.startswith(prefix):
                return ("stages", index, *dotted.removeprefix(prefix).split("."))
        return ("stages",)


_FieldReader: TypeAlias = Callable[[_Reader, Any, _Key], Any]

_BY_ANNOTATION: Mapping[str, _FieldReader] = {
    "str": _Reader.text,
    "StageKind": _Reader.text,
    "Modality": _Reader.text,
    "Bridge | str": _Reader.text,
    "Literal['raw', 'chat']": _Reader.text,
    "int": _Reader.whole_number,
    "float": _Reader.number,
    "bool": _Reader.boolean,
    "Mapping[str, Any]": _Reader.plain_table,
    "Mapping[str, str]": _Reader.text_table,
    "tuple[str, ...]": _Reader.texts,
}
_BY_NAME: Mapping[str, _FieldReader] = {
    "devices": _Reader.devices,
    "model": _Reader.model,
    "path": _Reader.path,
}


def _field_reader(field: attrs.Attribute[Any]) -> tuple[_FieldReader, bool]:
    """Return how a field's value is read, and whether None may stand for its default."""
    annotation = str(field.type)
    plain = annotation.removesuffix(" | None")
    reader = _BY_NAME.get(field.name) or _BY_ANNOTATION[plain]
    return reader, plain != annotation or field.converter is not None


_FIELDS: Mapping[str, tuple[_FieldReader, bool]] = {
    field.name: _field_reader(field) for field in attrs.fields(StageSpec)
}

# --------------------------------------------------------------------------------------------------------------
# From a pipeline to data


def _escape(text: str) -> str:
    return text.replace("${", "$${")


def _dump_stage(stage: StageSpec) -> dict[str, Any]:
    data: dict[str, Any] = {}
    defaults = StageSpec(name=stage.name)
    for field in attrs.fields(StageSpec):
        value = getattr(stage, field.name)
        key = f"stages.{stage.name}.{field.name}"
        # A worker's path is written even where it is empty: left out, it would become the file's folder.
        always = field.name in ("name", "kind") or (field.name == "path" and stage.kind == "worker")
        if field.name == "bridge" and value is not None and not isinstance(value, str):
            value = _bridge_name(value, key)
        if always or value != getattr(defaults, field.name):
            data[field.name] = _thaw(value, key)
    return data


def _bridge_name(function: Any, key: str) -> str:
    spec = resolve_bridge(function, key=key)
    try:
        found = resolve_bridge(spec.name, key=key)
    except ConfigError as error:
        raise ConfigError(
            f"the bridge {spec.name!r} can not be written to a file, since it can not be imported by that name; "
            "make it a function at the top of a module",
            key=key,
        ) from error
    if found.function is not spec.function:
        raise ConfigError(f"the bridge can not be written to a file: {spec.name!r} names another object", key=key)
    return spec.name


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
    raise ConfigError(f"{_in_words(value)} can not be written to a file", key=key)
