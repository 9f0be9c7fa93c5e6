"""The figures as a page."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

__all__ = ["markdown"]


def _table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    head = list(head)
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _n(value: float, digits: int = 3) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.{digits}g}"


def markdown(result: Mapping[str, Any]) -> str:
    """Make the page out of what `python -m benchmarks` wrote."""
    parts = [_preface(result["machine"])]
    if (orchestration := result.get("orchestration")) is not None:
        parts += [_hop(orchestration), _throughput(orchestration), _scale(orchestration), _control(orchestration)]
    if (engine := result.get("engine")) is not None:
        parts.append(_engine(engine))
    return "\n\n".join(parts) + "\n"


def _preface(machine: Mapping[str, Any]) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    return (
        f"Measured on {machine['date']} on {machine['cores']} cores ({machine['processor']}), "
        f"Python {machine['python']}, {versions}. The machine was shared: compare ratios, not absolute figures.\n\n"
        "Made by `make bench`; the figures themselves are in `benchmarks/results.json`."
    )


def _hop(result: Mapping[str, Any]) -> str:
    rows = []
    for mode in ("think", "closed"):
        for stages, row in result["hop"][mode].items():
            ours, floor = row["latency_ms"], row["floor_latency_ms"]
            rows.append(
                [
                    f"{stages}, {mode}",
                    f"{_n(ours['median'])} / {_n(ours['p99'])}",
                    _n(row["cpu_ms"]),
                    _n(floor["median"]),
                    _n(row["floor_cpu_ms"]),
                    f"{ours['median'] / floor['median']:.1f}",
                ]
            )
        per = result["hop"][f"{mode}_per_hop"]
        rows.append(
            [
                f"one more hop, {mode}",
                _n(per["latency_ms"]),
                _n(per["cpu_ms"]),
                _n(per["floor_latency_ms"]),
                _n(per["floor_cpu_ms"]),
                f"{per['latency_ms'] / per['floor_latency_ms']:.1f}",
            ]
        )
    return (
        "## One request at a time\n\n"
        "Through 1, 2, 3 and 5 stages that answer at once, one output each; from the call of `runtime.request` until "
        "its block is left. *think*: a pause of 0 to 5 ms before each request; *closed*: none. The floor is one bare "
        "trio task per stage between memory channels: no ids, routing, errors or ends. Milliseconds.\n\n"
        + _table(["stages", "latency median / p99", "CPU", "floor latency", "floor CPU", "ratio"], rows)
    )


def _throughput(result: Mapping[str, Any]) -> str:
    rows = []
    for name, row in result["throughput"].items():
        rows.append(
            [
                name,
                _n(row["requests_per_s"]),
                _n(row["outputs_per_s"]),
                _n(row["cpu_us_per_output"]),
                _n(row["first_output_ms"]),
                _n(row["floor_outputs_per_s"]),
                f"{row['floor_outputs_per_s'] / row['outputs_per_s']:.1f}",
                str(row["lost"] + row["duplicates"] + row["disorder"] + row["held_afterwards"]),
            ]
        )
    return (
        "## 2,000 requests at once\n\n"
        "Three stages; all requests are admitted and held at the first, then let go together; each has a consumer of "
        "its own that reads every event. *single*: outputs come one by one; *step64*: 64 to a step; *stream64*: the "
        "last stage gives 64 outputs per request. The floor passes the same number of items over one channel per "
        "request.\n\n"
        + _table(
            [
                "load",
                "requests/s",
                "outputs/s",
                "CPU µs per output",
                "first output ms",
                "floor outputs/s",
                "floor / ours",
                "lost + doubled + disordered + left over",
            ],
            rows,
        )
    )


def _scale(result: Mapping[str, Any]) -> str:
    sizes = result["replicas"]
    one = next(iter(sizes.values()))
    replica_rows = [
        [
            size,
            _n(row["latency_ms"]["median"]),
            _n(row["cpu_ms"]),
            f"{row['latency_ms']['median'] / one['latency_ms']['median']:.2f}",
            f"{result['idle'][size]['share_of_a_core']:.2%}",
            str(result["idle"][size]["scheduler_steps"]),
        ]
        for size, row in sizes.items()
    ]
    loads = result["in_flight"]
    least = next(iter(loads.values()))
    return (
        "## What idle replicas and waiting requests cost\n\n"
        "Three stages with R replicas each: one request at a time, and no request at all.\n\n"
        + _table(
            ["R", "latency ms", "CPU ms", "latency over R = 1", "idle share of a core", "idle scheduler steps"],
            replica_rows,
        )
        + "\n\nCPU per output with that many requests in flight at one stage, steps of 64:\n\n"
        + _table(
            ["requests in flight", "CPU µs per output", "over the least"],
            [[load, _n(value), f"{value / least:.2f}"] for load, value in loads.items()],
        )
    )


def _control(result: Mapping[str, Any]) -> str:
    quiet, busy, end = result["abort_quiet_ms"], result["abort_busy_ms"], result["teardown"]
    return (
        "## Aborts and the end\n\n"
        + _table(
            ["what", "ms"],
            [
                ["abort reaches the stage, quiet, median / p99", f"{_n(quiet['median'])} / {_n(quiet['p99'])}"],
                ["the same while the stage streams without end", f"{_n(busy['median'])} / {_n(busy['p99'])}"],
                [f"leaving the runtime with {end['of']:,} requests in flight", _n(end["ms"])],
            ],
        )
        + f"\n\nTold of the end: {end['told']:,} of {end['of']:,} requests."
    )


def _engine(result: Mapping[str, Any]) -> str:
    names = {
        "ours_text": "omni_trio, text read",
        "ours_tokens": "omni_trio, tokens only",
        "asyncllm": "vLLM AsyncLLM (asyncio)",
    }
    rows = []
    for load in next(iter(result.values())):
        base = result["asyncllm"][load]
        for side, loads in result.items():
            row = loads[load]
            rows.append(
                [
                    load,
                    names[side],
                    f"{_n(row['tokens_per_s'])} ({row['tokens_per_s'] / base['tokens_per_s']:.2f})",
                    (
                        f"{_n(row['cpu_s_per_1000_tokens'])} "
                        f"({row['cpu_s_per_1000_tokens'] / base['cpu_s_per_1000_tokens']:.2f})"
                    ),
                    _n(row["first_ms"]),
                    f"{_n(row['gap_median_ms'])} / {_n(row['gap_p99_ms'])}",
                ]
            )
    return (
        "## One real engine\n\n"
        "A tiny model on one vLLM engine, one thread, greedy, 256 tokens for a single request and 128 otherwise; the "
        "same engine settings and the same executor in the engine core's own process on all sides. In brackets: the "
        "ratio to AsyncLLM in this run. CPU is the head process's, engine excluded. Both sides ask for deltas; where "
        "a consumer is late, both merge.\n\n"
        + _table(
            ["streams", "side", "tokens/s", "CPU s per 1,000 tokens", "first token ms", "gap median / p99 ms"], rows
        )
    )
