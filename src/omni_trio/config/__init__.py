"""A pipeline as a file: TOML or YAML in, `Pipeline` out, and back to plain data.

Both formats have the same structure: the fields of `Pipeline` as keys, and ``stages``, a list of tables whose keys
are the fields of `StageSpec`. All that is wrong with a file is a `ConfigError` that names the file, the line, the
dotted key, what was expected there and what was found.
"""

from __future__ import annotations

import os
from collections.abc import Callable

from omni_trio.errors import ConfigError
from omni_trio.pipeline import Pipeline

from ._dump import dump_pipeline
from ._parse import parse, read_text
from ._reader import Reader

__all__ = ["dump_pipeline", "load_pipeline"]


def load_pipeline(path: str | os.PathLike[str], *, check: Callable[[Pipeline], object] | None = None) -> Pipeline:
    """Read a pipeline from a ``.toml``, ``.yaml`` or ``.yml`` file.

    * ``${NAME}`` in any text value becomes that environment variable, ``${NAME:-default}`` the default where the
      variable is unset or empty; ``$${`` stands for a literal ``${``.
    * A ``model`` that names something existing relative to the file's folder becomes an absolute path. One that
      begins with ``/``, ``./``, ``../`` or ``~`` has to; any other is passed on as it is.
    * Modules that lie next to the file can be named in ``bridge``, ``expand``, ``placeholder`` and ``target``: the
      file's folder goes to the front of this process's ``sys.path`` where one of the first three needs it, and into
      `StageSpec.path` of worker and diffusion stages whose table has no ``path`` of its own. Relative entries of a
      given ``path`` count from the file's folder.

    Bridges and the other two functions are imported, and so run their modules. A worker's target is looked for in the
    source of its module, which is not run: a name that the module makes while it runs is taken to be there.

    Args:
        path: the file. It is read at once, so call this before `trio.run` or in a thread.
        check: looks at the pipeline further. A `ConfigError` of its own gets the file, and the line of its key.

    Raises:
        ConfigError: the file can not be read, is not valid TOML or YAML, or does not describe a valid pipeline.
    """
    file = os.fspath(path)
    text = read_text(file)
    if not text.strip():
        raise ConfigError("the file is empty; it needs a 'stages' list", file=file, line=1)
    data, lines = parse(text, file)
    return Reader(file, lines).pipeline(data, check)
