"""The benchmark itself: that it measures what it says, not how fast anything is."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_a_quick_run_loses_nothing_and_makes_a_whole_report(tmp_path: Path):
    command = [sys.executable, "-m", "benchmarks", "--quick", "--only", "orchestration", "--out", str(tmp_path)]
    process = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert process.returncode == 0, process.stderr
    result = json.loads((tmp_path / "results.json").read_text())["orchestration"]
    for load in result["throughput"].values():
        assert (load["lost"], load["duplicates"], load["disorder"], load["held_afterwards"]) == (0, 0, 0, 0)
    assert result["teardown"]["told"] == result["teardown"]["of"]
    assert all(size["scheduler_steps"] == 0 for size in result["idle"].values())
    assert (tmp_path / "report.md").read_text() == process.stdout.removesuffix("\n")
