"""Each rule is needed, and the checks see when it is broken: the tables, changed one rule at a time."""

from __future__ import annotations

import random

import pytest

from omni_trio.pipeline import Pipeline
from omni_trio.routing import TABLES, ProtocolError, Tables
from routing_cases import Case, any_case, no_companions
from routing_facts import KV
from routing_mutants import MUTANTS, Mutant, all_changes
from routing_world import World, play
from support import P3, stage

WALKS = 1500

# ---- the battery: scripts, and then anything in any order


def chain(tables: Tables) -> None:
    world = World(Case(P3), tables=tables)
    world.start()
    for stage_id in range(3):
        world.settle()
        world.output(stage_id)
        world.end(stage_id)
    world.check_release()


def kv_ready_twice_and_then_the_end(tables: Tables) -> None:
    pipeline = Pipeline([stage("ar", final_output=True), stage("dit", feed="kv")])
    world = World(Case(pipeline), tables=tables)
    world.start()
    world.settle()
    world.output(0, kv_ready=True)
    world.output(0, kv_ready=True)
    world.settle()
    world.output(0, kv_ready=True)
    world.end(0)
    world.settle()
    world.end(1)
    world.check_release()


def a_bridge_that_makes_nothing_of_a_ready_cache(tables: Tables) -> None:
    for ends_meanwhile in (True, False):
        pipeline = Pipeline([stage("ar"), stage("dit", feed="kv")])
        world = World(Case(pipeline, threads=frozenset([1])), tables=tables)
        world.start()
        world.settle()
        world.output(0, kv_ready=True)
        world.step(made_input=False)  # starts in its thread
        if ends_meanwhile:
            world.end(0)
        world.step()
        if not ends_meanwhile:
            world.end(0)
        world.finish()
        world.check_release()


def companions_in_every_order(tables: Tables) -> None:
    pipeline = Pipeline([stage("ar"), stage("dit", feed="kv"), stage("judge", source="ar")], expand=no_companions)
    case = Case(pipeline, roles=("cond", "uncond"))
    for before in ((), ("kv",), ("end",), ("kv", "end")):
        for first in ("cond", "uncond"):
            world = World(case, tables=tables)
            world.start()
            world.settle()
            for what in before:
                if what == "kv":
                    world.output(0, kv_ready=True)
                    world.output(0, kv_ready=True)
                else:
                    world.end(0)
            world.companion(first, finished=False)
            world.companion(first, finished=True)
            world.companion("uncond" if first == "cond" else "cond", finished=True)
            world.finish()
            world.check_release()


def companions_that_never_come(tables: Tables) -> None:
    case = Case(Pipeline([stage("ar"), stage("dit")], expand=no_companions), roles=("cond", "uncond"))
    world = World(case, tables=tables)
    world.start()
    world.settle()
    world.companion("cond", finished=True)
    world.end(0)
    world.expire()
    world.check_release()


def a_pair_that_is_aborted_in_every_phase(tables: Tables) -> None:
    pipeline = Pipeline([stage("p", role="prefill"), stage("d", role="decode", handoff="content"), stage("next")])
    for kv in (KV, None):
        for steps in range(8):
            world = World(Case(pipeline), tables=tables)
            acts = [
                world.start,
                world.settle,
                lambda world=world, kv=kv: world.end(0, kv=kv),
                world.step,  # handed over, its submission has not come back
                world.step,  # taken over
                lambda world=world: world.output(1),
                lambda world=world: world.end(1),
                world.settle,
            ]
            for act in acts[: steps + 1]:
                act()
            world.abort()
            world.check_release()


def a_decode_that_ends_before_its_submission_has_come_back(tables: Tables) -> None:
    pipeline = Pipeline([stage("p", role="prefill"), stage("d", role="decode"), stage("next", feed="connector")])
    world = World(Case(pipeline), tables=tables)
    world.start()
    world.settle()
    world.end(0, kv=KV)
    world.step()
    world.end(1)
    world.finish()
    world.check_release()


def a_session_with_pieces_and_connectors(tables: Tables) -> None:
    pipeline = Pipeline([stage("a"), stage("b", feed="output"), stage("c", feed="connector"), stage("d")])
    world = World(Case(pipeline, session=True), tables=tables)
    world.start(last=False)
    for more in (True, True, False):
        world.settle()
        for stage_id in (0, 1, 2, 3):
            for end in (False, True):
                if world.stages[stage_id].at_work:
                    world.output(stage_id, segment_end=end)
                    world.settle()
        world.more(last=not more, made_input=more)
    world.finish()
    world.check_release()


def a_stage_that_has_enough(tables: Tables) -> None:
    pipeline = Pipeline([stage("a", final_output=True), stage("b", feed="output")])
    world = World(Case(pipeline, threads=frozenset([1])), tables=tables)
    world.start()
    world.settle()
    world.output(0)
    world.settle()
    world.output(0)
    world.step()  # its bridge has begun
    world.end(1)
    world.output(0)
    world.settle()
    world.end(0)
    world.check_release()


def a_skipped_prefill(tables: Tables) -> None:
    pipeline = Pipeline([stage("p", role="prefill", when_empty="skip"), stage("d", role="decode"), stage("next")])
    world = World(Case(pipeline), tables=tables, skip_prefill=True)
    world.start()
    world.finish()
    world.check_release()


SCRIPTS = (
    chain,
    kv_ready_twice_and_then_the_end,
    a_bridge_that_makes_nothing_of_a_ready_cache,
    companions_in_every_order,
    companions_that_never_come,
    a_pair_that_is_aborted_in_every_phase,
    a_decode_that_ends_before_its_submission_has_come_back,
    a_session_with_pieces_and_connectors,
    a_stage_that_has_enough,
    a_skipped_prefill,
)

CASES = [any_case(random.Random(seed).choice) for seed in range(WALKS)]


def battery(tables: Tables) -> None:
    """Play everything; raises at the first thing that is wrong."""
    for script in SCRIPTS:
        script(tables)
    for seed, case in enumerate(CASES):
        play(case, random.Random(seed).choice, tables=tables)


# ---- the tests


def test_the_rules_as_they_are_pass():
    battery(TABLES)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_broken_rule_is_noticed(mutant: Mutant):
    with pytest.raises((AssertionError, ProtocolError)):
        battery(mutant.tables())


def test_the_mutants_are_what_they_say():
    assert len(MUTANTS) >= 24
    assert len({mutant.name for mutant in MUTANTS}) == len({(m.table, m.key, m.value) for m in MUTANTS}) == len(MUTANTS)
    for mutant in MUTANTS:
        assert mutant.why
        assert getattr(TABLES, mutant.table)[mutant.key] != mutant.value


@pytest.mark.parametrize("table", ["leg", "edge", "hold"])
def test_no_rule_can_be_left_out_or_changed_unnoticed(table: str):
    unnoticed = []
    for mutant in all_changes():
        if mutant.table != table:
            continue
        try:
            battery(mutant.tables())
        except (AssertionError, ProtocolError):
            continue
        unnoticed.append(mutant.name)
    assert not unnoticed
