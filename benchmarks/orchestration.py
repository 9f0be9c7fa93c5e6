"""The runtime over stages that cost nothing: latency and CPU per hop, throughput, idleness, aborts, ends.

Everything runs in one process, and each figure stands beside its floor from the same rounds. Compare ratios
within one run; absolute figures move with whatever else the machine does.
"""

from __future__ import annotations

import functools
import gc
import random
import time
from collections import Counter
from typing import Any

import trio
import trio.testing

from omni_trio.errors import RequestError
from omni_trio.messages import Output

from .fakes import PROMPT, FakeClient, fake_runtime
from .floors import Channels, calls
from .measure import median, percentile, slope, spread

clock, cpu_clock = time.perf_counter, time.process_time

__all__ = ["run"]


def _run(function: Any, *args: Any, **options: Any) -> Any:
    return trio.run(functools.partial(function, *args, **options))


async def _one_at_a_time(request, count: int, *, think: float, seed: int) -> tuple[list[float], float]:
    """Latencies in ms, and CPU per request in ms (think time costs none: it is slept)."""
    pauses = random.Random(seed)
    for index in range(30):
        await request(f"warm{index}")
    latencies, used = [], 0.0
    for index in range(count):
        if think:
            await trio.sleep(pauses.uniform(0, think))
        start, cpu = clock(), cpu_clock()
        await request(f"r{index}")
        latencies.append((clock() - start) * 1e3)
        used += cpu_clock() - cpu
    return latencies, used / count * 1e3


async def _hop(stages: int, count: int, *, think: float, seed: int, replicas: int = 1) -> tuple[list[float], float]:
    async with fake_runtime(stages, replicas=replicas) as (runtime, _):

        async def request(request_id: str) -> None:
            async with runtime.request(PROMPT, request_id=request_id) as opened:
                async for _ in opened:
                    pass

        return await _one_at_a_time(request, count, think=think, seed=seed)


async def _floor_hop(stages: int, count: int, *, think: float, seed: int) -> tuple[list[float], float]:
    channels = Channels(stages)
    async with trio.open_nursery() as nursery:
        await channels.run(nursery)
        result = await _one_at_a_time(channels.request, count, think=think, seed=seed)
        nursery.cancel_scope.cancel()
    return result


def _calls_hop(stages: int, count: int) -> float:
    request = calls(stages)
    start = clock()
    for index in range(count):
        request(f"r{index}")
    return (clock() - start) / count * 1e3


def hop(rounds: int, count: int) -> dict[str, Any]:
    """One request at a time through 1, 2, 3 and 5 stages."""
    depths = (1, 2, 3, 5)
    result: dict[str, Any] = {}
    for mode, think in (("think", 0.005), ("closed", 0.0)):
        ours: dict[int, list[tuple[list[float], float]]] = {stages: [] for stages in depths}
        floor: dict[int, list[tuple[list[float], float]]] = {stages: [] for stages in depths}
        for seed in range(rounds):
            for stages in depths:
                ours[stages].append(_run(_hop, stages, count, think=think, seed=seed))
                floor[stages].append(_run(_floor_hop, stages, count, think=think, seed=seed))
        rows = {}
        for stages in depths:
            latencies = [latency for run_, _ in ours[stages] for latency in run_]
            rows[str(stages)] = {
                "latency_ms": spread(latencies),
                "cpu_ms": median(cpu for _, cpu in ours[stages]),
                "floor_latency_ms": spread([latency for run_, _ in floor[stages] for latency in run_]),
                "floor_cpu_ms": median(cpu for _, cpu in floor[stages]),
                "calls_ms": _calls_hop(stages, 10_000),
            }
        result[mode] = rows
        result[f"{mode}_per_hop"] = {
            "latency_ms": slope(depths, [rows[str(stages)]["latency_ms"]["median"] for stages in depths]),
            "cpu_ms": slope(depths, [rows[str(stages)]["cpu_ms"] for stages in depths]),
            "floor_latency_ms": slope(depths, [rows[str(s)]["floor_latency_ms"]["median"] for s in depths]),
            "floor_cpu_ms": slope(depths, [rows[str(stages)]["floor_cpu_ms"] for stages in depths]),
        }
    return result


