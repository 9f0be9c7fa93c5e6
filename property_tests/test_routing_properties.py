"""Invariants tested: I1, I2, I4 and I10 of the pure core, over any tree of stages and any order of what happens."""

from __future__ import annotations

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from omni_trio.pipeline import Pipeline, StageSpec
from omni_trio.routing import Fail, Finish, Forward, LegState, RequestFlow, RoutePlan, Submit, Update


@st.composite
def plans(draw) -> RoutePlan:
    count = draw(st.integers(1, 6))
    sources = [None, *(draw(st.integers(0, index - 1)) for index in range(1, count))]
    leaves = [index for index in range(count) if index not in sources]
    pipeline = Pipeline(
        [
            StageSpec(
                name=f"s{index}",
                kind="simulated",
                source=None if source is None else f"s{source}",
                stream=index > 0 and draw(st.booleans()),
                final_output=index in leaves or draw(st.booleans()),
            )
            for index, source in enumerate(sources)
        ]
    )
    return RoutePlan(pipeline, draw(st.none() | st.integers(0, count - 1)))


class World:
    """Plays the stages and bridges behind one flow: whatever can happen next, in any order."""

    def __init__(self, plan: RoutePlan) -> None:
        self.plan = plan
        self.flow = RequestFlow(plan)
        self.at_work: set[int] = set()
        self.ended: set[int] = set()
        self.waiting: dict[int, bool] = {}
        self.submitted: Counter[int] = Counter()
        self.closed: set[int] = set()
        self.terminals: list[Finish | Fail] = []
        self.take(self.flow.start())

    def take(self, decisions) -> None:
        assert not (self.terminals and decisions), "a decision after the end"
        for decision in decisions:
            if isinstance(decision, Forward):
                self.waiting[decision.stage_id] = decision.last or self.waiting.get(decision.stage_id, False)
            elif isinstance(decision, Submit | Update):
                stage_id = decision.stage_id
                assert stage_id in self.plan.stages
                assert stage_id not in self.ended, "input for a stage that has ended"
                assert stage_id not in self.closed, "input after the last input"
                if isinstance(decision, Submit):
                    self.submitted[stage_id] += 1
                    assert self.submitted[stage_id] == 1, "a stage saw the request as new twice"
                    self.at_work.add(stage_id)
                else:
                    assert stage_id in self.at_work
                if decision.last:
                    self.closed.add(stage_id)
            else:
                self.terminals.append(decision)

    def output(self, stage_id: int, *, finished: bool) -> None:
        if finished:
            self.at_work.discard(stage_id)
            self.ended.add(stage_id)
        self.take(self.flow.output(stage_id, finished=finished))

    def bridge(self, stage_id: int, *, made_input: bool) -> None:
        last = self.waiting.pop(stage_id)
        self.take(self.flow.bridged(stage_id, made_input=made_input, last=last))


@settings(max_examples=400, deadline=None)
@given(plan=plans(), data=st.data())
def test_any_order_of_events(plan: RoutePlan, data) -> None:
    world = World(plan)
    for _ in range(60):
        if world.terminals or not (world.at_work or world.waiting):
            break
        moves = [("output", stage_id) for stage_id in sorted(world.at_work)]
        moves += [("bridge", stage_id) for stage_id in sorted(world.waiting)]
        what, stage_id = data.draw(st.sampled_from(moves))
        if what == "output":
            world.output(stage_id, finished=data.draw(st.booleans()))
        else:
            world.bridge(stage_id, made_input=data.draw(st.sampled_from((True, True, True, False))))

    # I2: let everything end that can; then the request must have ended, too, and once.
    while not world.terminals:
        assert world.at_work or world.waiting, "nothing is under way, and yet the request has not ended"
        if world.waiting:
            world.bridge(min(world.waiting), made_input=True)
        else:
            world.output(min(world.at_work), finished=True)
    (terminal,) = world.terminals
    if isinstance(terminal, Finish):
        assert plan.needed <= world.ended, "it ended before its outputs were complete"
    assert world.flow.over

    # What is still at work is what has to be told to let go; afterwards nothing is held, and nothing happens.
    assert set(world.flow.release()) == world.at_work
    assert all(world.flow.state(index) is LegState.RELEASED for index in range(len(plan.pipeline.stages)))
    for stage_id in range(len(plan.pipeline.stages)):
        assert not world.flow.output(stage_id, finished=True)
        assert not world.flow.bridged(stage_id, made_input=True, last=True)


@settings(max_examples=200, deadline=None)
@given(plan=plans())
def test_a_plan_is_a_part_of_its_pipeline_and_always_ends_somewhere(plan: RoutePlan) -> None:
    pipeline = plan.pipeline
    assert 0 in plan.stages
    assert plan.needed
    assert plan.needed <= plan.stages
    for index, children in enumerate(plan.feeds):
        assert set(children) <= plan.stages
        assert set(plan.streams_to[index]) <= set(children)
        if index in plan.stages and not children:
            assert index in plan.needed, "a stage that feeds nobody and whose output nobody gets"
    if plan.final_stage is not None:
        assert plan.final_stage in plan.needed
        assert plan.stages == set(pipeline.path_to(plan.final_stage))
