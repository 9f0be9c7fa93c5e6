"""U66 over generated interleavings: requests, callers' acts and operators' pauses, sleeps, wakes and resumes."""

from __future__ import annotations

import attrs
import trio
from hypothesis import event, given, settings
from hypothesis import strategies as st

from omni_trio.errors import OmniTrioError, OperationFailed, StageFailed
from omni_trio.pipeline import Pipeline
from omni_trio.testing import SimStage
from support import assert_empty, run, simulated, stage

PIPELINE = Pipeline([stage("a", replicas=2), stage("b", feed="output"), stage("c")])
TIMES = st.sampled_from((0.0, 0.0, 0.5, 1.0, 1.0, 2.0, 3.0, 7.0))

operations = st.one_of(
    st.tuples(st.just("pause"), st.sampled_from(("wait", "abort", "keep"))),
    st.tuples(st.just("sleep"), st.sampled_from(("wait", "abort"))),
    st.tuples(st.just("wake"), st.none()),
    st.tuples(st.just("resume"), st.none()),
)


@attrs.frozen
class Plan:
    """One simulated run, printed as what makes it again."""

    requests: tuple[tuple[float, float], ...]  # when it comes, and how long its caller stays
    orders: tuple[tuple[float, tuple[str, str | None]], ...]  # seconds after the one before
    others: tuple[tuple[float, tuple[str, str | None]], ...]  # of a second operator
    deadline: float
    rejects: bool
    submit_time: float
    abort_time: float
    token_time: float


def orders(least: int):
    return st.lists(st.tuples(TIMES, operations), min_size=least, max_size=8).map(tuple)


plans = st.builds(
    Plan,
    requests=st.lists(st.tuples(TIMES, st.sampled_from((1.0, 2.0, 1000.0, 1000.0))), min_size=1, max_size=6).map(tuple),
    orders=orders(2),
    others=st.one_of(st.just(()), orders(1)),
    deadline=st.sampled_from((1.0, 5.0, 100.0)),
    rejects=st.booleans(),
    submit_time=st.sampled_from((0.0, 0.0, 1.0)),
    abort_time=st.sampled_from((0.0, 1.0)),
    token_time=st.sampled_from((0.0, 0.5, 1.0)),
)


class Run:
    """Carries a plan out, and keeps one log of what operators did and what reached the stages."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.log: list[tuple] = []
        self.ends: dict[int, list] = {}

    async def caller(self, runtime, index: int) -> None:
        arrival, patience = self.plan.requests[index]
        ends = self.ends[index] = []
        await trio.sleep(arrival)
        with trio.move_on_after(patience) as scope:
            try:
                ends.append(await runtime.generate("one two", request_id=f"r{index}"))
            except OmniTrioError as error:
                ends.append(error)
        if scope.cancelled_caught:
            ends.append("left")

    async def operate(self, runtime, who: int, plan) -> None:
        for delay, (what, mode) in plan:
            await trio.sleep(delay)
            await self.order(runtime, who, what, mode)

    async def order(self, runtime, who: int, what: str, mode: str | None) -> None:
        options = {"deadline": self.plan.deadline}
        if what in ("pause", "sleep"):
            options |= {"mode": mode, "when_asked": "reject" if self.plan.rejects else "wait"}
        self.log.append(("called", who, what, mode))
        try:
            await getattr(runtime, what)(**options)
        except OperationFailed as error:
            event(f"{what} failed")
            self.log.append(("failed", who, what, error))
        else:
            self.log.append(("done", who, what, mode))
            if what == "sleep":
                assert all(one.activity == "asleep" for one in runtime.health().replicas) or self.plan.others

    async def main(self) -> None:
        plan = self.plan
        sims = [
            SimStage(
                tokens=3,
                token_time=plan.token_time,
                submit_time=plan.submit_time,
                abort_time=plan.abort_time,
                log=self.log,
            )
            for _ in PIPELINE.stages
        ]
        async with simulated(PIPELINE, *sims) as runtime:
            async with trio.open_nursery() as nursery:
                for index in range(len(plan.requests)):
                    nursery.start_soon(self.caller, runtime, index)
                async with trio.open_nursery() as operators:
                    operators.start_soon(self.operate, runtime, 0, plan.orders)
                    operators.start_soon(self.operate, runtime, 1, plan.others)
                # Whatever happened, this is the way back; and then every request gets its end.
                await runtime.wake()
                await self.order(runtime, 0, "resume", None)
                assert runtime.stats().phase == "running"
            assert all(len(ends) == 1 for ends in self.ends.values()), self.ends
            assert {one.activity for one in runtime.health().replicas} == {"running"}
            await runtime.generate("one")
            assert_empty(runtime)
            stats = runtime.stats()
            assert stats.admitted == stats.finished + stats.failed + stats.aborted + stats.expired
        for ends in self.ends.values():
            assert not isinstance(ends[0], StageFailed), ends  # no stage was asked for anything while it was asleep


@given(plan=plans)
@settings(max_examples=150, deadline=None)
def test_u66_every_request_gets_its_end_and_no_stage_is_asked_in_its_sleep(plan: Plan):
    run(Run(plan).main)


@given(plan=plans.map(lambda plan: attrs.evolve(plan, others=())))
@settings(max_examples=150, deadline=None)
def test_u66_nothing_new_reaches_a_stage_from_the_call_on_and_nothing_at_all_from_its_end(plan: Plan):
    carried_out = Run(plan)
    run(carried_out.main)
    closed = aborted = silent = idle = False
    seen: set[str] = set()
    for kind, *details in carried_out.log:
        if kind == "called" and details[1] in ("pause", "sleep"):
            closed = True
            silent = silent and details[2] != "wait"  # what was kept goes on, to its end
            aborted = aborted or details[2] == "abort"
        elif kind == "done" and details[1] in ("pause", "sleep"):
            silent = True
            idle = idle or details[2] != "keep"
        elif kind == "done" and details[1] == "resume":
            closed = aborted = silent = idle = False
        elif kind in ("submit", "update"):
            request_id = details[2].split("-")[0]
            new = request_id not in seen
            allowed = not (silent or aborted or (closed and new))
            assert allowed, (kind, details, carried_out.log)
            seen.add(request_id)
        elif kind == "abort":
            assert not idle, (kind, details, carried_out.log)
