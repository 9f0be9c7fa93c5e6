"""The values of a pipeline file: of which type they are, and what they stand for."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn, TypeAlias

import attrs

from omni_trio.errors import ConfigError
from omni_trio.pipeline import Pipeline, StageSpec

from ._lines import Key, Lines
from ._words import hint, in_words

__all__ = ["PIPELINE_FIELDS", "STAGE_FIELDS", "Fields", "Values"]

_VARIABLE = re.compile(r"\$\$\{|\$\{(?P<body>[^}]*)(?P<end>\}?)")
_VARIABLE_BODY = re.compile(r"(?P<name>[A-Za-z_][A-Za-z0-9_]*)(?P<default>:-.*)?", re.DOTALL)


class Values:
    """Checks the values of one file; every method takes the value and where it stands.

    Args:
        file: path of the file, as it was given.
        lines: where its keys stand.

    Attributes:
        folder: of the file; what is relative in it counts from here.
        labels: what errors call the stages, by index; the index itself where there is none.
    """

    def __init__(self, file: str, lines: Lines) -> None:
        self.file = file
        self._lines = lines
        self.folder = Path(file).absolute().parent
        self.labels: dict[int, str] = {}

    # Errors

    def _dotted(self, key: Key) -> str | None:
        parts = [str(part) for part in key]
        if len(key) > 1 and key[0] == "stages" and isinstance(key[1], int):
            parts[1] = self.labels.get(key[1], parts[1])
        return ".".join(parts) or None

    def line(self, key: Key) -> int | None:
        """Return the line of `key`, or of the nearest table around it that has one."""
        for length in range(len(key), 0, -1):
            if (line := self._lines.line(key[:length])) is not None:
                return line
        return None

    def fail(self, key: Key, message: str, *, cause: BaseException | None = None) -> NoReturn:
        """Raise a `ConfigError` about `key`."""
        raise ConfigError(message, file=self.file, line=self.line(key), key=self._dotted(key)) from cause

    # Values

    def _substitute(self, text: str, key: Key) -> str:
        def replace(match: re.Match[str]) -> str:
            if match[0] == "$${":
                return "${"
            parts = _VARIABLE_BODY.fullmatch(match["body"])
            if parts is None or not match["end"]:
                self.fail(
                    key,
                    f"{match[0]!r} names no variable: write ${{NAME}} or ${{NAME:-default}}, or $${{ for a plain ${{",
                )
            default = parts["default"]
            value = os.environ.get(parts["name"])
            if value is None and default is None:
                self.fail(
                    key,
                    f"the environment variable {parts['name']} is not set; set it, or give a default: "
                    f"${{{parts['name']}:-...}}",
                )
            return value or ("" if default is None else default[2:])

        return _VARIABLE.sub(replace, text)

    def text(self, value: Any, key: Key) -> str:
        """Return a text, its variables put in."""
        if not isinstance(value, str):
            self.fail(key, f"expected a text, got {in_words(value)}{hint(value)}")
        return self._substitute(value, key)

    def boolean(self, value: Any, key: Key) -> bool:
        """Return a boolean."""
        if not isinstance(value, bool):
            self.fail(key, f"expected true or false, got {in_words(value)}")
        return value

    def whole_number(self, value: Any, key: Key) -> int:
        """Return an int."""
        if not isinstance(value, int) or isinstance(value, bool):
            self.fail(key, f"expected a whole number, got {in_words(value)}")
        return value

    def number(self, value: Any, key: Key) -> float:
        """Return a float, of a whole number as well."""
        if not isinstance(value, int | float) or isinstance(value, bool):
            self.fail(key, f"expected a number, got {in_words(value)}")
        try:
            return float(value)
        except OverflowError as error:
            self.fail(key, f"expected a number, got {in_words(value)}", cause=error)

    def table(self, value: Any, key: Key) -> dict[str, Any]:
        """Return a table as it is; all of its keys are texts."""
        if not isinstance(value, Mapping):
            self.fail(key, f"expected a table, got {in_words(value)}")
        for name in value:
            if not isinstance(name, str):
                self.fail(key, f"expected texts as keys, got {in_words(name)}{hint(name)}")
        return dict(value)

    def text_table(self, value: Any, key: Key) -> dict[str, str]:
        """Return a table of texts."""
        return {name: self.text(item, (*key, name)) for name, item in self.table(value, key).items()}

    def plain_table(self, value: Any, key: Key) -> dict[str, Any]:
        """Return a table of plain data."""
        return {name: self.plain(item, (*key, name)) for name, item in self.table(value, key).items()}

    def plain(self, value: Any, key: Key) -> Any:
        """Return text, number, boolean, None, list or table, variables put in at any depth."""
        match value:
            case str():
                return self._substitute(value, key)
            case None | bool() | int() | float():
                return value
            case list():
                return [self.plain(item, (*key, index)) for index, item in enumerate(value)]
        if not isinstance(value, Mapping):
            self.fail(key, f"expected a text, number, boolean, list or table, got {in_words(value)}{hint(value)}")
        return self.plain_table(value, key)

    def items(self, value: Any, key: Key, of: str) -> list[Any]:
        """Return a list as it is; `of` says for errors what it is to be a list of."""
        if not isinstance(value, list):
            self.fail(key, f"expected a list of {of}, got {in_words(value)}")
        return value

    def texts(self, value: Any, key: Key) -> tuple[str, ...]:
        """Return a list of texts."""
        items = self.items(value, key, "texts")
        return tuple(self.text(item, (*key, index)) for index, item in enumerate(items))

    # Fields that are more than their type

    def devices(self, value: Any, key: Key) -> tuple[str, ...]:
        """Return device ids."""
        # Device ids are text (a MIG slice has a name), but nobody writes ["0", "1"] by choice.
        items = self.items(value, key, "device ids")
        return tuple(
            str(item) if isinstance(item, int) and not isinstance(item, bool) else self.text(item, (*key, index))
            for index, item in enumerate(items)
        )

    def model(self, value: Any, key: Key) -> str:
        """Return the name of a model; an absolute path where it names something in the file's folder."""
        model = self.text(value, key)
        if not model:
            return model
        path = self._beside(os.path.expanduser(model))  # noqa: PTH111 - Path's raises where there is no such user
        if path.exists():
            return str(path)
        if model.startswith(("/", "./", "../", "~")):
            # vLLM would take it for a name on the hub, and complain of its form.
            self.fail(key, f"there is no {path}; a model is a folder or file that exists, or a name that vLLM knows")
        return model

    def path(self, value: Any, key: Key) -> tuple[str, ...]:
        """Return absolute paths of folders."""
        return tuple(str(self._beside(entry)) for entry in self.texts(value, key))

    def _beside(self, name: str) -> Path:
        return Path(os.path.normpath(self.folder / name))


