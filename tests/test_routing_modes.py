"""Every combination of modes: those that are legal are walked through, step by step, and the others are refused."""

from __future__ import annotations

import itertools

import pytest

from omni_trio.errors import ConfigError
from omni_trio.pipeline import Pipeline
from omni_trio.routing import Finish, Handoff, RoutePlan, Submit, Update
from routing_cases import FEEDS, Case, no_companions
from routing_facts import KV
from routing_world import World
from support import stage

SHAPES = {"chain": (0, 1), "fan": (0, 0)}
"""Of three stages: the sources of the second and of the third one."""


def is_legal(sources, feeds, *, pair: bool, companions: bool) -> bool:
    from_first = [feed for feed, source in zip(feeds, sources, strict=True) if source == 0]
    if pair and (companions or from_first != ["finish"]):
        return False
    return not (companions and {"output", "connector"} & set(from_first))


def takes_sessions(feeds, *, pair: bool, companions: bool) -> bool:
    return not (pair or companions or "kv" in feeds)


def pipeline_of(sources, feeds, *, pair: bool, companions: bool) -> Pipeline:
    roles = ("prefill", "decode") if pair else (None, None)
    return Pipeline(
        [
            stage("s0", role=roles[0]),
            stage("s1", source="s0", feed=feeds[0], role=roles[1]),
            stage("s2", source=f"s{sources[1]}", feed=feeds[1]),
        ],
        expand=no_companions if companions else None,
    )


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("feeds", list(itertools.product(FEEDS, FEEDS)), ids="-".join)
@pytest.mark.parametrize("extra", ["plain", "pair", "companions", "pair and companions"])
def test_every_combination(shape, feeds, extra):
    sources = SHAPES[shape]
    modes = {"pair": "pair" in extra, "companions": "companions" in extra}
    if not is_legal(sources, feeds, **modes):
        with pytest.raises(ConfigError):
            pipeline_of(sources, feeds, **modes)
        return
    pipeline = pipeline_of(sources, feeds, **modes)
    assert (pipeline.no_sessions is None) == takes_sessions(feeds, **modes)
    for final_stage in (None, 0, 1, 2):
        walk_through(pipeline, final_stage, roles=("c0", "c1") if modes["companions"] and final_stage != 0 else ())
        if pipeline.no_sessions is None:
            walk_through_a_session(pipeline, final_stage)


def way_of(plan: RoutePlan, stage_id: int) -> str:
    if stage_id == 0:
        return "prompt"
    return "handoff" if stage_id == plan.handoff else plan.pipeline.stages[stage_id].feed


def walk_through(pipeline: Pipeline, final_stage: int | None, *, roles: tuple[str, ...]) -> None:
    """Each stage gives a piece, says that its KV cache is ready, and ends."""
    world = World(Case(pipeline, final_stage, roles))
    plan = world.plan
    world.start()
    world.settle()
    order = sorted(plan.stages)
    for stage_id in order:
        assert world.stages[stage_id].at_work
        world.output(stage_id)
        world.settle()
        world.output(stage_id, kv_ready=True)
        world.settle()
        for role in roles if stage_id == 0 else ():
            assert not any(world.stages[child].submitted for child in pipeline.children[0])
            world.companion(role, finished=True)
            world.settle()
        early = {"output", "kv", "connector"}
        for child in pipeline.children[stage_id]:
            if child in plan.stages:
                assert world.stages[child].submitted == (way_of(plan, child) in early)
        assert world.terminal is None
        world.end(stage_id, kv=KV)
        world.settle()
    assert world.terminal == Finish()
    for stage_id in order:
        assert (
            world.stages[stage_id].inputs
            == {
                "prompt": [Submit(0, last=True)],
                "finish": [Submit(stage_id, last=True)],
                "kv": [Submit(stage_id, last=True)],
                "output": [Submit(stage_id, last=False), Update(stage_id, last=False), Update(stage_id, last=True)],
                "connector": [Submit(stage_id, last=True, placeholder=True)],
                "handoff": [Handoff(stage_id, KV)],
            }[way_of(plan, stage_id)]
        )
    world.check_release()


def walk_through_a_session(pipeline: Pipeline, final_stage: int | None) -> None:
    """Each stage gives a piece and the end of each of two segments, and ends when the session is closed."""
    world = World(Case(pipeline, final_stage, session=True))
    plan = world.plan
    order = sorted(plan.stages)
    world.start(last=False)
    world.settle()
    for segment in range(2):
        if segment:
            world.more()
            world.settle()
        for stage_id in order:
            world.output(stage_id)
            world.settle()
            world.output(stage_id, segment_end=True)
            world.settle()
    world.more(last=True, made_input=False)
    for stage_id in order:
        world.settle(made_input=False)
        world.end(stage_id)
    assert world.terminal == Finish()
    for stage_id in order:
        s = stage_id
        assert (
            world.stages[stage_id].inputs
            == {
                "prompt": [Submit(s, False, True), Update(s, False, True), Update(s, True, True)],
                "finish": [Submit(s, False, True), Update(s, False, True), Update(s, True, True)],
                "output": [
                    Submit(s, False),
                    Update(s, False, True),
                    Update(s, False),
                    Update(s, False, True),
                    Update(s, True, True),
                ],
                "connector": [Submit(s, False, True, True), Update(s, False, True, True), Update(s, True, True)],
            }[way_of(plan, stage_id)]
        )
    world.check_release()
