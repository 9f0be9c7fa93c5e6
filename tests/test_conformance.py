"""The kit for clients finds every planted bug, by the number of its rule, and nothing in what is right."""

from __future__ import annotations

import pytest
import trio
from hypothesis import find, given, settings

from conformance_clients import PLANTED, Echo, LeaksASlot, LosesOnCancel, RaisesOnUnknown, deaf, factory, full, mortal
from omni_trio.messages import StageInput
from omni_trio.testing import conformance
from omni_trio.testing.conformance import (
    CLIENT_RULES,
    ConformanceError,
    check_stage_client,
    run_client_program,
)
from omni_trio.testing.conformance.strategies import client_programs
from support import run


def echo(index):
    return StageInput(token_ids=tuple(range(10 * index + 1, 10 * index + 5)))


def said(index):
    return echo(index).token_ids


EVERYTHING = {
    "request": echo,
    "long_params": {"repeat": 10_000},
    "bad_params": [5],
    "bad_inputs": [StageInput(text="no tokens")],
    "slow_method": ("wait", (1000,)),
    "expect": said,
}


async def check(kind, **options):
    given = {**EVERYTHING, "params": {}, **options}
    return await check_stage_client(factory(kind), make_full=full(kind), make_dead=mortal(kind), **given)


def found(kind, **options) -> ConformanceError:
    async def main():
        with pytest.raises(ConformanceError) as caught:
            await check(kind, **options)
        return caught.value

    return run(main)


def test_a_client_that_keeps_its_contract_passes():
    summary = run(lambda: check(Echo))
    assert [rule.number for rule in summary.not_checked] == [12, 13]
    assert {rule.number for rule in summary.kept} == set(CLIENT_RULES) - {12, 13}


@pytest.mark.parametrize("seed", range(5))
def test_it_passes_whatever_is_drawn(seed):
    run(lambda: check(Echo, seed=seed, programs=100))


@pytest.mark.parametrize(("kind", "number"), PLANTED.items(), ids=lambda value: getattr(value, "__name__", value))
def test_a_planted_bug_is_found(kind, number):
    error = found(kind)
    assert error.rule.number == number, str(error)
    assert str(error).startswith(f"rule {number}: {CLIENT_RULES[number].text}")


def test_the_example_is_the_shortest_there_is():
    """A slot leaked per abort: as many aborts as there are slots, and one request more, which the end asks for."""
    text = str(found(LeaksASlot))
    aborted = [line for line in text.splitlines() if "Abort(" in line]
    assert text.count("Submit(") == 4
    assert sum(line.count(",") for line in aborted) <= 2 + 4
    assert "await run_client_program(make, program" in text
    assert "It is written in omni_trio.stages.StageClient.abort." in text


def test_an_example_fails_again_when_it_is_pasted():
    error = found(LosesOnCancel)
    scope: dict = {}
    exec(error.example.rpartition("\nawait")[0], dict(vars(conformance)), scope)

    async def main():
        with pytest.raises(ConformanceError) as caught:
            await run_client_program(
                factory(LosesOnCancel), scope["program"], request=echo, long_params={"repeat": 10_000}, expect=said
            )
        return caught.value

    assert run(main).rule.number == 6


def test_equal_seeds_find_the_same_example():
    assert found(LosesOnCancel, seed=3).example == found(LosesOnCancel, seed=3).example


def test_a_rule_can_be_left_out_with_a_reason():
    async def main():
        return await check(LosesOnCancel, skip={6: "receives are never cancelled here"})

    summary = run(main)
    assert "not checked: rule 6 (receives are never cancelled here)" in str(summary)
    assert 6 not in {rule.number for rule in summary.kept}


@pytest.mark.parametrize("skip", [{99: "there is none"}, {6: " "}])
def test_what_is_left_out_must_exist_and_have_a_reason(skip):
    with pytest.raises(ValueError, match="skip"):
        run(lambda: check(Echo, skip=skip))


def test_a_start_that_can_not_be_cancelled_is_found():
    async def main():
        with pytest.raises(ConformanceError) as caught:
            await check_stage_client(deaf, programs=0, request=echo)
        return caught.value

    assert run(main).rule.number == 25


def test_what_was_not_given_is_said_to_be_not_checked():
    async def main():
        return await check_stage_client(factory(), request=echo, deterministic=False, programs=5)

    summary = run(main)
    assert {rule.number: why for rule, why in summary.not_checked.items()} == {
        4: "it needs deterministic or expect",
        5: "it needs deterministic or expect",
        12: "it needs session",
        13: "it needs session",
        16: "it needs bad_params",
        17: "it needs bad_inputs",
        21: "it needs make_dead",
        22: "it needs make_dead",
        23: "it needs make_dead",
    }


def test_the_block_of_a_client_that_breaks_down_is_told_and_nothing_hangs():
    class BreaksDown(Echo):
        async def work(self, request, scope):
            raise OSError("the engine is on fire")

    error = found(BreaksDown)
    assert error.rule.number == 26
    assert "OSError: the engine is on fire" in str(error)


def test_it_runs_on_a_real_clock_and_in_the_scope_of_its_caller():
    async def main():
        with trio.fail_after(60):
            await check_stage_client(
                factory(), request=echo, programs=3, operations=4, long_params={"repeat": 1000}, quiet=0.01, storm=8
            )
        with trio.move_on_after(0.05) as scope:
            while True:
                await check_stage_client(factory(), request=echo)
        assert scope.cancelled_caught

    trio.run(main)


@given(client_programs(bad_inputs=1))
@settings(max_examples=30, deadline=None)
def test_hypothesis_can_draw_the_programs(program):
    run(
        lambda: run_client_program(
            factory(),
            program,
            request=echo,
            long_params={"repeat": 10_000},
            bad_inputs=EVERYTHING["bad_inputs"],
            deterministic=False,
        )
    )


def test_hypothesis_finds_and_shrinks_what_the_kit_finds():
    def fails(program) -> bool:
        try:
            run(lambda: run_client_program(factory(RaisesOnUnknown), program, request=echo, deterministic=False))
        except ConformanceError as error:
            return error.rule.number == 9
        return False

    smallest = find(client_programs(), fails, settings=settings(max_examples=500, database=None, derandomize=True))
    assert len(smallest) <= 2
