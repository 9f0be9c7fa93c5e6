"""Make the two language models of this example: ``python make_models.py [FOLDER]``."""

from __future__ import annotations

import sys
from pathlib import Path

from omni_trio.testing.tiny_model import make_tiny_model

DEFAULT_FOLDER = Path(__file__).resolve().parents[2] / ".cache" / "omni-trio" / "tiny"


def make_models(folder: Path = DEFAULT_FOLDER) -> Path:
    """Make ``thinker`` and ``talker`` in `folder`, unless they are there; returns `folder`."""
    make_tiny_model(folder / "thinker", seed=1)
    make_tiny_model(folder / "talker", seed=2)
    return folder


if __name__ == "__main__":
    print(make_models(Path(sys.argv[1]) if len(sys.argv) > 1 else DEFAULT_FOLDER))
