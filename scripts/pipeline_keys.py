"""Write the keys of a stage, as `omni_trio.StageSpec` has them, into the page about pipeline files.

python scripts/pipeline_keys.py            rewrite the page
python scripts/pipeline_keys.py --check    exit with 1 where the page is out of date
"""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Iterator
from pathlib import Path

import attrs
from generated import put_between_marks

import omni_trio.pipeline
from omni_trio import StageSpec

PAGE = Path(__file__).resolve().parents[1] / "docs" / "reference" / "pipeline-file.md"

WORDS = {
    "kind": "What works in the stage: see [kinds](#kinds).",
    "replicas": "How many engines or workers share the stage's requests.",
    "devices_per_replica": "How many of `devices` one replica gets.",
}
"""For fields whose name says nearly all, so that the class has no words for them."""

TYPES = {
    "str": "text",
    "str | None": "text",
    "StageKind": "text",
    "Modality | None": "text",
    "Literal['raw', 'chat']": "text",
    "Bridge | str | None": "text",
    "int": "whole number",
    "float": "number",
    "bool": "boolean",
    "bool | None": "boolean",
    "Mapping[str, Any]": "table",
    "Mapping[str, str]": "table of texts",
    "tuple[str, ...]": "list of texts",
}


def docstrings() -> Iterator[tuple[str, str]]:
    """Yield each field of `StageSpec` that has a docstring, with it on one line."""
    (class_,) = (
        node
        for node in ast.parse(inspect.getsource(omni_trio.pipeline)).body
        if isinstance(node, ast.ClassDef) and node.name == "StageSpec"
    )
    for field, after in zip(class_.body, class_.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
            assert isinstance(field.target, ast.Name)  # a class body annotates names only
            yield field.target.id, " ".join(str(after.value.value).split())


def default(field: attrs.Attribute) -> str:
    """Return a field's default as a file would have it."""
    if field.default is attrs.NOTHING:
        return "**required**"
    if isinstance(field.default, attrs.Factory) or field.default == ():  # type: ignore[arg-type] # a class, for attrs
        return "empty"
    if field.default is None:
        return "–"
    return f"`{str(field.default).lower() if isinstance(field.default, bool) else field.default}`"


def table() -> str:
    """Return the table, one row per field."""
    words = {**WORDS, **dict(docstrings())}
    lines = ["| key | type | default | meaning |", "|---|---|---|---|"]
    for field in attrs.fields(StageSpec):
        kind = TYPES[str(field.type).replace('"', "'")]
        meaning = words[field.name].replace("|", "\\|").replace("``", "`")
        lines.append(f"| `{field.name}` | {kind} | {default(field)} | {meaning} |")
    return "\n".join(lines)


def main() -> int:
    """Do what the command line says; return the exit status."""
    text = PAGE.read_text(encoding="utf-8")
    if (current := put_between_marks(text, "keys", table())) == text:
        return 0
    if "--check" in sys.argv[1:]:
        print(f"{PAGE} is out of date: run python scripts/pipeline_keys.py", file=sys.stderr)
        return 1
    PAGE.write_text(current, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
