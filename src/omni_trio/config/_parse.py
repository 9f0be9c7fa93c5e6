"""From a file to data, with the line of every key."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import yaml

from omni_trio.errors import ConfigError

from ._lines import Lines, TomlLines, YamlLines

__all__ = ["parse", "read_text"]

_SUFFIXES = (".toml", ".yaml", ".yml")


def read_text(file: str) -> str:
    """Return what stands in `file`.

    Raises:
        ConfigError: it can not be read, its suffix is of neither format, or it is not text in UTF-8.
    """
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


def parse(text: str, file: str) -> tuple[Any, Lines]:
    """Return what the text of `file` says, as TOML or YAML by the file's suffix, and where each key of it stands.

    Raises:
        ConfigError: it is not valid; it names the line.
    """
    return _parse_toml(text, file) if Path(file).suffix.lower() == ".toml" else _parse_yaml(text, file)


def _parse_toml(text: str, file: str) -> tuple[Any, Lines]:
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
    return data, TomlLines(text)


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


def _parse_yaml(text: str, file: str) -> tuple[Any, Lines]:
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
    return data, YamlLines(node)


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
