"""On which line of a file a key stands, in TOML and in YAML."""

from __future__ import annotations

import re
import tomllib
from typing import Protocol, TypeAlias

import yaml

__all__ = ["Key", "Lines", "TomlLines", "YamlLines"]

Key: TypeAlias = tuple[str | int, ...]
"""Where in the data: keys of tables and indices of lists, from the root."""


class Lines(Protocol):
    """Knows on which line of the file a key stands."""

    def line(self, key: Key) -> int | None:
        """Return the 1-based line of `key`, or None where the file does not have it."""
        ...


class TomlLines:
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
        self._found: dict[Key, int] = {}
        self._lengths: dict[Key, int] = {}
        self._document()

    def line(self, key: Key) -> int | None:
        """See `Lines`."""
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

    def _note(self, key: Key, line: int) -> None:
        self._found.setdefault(key, line)

    def _document(self) -> None:
        table: Key = ()
        self._skip(self._BLANK)
        while self._at < len(self._text):
            if self._next_is("["):
                table = self._header()
            else:
                self._pair(table)
            self._skip(self._BLANK)

    def _header(self) -> Key:
        line = self._here()
        is_array = self._next_is("[[")
        self._at += 2 if is_array else 1
        parts = self._dotted_key()
        self._at += 2 if is_array else 1
        key: Key = ()
        for position, part in enumerate(parts):
            key = (*key, part)
            self._note(key, line)
            if is_array and position == len(parts) - 1:
                self._lengths[key] = self._lengths.get(key, 0) + 1
            if key in self._lengths:
                key = (*key, self._lengths[key] - 1)
        self._found[key] = line
        return key

    def _pair(self, table: Key) -> None:
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

    def _value(self, key: Key) -> None:
        if self._next_is("["):
            self._items("]", key, is_table=False)
        elif self._next_is("{"):
            self._items("}", key, is_table=True)
        elif self._next_is('"') or self._next_is("'"):
            self._skip(self._STRING)
        else:
            self._skip(self._BARE_VALUE)

    def _items(self, end: str, key: Key, *, is_table: bool) -> None:
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


class YamlLines:
    """Finds lines in the tree of nodes, along the one path that is asked for."""

    def __init__(self, root: yaml.Node) -> None:
        self._root = root

    def line(self, key: Key) -> int | None:
        """See `Lines`."""
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
