"""``python -m benchmarks [--quick] [--only orchestration|engine] [--out FOLDER]``: measure and write the report."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from . import engine, orchestration
from .measure import machine
from .report import markdown


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="try the benchmark itself; its figures mean nothing")
    parser.add_argument("--only", choices=("orchestration", "engine"))
    parser.add_argument("--out", type=Path, default=Path("out/bench"), help="folder of results.json and report.md")
    arguments = parser.parse_args()
    result: dict[str, Any] = {"machine": machine()}
    if arguments.only != "engine":
        result["orchestration"] = orchestration.run(quick=arguments.quick)
    if arguments.only != "orchestration":
        result["engine"] = engine.run(rounds=1 if arguments.quick else 2)
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "results.json").write_text(json.dumps(result, indent=2) + "\n")
    page = markdown(result)
    (arguments.out / "report.md").write_text(page)
    print(page)


main()
