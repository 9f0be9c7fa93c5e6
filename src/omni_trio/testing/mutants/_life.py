"""Mutants of pausing, of closing, of the tables and of idleness."""

from __future__ import annotations

from typing import Any

import trio

from omni_trio.errors import EngineDied
from omni_trio.runtime._gate import Gate
from omni_trio.runtime._operate import Operator
from omni_trio.runtime._orchestrator import Orchestrator
from omni_trio.runtime._request import RequestTask
from omni_trio.stages import Replica
from omni_trio.testing.plan import OperatorAct, Plan, RequestPlan, StagePlan
from omni_trio.testing.script import Reject, Stall, tokens

from ._mutant import Patch, mutant

_ONE = (StagePlan(final=True),)
_TWO = (StagePlan(), StagePlan(source=0, final=True))


def _asked(*scripts: Any, **more: Any) -> RequestPlan:
    return RequestPlan(scripts=scripts, **more)


_PLAIN = Plan(stages=_ONE, requests=(_asked(tokens(1)),))


# ---- pausing


@mutant("U66", witness=Plan(
    stages=_ONE,
    requests=(_asked(tokens(1), arrival=1.0),),
    operator=(OperatorAct(at=0.0, act="pause"), OperatorAct(at=5.0, act="resume")),
))  # fmt: skip
def the_door_does_not_close(patch: Patch) -> None:
    """A request that comes while the runtime is paused reaches a stage."""

    async def passed(_: Gate) -> None:
        await trio.lowlevel.checkpoint()

    patch(Gate, "passed", passed)


@mutant("U66", witness=Plan(
    stages=(StagePlan(submit_time=2.0), StagePlan(source=0, final=True)),
    requests=(_asked(tokens(1), tokens(1), companions=(tokens(1),)),),
    companions=1,
    operator=(OperatorAct(at=1.0, act="pause", mode="keep"), OperatorAct(at=9.0, act="resume")),
))  # fmt: skip
def a_pause_does_not_hold_hand_overs(patch: Patch) -> None:
    """More of a request that has begun is handed over while it is to be kept as it is."""
    patch(Gate, "freeze", lambda *_: None)


@mutant("U67", witness=Plan(
    stages=_TWO,
    requests=(_asked(tokens(1, each=2.0), tokens(1, each=2.0)), _asked(tokens(1), arrival=9.5)),
    operator=(OperatorAct(at=1.0, act="pause"), OperatorAct(at=9.0, act="resume")),
))  # fmt: skip
def a_pause_is_only_a_closed_door(patch: Patch) -> None:
    """A pause is over while requests are still in flight."""
    patch(Operator, "_in_flight", lambda _: [])


@mutant("U66", witness=Plan(
    stages=_ONE,
    requests=(_asked(tokens(1), arrival=2.0),),
    operator=(
        OperatorAct(at=0.0, act="sleep"), OperatorAct(at=1.0, act="wake"), OperatorAct(at=5.0, act="resume")
    ),
))  # fmt: skip
def waking_resumes(patch: Patch) -> None:
    """Engines that are woken up are handed requests before anybody has said so."""
    real = Operator.wake

    async def wake(self: Operator, *args: Any, **options: Any) -> Any:
        results = await real(self, *args, **options)
        self._gate.open()
        return results

    patch(Operator, "wake", wake)


@mutant("U66", witness=Plan(
    stages=_ONE,
    requests=(_asked(tokens(1), arrival=1.0),),
    operator=(OperatorAct(at=0.0, act="pause"), OperatorAct(at=2.0, act="resume")),
))  # fmt: skip
def resuming_does_not_open_the_door(patch: Patch) -> None:
    """The runtime has been resumed, and who waits at its door waits on."""
    patch(Gate, "open", lambda _: None)


# ---- closing


@mutant("U63", "W-25", witness=Plan(stages=_ONE, requests=(_asked((Stall(),)),), end=1.0))
def closing_tells_nobody(patch: Patch) -> None:
    """The runtime is left, and waits for requests that nobody ends."""
    patch(RequestTask, "shut_down", lambda _: None)


@mutant("U63", witness=Plan(
    stages=(StagePlan(final=True, abort_time=3.0),),
    requests=(_asked((Stall(),)), _asked(tokens(1), arrival=2.0)),
    end=1.0,
))  # fmt: skip
def a_closing_runtime_takes_requests(patch: Patch) -> None:
    """A request that comes while the runtime closes is admitted."""
    patch(Orchestrator, "closing", property(lambda _: False, lambda *_: None))


@mutant("U63", witness=Plan(stages=_ONE, requests=(_asked((Stall(),)),), end=1.0))
def engines_are_closed_before_their_requests(patch: Patch) -> None:
    """Replicas are taken down under the requests that they work on."""
    real = Orchestrator.close

    def close(self: Orchestrator) -> None:
        self.stop("the runtime closes")
        for replica in self.replicas():
            replica.scope.shield = False
        real(self)

    patch(Orchestrator, "close", close)


# ---- tables and statistics


@mutant("U3", "U12", witness=_PLAIN)
def a_table_keeps_its_entries(patch: Patch) -> None:
    """A request that has ended stays in the table of those in flight."""

    def forget(self: Orchestrator, task: RequestTask) -> None:
        assert task.verdict is not None  # as in the original
        self.verdicts[task.verdict] += 1

    patch(Orchestrator, "forget", forget)


@mutant("U16", witness=Plan(stages=_ONE, requests=(_asked((Stall(),), act="leave", when=1.0),)))
def aborts_are_not_counted(patch: Patch) -> None:
    """The statistics do not know of requests that were aborted."""
    real = Orchestrator.forget

    def forget(self: Orchestrator, task: RequestTask) -> None:
        real(self, task)
        self.verdicts["aborted"] = 0

    patch(Orchestrator, "forget", forget)


@mutant("U58", witness=Plan(stages=_ONE, requests=(_asked((Reject(),)),)))
def a_rejection_counts_as_a_failure(patch: Patch) -> None:
    """The statistics have what no stage took among what stages failed."""
    real = Orchestrator.forget

    def forget(self: Orchestrator, task: RequestTask) -> None:
        real(self, task)
        if task.verdict == "failed" and not task.admitted:
            self.rejected -= 1
            self.verdicts["failed"] += 1

    patch(Orchestrator, "forget", forget)


# ---- idleness


@mutant("U55", "W-1", witness=_PLAIN)
def an_idle_runtime_polls(patch: Patch) -> None:
    """A reader looks for outputs every second though there are none."""

    async def read(self: Orchestrator, replica: Replica, client: Any) -> None:
        while True:
            with trio.move_on_after(1.0):
                try:
                    replica.deliver(await client.receive(), trio.current_time())
                except EngineDied as error:
                    self.replica_died(replica, error)
                    return

    patch(Orchestrator, "_read", read)