async def _flood(requests: int, *, mode: str, last_outputs: int) -> dict[str, float]:
    """All are admitted and held at the first stage, then let go at once."""
    async with fake_runtime(3, mode=mode, outputs=(1, 1, last_outputs)) as (runtime, clients):
        first: FakeClient = clients[0][0]
        first.held = True
        seen: Counter[str] = Counter()
        disorder = 0
        first_output = 0.0

        async def one(index: int) -> None:
            nonlocal disorder, first_output
            expected = [0, 0, 0]
            async with runtime.request(PROMPT, request_id=f"r{index}") as request:
                async for event in request:
                    if not first_output:
                        first_output = clock()
                    if isinstance(event, Output):
                        for token in event.token_ids:
                            disorder += token != expected[event.stage_id]
                            expected[event.stage_id] += 1
                        seen[f"r{index}"] += len(event.token_ids)

        async with trio.open_nursery() as nursery:
            for index in range(requests):
                nursery.start_soon(one, index)
            start = clock()
            await trio.testing.wait_all_tasks_blocked()
            admitted = clock() - start
            start, cpu = clock(), cpu_clock()
            first.release()
        wall, cpu = clock() - start, cpu_clock() - cpu
        outputs = requests * (2 + last_outputs)
        per_request = 2 + last_outputs
        stats = runtime.stats()
        return {
            "requests_per_s": requests / wall,
            "outputs_per_s": outputs / wall,
            "cpu_us_per_output": cpu / outputs * 1e6,
            "first_output_ms": (first_output - start) * 1e3,
            "admissions_per_s": requests / admitted,
            "lost": sum(max(0, per_request - seen[f"r{index}"]) for index in range(requests)),
            "duplicates": sum(max(0, seen[f"r{index}"] - per_request) for index in range(requests)),
            "disorder": disorder,
            "held_afterwards": stats.in_flight + sum(stage.requests for stage in stats.stages),
        }


async def _floor_flood(requests: int, last_outputs: int) -> float:
    """Seconds for the same outputs over channels: one send and one receive each, a task per request."""
    outputs = 2 + last_outputs
    channels = [trio.open_memory_channel[int](outputs) for _ in range(requests)]

    async def consume(receiver) -> None:
        async with receiver:
            async for _ in receiver:
                pass

    async with trio.open_nursery() as nursery:
        for _, receiver in channels:
            nursery.start_soon(consume, receiver)
        await trio.testing.wait_all_tasks_blocked()
        start = clock()
        for index in range(outputs):
            for sender, _ in channels:
                sender.send_nowait(index)
            await trio.lowlevel.checkpoint()
        for sender, _ in channels:
            sender.close()
    return clock() - start


def throughput(rounds: int, requests: int) -> dict[str, Any]:
    """2,000 requests at once through three stages."""
    result = {}
    for name, mode, last_outputs in (("single", "instant", 1), ("step64", "step", 1), ("stream64", "step", 64)):
        runs, floors = [], []
        for _ in range(rounds):
            runs.append(_run(_flood, requests, mode=mode, last_outputs=last_outputs))
            floors.append(trio.run(_floor_flood, requests, last_outputs))
        result[name] = {key: median(run_[key] for run_ in runs) for key in runs[0]}
        for key in ("lost", "duplicates", "disorder", "held_afterwards"):
            result[name][key] = max(run_[key] for run_ in runs)
        result[name]["floor_outputs_per_s"] = requests * (2 + last_outputs) / median(floors)
    return result


def replicas(rounds: int, count: int, sizes: tuple[int, ...]) -> dict[str, Any]:
    """Three stages of 1 to 256 replicas each: what idle replicas cost a request."""
    result: dict[str, Any] = {}
    runs: dict[int, list[tuple[list[float], float]]] = {size: [] for size in sizes}
    for seed in range(rounds):
        for size in sizes:
            runs[size].append(_run(_hop, 3, count, think=0.0, seed=seed, replicas=size))
    for size in sizes:
        result[str(size)] = {
            "latency_ms": spread([latency for run_, _ in runs[size] for latency in run_]),
            "cpu_ms": median(cpu for _, cpu in runs[size]),
        }
    return result


class _Steps(trio.abc.Instrument):
    def __init__(self) -> None:
        self.count = 0

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        self.count += 1


