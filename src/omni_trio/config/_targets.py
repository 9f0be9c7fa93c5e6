"""Whether a worker's target is there, told without importing its module, which may cost seconds."""

from __future__ import annotations

import ast
import importlib.util
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

from omni_trio.errors import ConfigError
from omni_trio.pipeline import nearest

__all__ = ["find_target"]


def find_target(target: str, path: Sequence[str]) -> None:
    """Miss a worker's target now and not in its process, as far as it can be missed.

    Names that a module makes while it runs can not be known; they are taken to be there.

    Args:
        target: ``package.module:name``.
        path: the folders in which the worker's process looks first.

    Raises:
        ConfigError: there is no such module, it is not valid Python, or nothing in it has the name.
    """
    module, _, dotted = target.partition(":")
    spec = _find_module(module, path)
    tree = None if spec is None else _parse(spec)
    if spec is None or tree is None or _is_made_at_run_time(tree):
        return
    name = dotted.partition(".")[0]
    names = _Names(tree).found
    if not name or name in names or name.startswith("__") or _is_submodule(spec, name):
        return
    raise ConfigError(f"module {module!r} has no {name!r}{nearest(name, names)} ({spec.origin})")


def _find_module(module: str, path: Sequence[str]) -> ModuleSpec | None:
    """Return where a module is; None where only importing what is above it could tell."""
    top, *parts = module.split(".")
    spec = _find_top(top, path)
    name = top
    for part in parts:
        if spec is None:
            return None
        name = f"{name}.{part}"
        inner = PathFinder.find_spec(name, list(spec.submodule_search_locations or ()))
        if inner is None:
            tree = _parse(spec)
            if name in sys.modules or tree is None or _is_made_at_run_time(tree):
                return None
            raise ConfigError(f"there is no module {part!r} in {spec.name!r} ({spec.origin})")
        spec = inner
    return spec


def _find_top(name: str, path: Sequence[str]) -> ModuleSpec | None:
    if (spec := PathFinder.find_spec(name, list(path))) is not None:
        return spec
    if (loaded := sys.modules.get(name)) is not None:
        spec = loaded.__spec__
        return spec if spec is not None and spec.name == name else None  # the main module has another's
    if not name.isidentifier() or (spec := importlib.util.find_spec(name)) is None:
        here = [entry.stem for folder in path for entry in Path(folder).glob("*.py")]
        raise ConfigError(f"there is no module {name!r} in {', '.join((*path, 'sys.path'))}{nearest(name, here)}")
    return spec


def _parse(spec: ModuleSpec) -> ast.Module | None:
    """Return what stands in a module, or None where it has no source."""
    if spec.origin is None or not spec.origin.endswith(".py") or not Path(spec.origin).is_file():
        return None
    try:
        return ast.parse(Path(spec.origin).read_bytes(), spec.origin)
    except (SyntaxError, ValueError) as error:  # a null byte is a ValueError
        raise ConfigError(f"module {spec.name!r} is not valid Python: {error}") from error


_MAKERS = frozenset(("globals", "locals", "vars", "exec", "setattr", "__path__"))


def _is_made_at_run_time(tree: ast.Module) -> bool:
    """Whether a module may have names, or modules in it, that do not stand in its source."""
    for node in ast.walk(tree):
        match node:
            case ast.ImportFrom(names=[ast.alias(name="*")]) | ast.ImportFrom(module="sys"):
                return True
            case ast.Attribute(attr="__dict__") | ast.Attribute(value=ast.Name(id="sys"), attr="modules"):
                return True
            case ast.Name(id=word) if word in _MAKERS:
                return True
    return any(isinstance(node, ast.FunctionDef) and node.name == "__getattr__" for node in tree.body)


def _is_submodule(spec: ModuleSpec, name: str) -> bool:
    locations = spec.submodule_search_locations
    return locations is not None and PathFinder.find_spec(f"{spec.name}.{name}", list(locations)) is not None


class _Names(ast.NodeVisitor):
    """The names that a module binds at its top, in any branch."""

    def __init__(self, tree: ast.Module) -> None:
        self.found: set[str] = set()
        self.visit(tree)

    def _definition(self, node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> None:
        self.found.add(node.name)
        # What is inside is not at the top, unless it says so.
        self.found.update(name for inner in ast.walk(node) if isinstance(inner, ast.Global) for name in inner.names)

    visit_FunctionDef = visit_AsyncFunctionDef = visit_ClassDef = _definition  # noqa: N815 - ast's names

    def _import(self, node: ast.Import | ast.ImportFrom) -> None:
        self.found.update(alias.asname or alias.name.partition(".")[0] for alias in node.names)

    visit_Import = visit_ImportFrom = _import  # noqa: N815 - as above

    def visit_Name(self, node: ast.Name) -> None:
        if isinstance(node.ctx, ast.Store):
            self.found.add(node.id)

    def visit_MatchAs(self, node: ast.MatchAs) -> None:
        if node.name is not None:
            self.found.add(node.name)
        self.generic_visit(node)
