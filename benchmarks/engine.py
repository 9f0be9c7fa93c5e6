"""One real vLLM engine behind our runtime, beside the same engine behind vLLM's own AsyncLLM.

The sides take turns, each in a fresh process, so that neither pays for the other's imports and a noisy minute hits
all of them. The figures of one repeat are of one side alone; compare medians within one run.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from .engine_side import SIDES
from .measure import median

__all__ = ["run"]

TIMEOUT = 300


def run(*, rounds: int = 2) -> dict[str, Any]:
    """Measure every side `rounds` times in turns; medians per side and load."""
    from omni_trio.testing.tiny_model import make_tiny_model

    rows: dict[str, dict[int, list[dict[str, float]]]] = {side: {} for side in SIDES}
    with tempfile.TemporaryDirectory() as folder:
        model = make_tiny_model(Path(folder) / "model")
        for _ in range(rounds):
            for side in SIDES:
                for row in _side(side, str(model)):
                    rows[side].setdefault(int(row["requests"]), []).append(row)
    return {
        side: {
            str(load): {key: median(row[key] for row in repeats) for key in repeats[0] if key != "requests"}
            for load, repeats in loads.items()
        }
        for side, loads in rows.items()
    }


def _side(side: str, model: str) -> list[dict[str, float]]:
    process = subprocess.run(
        [sys.executable, "-m", "benchmarks.engine_side", side, model],
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
        check=False,
    )
    if process.returncode:
        raise RuntimeError(f"{side} ended with {process.returncode}:\n{process.stderr[-4000:]}")
    return [json.loads(line) for line in process.stdout.splitlines() if line.startswith("{")]