async def _idle(size: int, seconds: float) -> dict[str, float]:
    async with fake_runtime(3, replicas=size):
        await trio.testing.wait_all_tasks_blocked()
        steps = _Steps()
        trio.lowlevel.add_instrument(steps)
        cpu = cpu_clock()
        await trio.sleep(seconds)
        cpu = cpu_clock() - cpu
        trio.lowlevel.remove_instrument(steps)
        # One step is this task's own wake-up.
        return {"share_of_a_core": cpu / seconds, "scheduler_steps": steps.count - 1}


async def _abort(requests: int, aborts: int, *, busy: bool) -> list[float]:
    """Milliseconds from the call of abort until the stage has heard of it."""
    async with fake_runtime(1, mode="step", outputs=(0,)) as (runtime, clients):
        client: FakeClient = clients[0][0]
        client.held = not busy

        async def one(index: int) -> None:
            try:
                async with runtime.request(PROMPT, request_id=f"r{index}") as request:
                    async for _ in request:
                        pass
            except RequestError:
                return

        latencies = []
        async with trio.open_nursery() as nursery:
            for index in range(requests):
                nursery.start_soon(one, index)
            if busy:
                await trio.sleep(0.3)
            else:
                await trio.testing.wait_all_tasks_blocked()
            for index in range(aborts):
                await trio.sleep(0.01 if busy else 0.001)
                start = clock()
                await runtime.abort(f"r{index}")
                latencies.append((client.aborted_at[-1] - start) * 1e3)
            await runtime.abort([f"r{index}" for index in range(aborts, requests)])
        return latencies


async def _teardown(requests: int) -> dict[str, float]:
    ends: Counter[str] = Counter()
    async with trio.open_nursery() as nursery:
        async with fake_runtime(3, mode="step", outputs=(1, 0, 1)) as (runtime, clients):
            clients[1][0].held = True

            async def one() -> None:
                try:
                    async with runtime.request(PROMPT) as request:
                        async for _ in request:
                            pass
                except RequestError as error:
                    ends[type(error).__name__] += 1

            for _ in range(requests):
                nursery.start_soon(one)
            await trio.testing.wait_all_tasks_blocked()
            start = clock()
        took = clock() - start
    return {"ms": took * 1e3, "told": ends["ShutDown"], "of": requests}


async def _per_output(requests: int, outputs: int) -> float:
    """CPU in microseconds per output, with that many requests in flight."""
    each = max(1, outputs // requests)
    async with fake_runtime(1, mode="step", outputs=(each,)) as (runtime, clients):
        client: FakeClient = clients[0][0]
        client.held = True
        async with trio.open_nursery() as nursery:
            for _ in range(requests):
                nursery.start_soon(runtime.generate, PROMPT)
            await trio.testing.wait_all_tasks_blocked()
            cpu = cpu_clock()
            client.release()
        return (cpu_clock() - cpu) / (requests * each) * 1e6


def run(*, quick: bool = False) -> dict[str, Any]:
    """Measure everything; `quick` is for trying the benchmark itself."""
    gc.collect()
    gc.freeze()
    rounds, count = (1, 20) if quick else (3, 200)
    requests = 100 if quick else 2_000
    sizes = (1, 4) if quick else (1, 4, 16, 64, 256)
    loads = (10, 100) if quick else (100, 1_000, 10_000)
    window = 0.2 if quick else 2.0
    result: dict[str, Any] = {
        "hop": hop(rounds, count),
        "throughput": throughput(rounds, requests),
        "replicas": replicas(rounds, count, sizes),
        "idle": {str(size): trio.run(_idle, size, window) for size in sizes},
        "in_flight": {
            str(load): median(trio.run(_per_output, load, 200 if quick else 200_000) for _ in range(rounds))
            for load in loads
        },
    }
    for name, busy in (("quiet", False), ("busy", True)):
        latencies = _run(_abort, requests // 2, 10 if quick else 100, busy=busy)
        result[f"abort_{name}_ms"] = {"median": median(latencies), "p99": percentile(latencies, 99)}
    runs = [trio.run(_teardown, requests // 2) for _ in range(rounds)]
    result["teardown"] = {
        "ms": median(r["ms"] for r in runs),
        "told": min(r["told"] for r in runs),
        "of": requests // 2,
    }
    return result
