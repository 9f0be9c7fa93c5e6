"""``python -m benchmarks.routing_core``: how many facts a second the pure core takes, mode by mode.

A fact is one call of a `RequestFlow`: an output, the end of a stage, a bridge's result. Flows are made and released
within the time that is taken; what the runtime does with the decisions is not.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping

from omni_trio.pipeline import Pipeline, StageSpec
from omni_trio.routing import RequestFlow, RoutePlan

from .measure import median

__all__ = ["measure"]

TOKENS = 100
KV = {"remote_request_id": "p"}


def _stage(name: str, **fields) -> StageSpec:
    return StageSpec(name=name, kind="simulated", **fields)


def _no_companions(context):
    return ()


def _ends(flow: RequestFlow, stages: int) -> int:
    """Each stage ends and is forwarded; returns how many facts that took."""
    flow.output(0, finished=True)
    for stage_id in range(1, stages):
        flow.bridged(stage_id, made_input=True, last=True)
        flow.output(stage_id, finished=True)
    flow.release()
    return 2 * stages


def _chain() -> Callable[[], int]:
    plan = RoutePlan(Pipeline([_stage("a"), _stage("b"), _stage("c")]), None)

    def request() -> int:
        flow = RequestFlow(plan)
        flow.start()
        return 1 + _ends(flow, 3)

    return request


def _tokens() -> Callable[[], int]:
    plan = RoutePlan(Pipeline([_stage("a"), _stage("b")]), None)

    def request() -> int:
        flow = RequestFlow(plan)
        flow.start()
        for _ in range(TOKENS):
            flow.output(0, finished=False)
        return 1 + TOKENS + _ends(flow, 2)

    return request


def _pieces() -> Callable[[], int]:
    plan = RoutePlan(Pipeline([_stage("a"), _stage("b", feed="output")]), None)

    def request() -> int:
        flow = RequestFlow(plan)
        flow.start()
        for _ in range(TOKENS):
            flow.output(0, finished=False)
            flow.bridged(1, made_input=True, last=False)
        return 1 + 2 * TOKENS + _ends(flow, 2)

    return request


def _session() -> Callable[[], int]:
    plan = RoutePlan(Pipeline([_stage("a"), _stage("b", feed="connector"), _stage("c")]), None)

    def request() -> int:
        flow = RequestFlow(plan, session=True)
        flow.start(last=False)
        for _ in range(TOKENS):
            flow.output(0, finished=False, segment_end=True)
            flow.output(1, finished=False, segment_end=True)
            flow.bridged(2, made_input=True, last=False, segment_end=True)
            flow.more_input(last=False)
        flow.release()
        return 2 + 4 * TOKENS

    return request


def _companions() -> Callable[[], int]:
    plan = RoutePlan(Pipeline([_stage("a"), _stage("b", feed="kv")], expand=_no_companions), None)

    def request() -> int:
        flow = RequestFlow(plan, roles=("cond", "uncond"))
        flow.start()
        flow.output(0, finished=False, kv_ready=True)
        flow.companion_output("cond", finished=True)
        flow.companion_output("uncond", finished=True)
        flow.bridged(1, made_input=True, last=True, saw_end=False)
        flow.output(0, finished=True)
        flow.output(1, finished=True)
        flow.release()
        return 8

    return request


def _pair() -> Callable[[], int]:
    plan = RoutePlan(Pipeline([_stage("p", role="prefill"), _stage("d", role="decode")]), None)

    def request() -> int:
        flow = RequestFlow(plan)
        flow.start()
        flow.output(0, finished=True, kv_params=KV)
        flow.taken_over()
        flow.output(1, finished=True)
        flow.release()
        return 5

    return request


REQUESTS: Mapping[str, Callable[[], Callable[[], int]]] = {
    "a chain of three": _chain,
    "tokens that nobody waits for": _tokens,
    "a piece per token": _pieces,
    "a session with a connector": _session,
    "companions and an early start": _companions,
    "prefill and decode": _pair,
}


def measure(*, facts: int = 200_000, rounds: int = 5) -> dict[str, float]:
    """Return facts a second for each kind of request: the median of some rounds of so many facts."""
    rates = {}
    for name, make in REQUESTS.items():
        request = make()
        per_request = request()
        count = max(1, facts // per_request)
        taken = []
        for _ in range(rounds):
            gc.collect()
            begin = time.perf_counter()
            for _ in range(count):
                request()
            taken.append(count * per_request / (time.perf_counter() - begin))
        rates[name] = median(taken)
    return rates


def main() -> None:
    """Measure and print."""
    for name, rate in measure().items():
        print(f"{name:32} {rate:12,.0f} facts a second")


if __name__ == "__main__":
    main()
