"""The harness is proved: every known bug is caught by a named check, and no check is there for nothing."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio
from hypothesis import HealthCheck, Phase, given, seed, settings
from msgspec.structs import replace

from omni_trio.errors import StageFailed
from omni_trio.messages import StageRequest
from omni_trio.runtime import _buggify
from omni_trio.runtime._admission import RequestOptions
from omni_trio.stages import ClientFactory, ReplicaContext, StageClient
from omni_trio.testing import (
    Chunk,
    Error,
    Finish,
    Hung,
    Plan,
    RequestPlan,
    Script,
    StagePlan,
    Stall,
    check_all,
    load_plan,
    run_simulation,
)
from omni_trio.testing._buggify import POINTS
from omni_trio.testing.checks import CHECKS
from omni_trio.testing.mutants import MUTANTS, Mutant
from omni_trio.testing.strategies import simulations
from support import P1, run, simulated

SCRIPTS = Path(__file__).resolve().parents[1] / "scripts"

SEEDS = 50
"""How many schedules are tried where a witness needs an unlucky one, and the runtime has changed its steps since."""

each_mutant = pytest.mark.parametrize("mutant", MUTANTS.values(), ids=list(MUTANTS))


def caught_by(plan: Plan, mutant: Mutant) -> tuple[str, ...]:
    with mutant.active():
        try:
            trace = run_simulation(plan)
        except Hung:
            return ("Hung",)
    return tuple(name for name, check in CHECKS.items() if check(trace) is not None)


def test_there_are_many():
    assert len(MUTANTS) >= 80


@each_mutant
def test_a_named_check_catches_it(mutant: Mutant):
    witness = mutant.witness
    plans = (witness, *(replace(witness, seed=witness.seed + more) for more in range(1, SEEDS)))
    assert any(caught_by(plan, mutant) for plan in plans), f"nothing catches {mutant.name!r}: {mutant.why}"


@each_mutant
def test_nothing_is_wrong_without_it(mutant: Mutant):
    check_all(run_simulation(mutant.witness))


@each_mutant
def test_it_is_gone_afterwards(mutant: Mutant):
    before = run_simulation(mutant.witness).to_json()
    caught_by(mutant.witness, mutant)
    assert run_simulation(mutant.witness).to_json() == before


@each_mutant
def test_it_says_what_it_is(mutant: Mutant):
    assert mutant.why.endswith(".")
    assert mutant.again
    assert all(number[0] in "UW" for number in mutant.again)
    assert load_plan(mutant.witness.to_json()) == mutant.witness


def test_it_is_taken_out_when_its_block_raises():
    mutant = MUTANTS["a slot stays taken"]
    with pytest.raises(ZeroDivisionError), mutant.active():
        raise ZeroDivisionError
    check_all(run_simulation(mutant.witness))


def test_every_check_is_needed_and_the_page_tells_so(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(SCRIPTS))
    monkeypatch.delitem(sys.modules, "mutant_matrix", raising=False)
    from mutant_matrix import PAGE, matrix, needed, page

    found = matrix()
    assert all(found.values()), "a mutant survives its witness: find another, or see what has become of its check"
    superfluous = [check for check, only in needed(found).items() if not only]
    assert not superfluous, "others catch all that these do"
    text = PAGE.read_text(encoding="utf-8")
    assert page(text, found) == text, "run python scripts/mutant_matrix.py"
    twice = {name: caught if caught != ("spread",) else ("spread", "model") for name, caught in found.items()}
    assert needed(twice)["spread"] == []


# ---- points at which tasks are held up


def draw(count: int, number: int, **options: object) -> list[Plan]:
    """Draw so many plans, always the same ones."""
    plans: list[Plan] = []

    @seed(number)
    @settings(
        max_examples=count,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(simulations(**options))
    def collect(plan: Plan) -> None:
        plans.append(plan)

    collect()
    return plans


def test_every_point_is_passed():
    points: Counter[str] = Counter()
    for plan in draw(60, 1):
        run_simulation(replace(plan, buggify=0.3), points=points)
    assert set(points) == set(POINTS)


def test_nothing_is_wrong_where_tasks_are_held_up():
    for plan in draw(200, 2):
        check_all(run_simulation(replace(plan, buggify=0.3)))


def test_what_chance_decides_it_decides_again():
    differs = False
    for drawn in draw(20, 3):
        plan = replace(drawn, buggify=0.5)
        assert run_simulation(plan).to_json() == run_simulation(plan).to_json()
        other = replace(plan, seed=plan.seed + 1)
        differs |= run_simulation(plan).entries != run_simulation(other).entries
    assert differs


def test_points_do_nothing_unless_asked():
    points: Counter[str] = Counter()
    plan = MUTANTS["a slot stays taken"].witness
    run_simulation(plan, points=points)
    assert not points
    run_simulation(replace(plan, buggify=1.0), points=points)
    assert points
    assert _buggify.hook is None


# ---- what was found by holding tasks up, without any


def slow_to_return(factory: ClientFactory) -> ClientFactory:
    """A stage that has a request, and may say something about it, a second before its submission comes back."""

    @asynccontextmanager
    async def opened(context: ReplicaContext) -> AsyncIterator[StageClient]:
        async with factory(context) as client:
            submit = client.submit

            async def slowly(request: StageRequest) -> None:
                await submit(request)
                await trio.sleep(1.0)

            client.submit = slowly
            yield client

    return opened


@pytest.mark.parametrize(
    ("decode", "more"),
    [((Error(),), {}), ((Chunk((1,)), Stall()), {"act": "leave", "when": 0.5})],
    ids=["fails", "is aborted"],
)
def test_a_decode_that_has_said_something_has_the_cache(decode: Script, more: dict):
    prefill = (Finish("length", (0,), {"remote_request_id": "p"}),)
    plan = Plan(
        stages=(StagePlan(), StagePlan(source=0, final=True)),
        requests=(RequestPlan(scripts=(prefill, decode), **more),),
        pair=True,
    )
    trace = run_simulation(plan, wrap=slow_to_return)
    assert any(entry.what == "says" and entry.stage == 1 for entry in trace.entries)
    check_all(trace, only=["kv_hold"])


def test_a_request_that_ends_before_its_task_runs_was_never_let_in():
    async def main():
        async with simulated(P1) as runtime:
            orchestrator = runtime._orchestrator
            options = RequestOptions(sampling_params=None, request_id="r", final_stage=None, deadline=None, priority=0)
            task = orchestrator.admit(None, options)
            task.end(StageFailed("something happened meanwhile"))
            await task.done.wait()
            assert not task.admitted
            return runtime.stats()

    stats = run(main)
    assert (stats.rejected, stats.failed) == (1, 0)
