"""Write the keys of a pipeline and of a stage, as their classes have them, into the page about pipeline files.

python scripts/pipeline_keys.py            rewrite the page
python scripts/pipeline_keys.py --check    exit with 1 where the page is out of date
"""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import attrs
from generated import put_between_marks

from omni_trio import Pipeline, StageSpec

PAGE = Path(__file__).resolve().parents[1] / "docs" / "reference" / "pipeline-file.md"

WORDS = {
    "stages": "The [stages](#keys-of-a-stage), in order.",
    "name": "What the pipeline is called.",
}
"""For fields of the pipeline whose name says nearly all, so that the class has no words for them."""

STAGE_WORDS = {
    "kind": "What works in the stage: see [kinds](#kinds).",
    "replicas": "How many engines or workers share the stage's requests.",
    "devices_per_replica": "How many of `devices` one replica gets.",
}
"""The same for fields of a stage."""

TYPES = {
    "str": "text",
    "str | None": "text",
    "StageKind": "text",
    "Modality | None": "text",
    "Feed": "text",
    "Literal['raw', 'chat']": "text",
    "Literal['prefill', 'decode'] | None": "text",
    "Literal['params', 'content']": "text",
    "Literal['fail', 'skip']": "text",
    "Bridge | str | None": "text",
    "Expand | str | None": "text",
    "Placeholder | str | None": "text",
    "tuple[StageSpec, ...]": "list of tables",
    "int": "whole number",
    "float": "number",
    "bool": "boolean",
    "bool | None": "boolean",
    "Mapping[str, Any]": "table",
    "Mapping[str, str]": "table of texts",
    "tuple[str, ...]": "list of texts",
}


def docstrings(described: type) -> Iterator[tuple[str, str]]:
    """Yield each field of a class that has a docstring, with it on one line."""
    (class_,) = ast.parse(inspect.getsource(described)).body
    assert isinstance(class_, ast.ClassDef)
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


def table(described: type, words: Mapping[str, str]) -> str:
    """Return the table, one row per field that can be given."""
    words = {**words, **dict(docstrings(described))}
    lines = ["| key | type | default | meaning |", "|---|---|---|---|"]
    for field in attrs.fields(described):
        if not field.init:
            continue
        kind = TYPES[str(field.type).replace('"', "'")]
        meaning = words[field.name].replace("|", "\\|").replace("``", "`")
        lines.append(f"| `{field.name}` | {kind} | {default(field)} | {meaning} |")
    return "\n".join(lines)


def main() -> int:
    """Do what the command line says; return the exit status."""
    text = PAGE.read_text(encoding="utf-8")
    current = put_between_marks(text, "pipeline keys", table(Pipeline, WORDS))
    if (current := put_between_marks(current, "keys", table(StageSpec, STAGE_WORDS))) == text:
        return 0
    if "--check" in sys.argv[1:]:
        print(f"{PAGE} is out of date: run python scripts/pipeline_keys.py", file=sys.stderr)
        return 1
    PAGE.write_text(current, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
