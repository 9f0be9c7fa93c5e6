"""Functions of modules that lie beside a pipeline file: how they are imported."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

from omni_trio.errors import ConfigError

__all__ = ["import_function"]


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
    except SystemExit as error:
        raise ConfigError(f"importing {module!r} called sys.exit(); guard it with if __name__ == '__main__'") from error
    except Exception as error:  # the user's module, which may raise anything
        raise ConfigError(f"importing {module!r} raised {type(error).__name__}: {error}") from error


def _check_same_module(name: str, folder: Path) -> None:
    """Refuse to take another folder's module of the same name, which Python would do without a word."""
    beside = folder / f"{name}.py"
    loaded = getattr(sys.modules.get(name), "__file__", None)
    if beside.is_file() and loaded is not None and not beside.samefile(loaded):
        raise ConfigError(f"module {name!r} was already imported from {loaded}; give {beside.name} another name")