_FieldReader: TypeAlias = Callable[[Values, Any, Key], Any]

Fields: TypeAlias = Mapping[str, tuple[_FieldReader, bool]]
"""By key: how its value is read, and whether None may stand for its default."""

_BY_ANNOTATION: Mapping[str, _FieldReader] = {
    "str": Values.text,
    "StageKind": Values.text,
    "Modality": Values.text,
    "Bridge | str": Values.text,
    "Expand | str": Values.text,
    "Placeholder | str": Values.text,
    "Feed": Values.text,
    "Literal['raw', 'chat']": Values.text,
    "Literal['prefill', 'decode']": Values.text,
    "Literal['params', 'content']": Values.text,
    "Literal['fail', 'skip']": Values.text,
    "int": Values.whole_number,
    "float": Values.number,
    "bool": Values.boolean,
    "Mapping[str, Any]": Values.plain_table,
    "Mapping[str, str]": Values.text_table,
    "tuple[str, ...]": Values.texts,
}
_BY_NAME: Mapping[str, _FieldReader] = {
    "devices": Values.devices,
    "model": Values.model,
    "path": Values.path,
}


def _field_reader(field: attrs.Attribute[Any]) -> tuple[_FieldReader, bool]:
    """Return how a field's value is read, and whether None may stand for its default."""
    annotation = str(field.type)
    plain = annotation.removesuffix(" | None")
    reader = _BY_NAME.get(field.name) or _BY_ANNOTATION[plain]
    return reader, plain != annotation or field.converter is not None


PIPELINE_FIELDS: Fields = {
    field.name: _field_reader(field) for field in attrs.fields(Pipeline) if field.init and field.name != "stages"
}
STAGE_FIELDS: Fields = {field.name: _field_reader(field) for field in attrs.fields(StageSpec)}
