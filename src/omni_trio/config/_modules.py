"""Modules that lie beside a pipeline file: how its functions are imported, and its workers' targets looked for."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from omni_trio.errors import ConfigError
from omni_trio.pipeline import nearest

__all__ = ["find_target", "import_function"]


def import_function(reference: str, folder: Path, resolve: Callable[[str], object]) -> None:
    """Have `resolve` import ``package.module:function``, with `folder` at the front of ``sys.path``.

    Raises:
        ConfigError: the module, or the function in it, can not be had; the cause is what importing it raised.
    """
    module = reference.partition(":")[0]
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
    _check_same_module(module.partition(".")[0], folder)
    try:
        resolve(reference)
    except ConfigError:
        raise
    except Exception as error:  # the user's module, which may raise anything
        raise ConfigError(f"importing {module!r} raised {type(error).__name__}: {error}") from error


def _check_same_module(name: str, folder: Path) -> None:
    """Refuse to take another folder's module of the same name, which Python would do without a word."""
    beside = folder / f"{name}.py"
    loaded = getattr(sys.modules.get(name), "__file__", None)
    if beside.is_file() and loaded is not None and not beside.samefile(loaded):
        raise ConfigError(f"module {name!r} was already imported from {loaded}; give {beside.name} another name")


def find_target(target: str, path: Sequence[str]) -> None:
    """Miss a worker's module now and not in its process; it is not imported, which may cost seconds.

    Args:
        target: ``package.module:name``.
        path: the folders in which the worker's process looks first.

    Raises:
        ConfigError: there is no such module.
    """
    name = target.partition(":")[0].partition(".")[0]
    if name in sys.modules or importlib.machinery.PathFinder.find_spec(name, list(path)) is not None:
        return
    if not name.isidentifier() or importlib.util.find_spec(name) is None:
        here = [entry.stem for folder in path for entry in Path(folder).glob("*.py")]
        raise ConfigError(f"there is no module {name!r} in {', '.join((*path, 'sys.path'))}{nearest(name, here)}")
