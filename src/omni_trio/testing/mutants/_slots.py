"""Mutants of replicas: their slots, the outputs that they give, and their deaths."""

# ruff: noqa: SLF001 - to break something one has to reach it

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import trio

from omni_trio.errors import EngineDied
from omni_trio.messages import StageOutput
from omni_trio.runtime import _mailbox
from omni_trio.runtime._orchestrator import Orchestrator
from omni_trio.runtime._request import RequestTask
from omni_trio.runtime._turn import Turn
from omni_trio.stages import Leg, Replica, ReplicaState, StagePool
from omni_trio.testing.plan import OperatorAct, Plan, RequestPlan, StagePlan
from omni_trio.testing.script import Chunk, Die, DieOnSubmit, LateChunk, Stall, Wait, tokens

from ._mutant import Patch, mutant

_ONE = (StagePlan(final=True),)
_PAIR = (StagePlan(final=True, replicas=2),)


def _asked(*scripts: Any, **more: Any) -> RequestPlan:
    return RequestPlan(scripts=scripts, **more)


_TWO_AT_WORK = (_asked(tokens(2, each=1.0)), _asked(tokens(2, each=1.0), arrival=0.5))


# ---- slots


@mutant("U11", "U16", witness=Plan(stages=_ONE, requests=(_asked(tokens(1)),)))
def a_slot_stays_taken(patch: Patch) -> None:
    """A stage has let go of a request, and its slot counts as taken for ever."""
    real = Replica.let_go

    def let_go(self: Replica, leg: Leg) -> None:
        load = self.load
        real(self, leg)
        self.load = load

    patch(Replica, "let_go", let_go)


@mutant(
    "U9",
    "U11",
    witness=Plan(
        stages=(StagePlan(final=True, abort_time=3.0),),
        requests=(_asked((Stall(),), act="leave", when=1.0), _asked(tokens(1), arrival=2.0)),
    ),
)
def a_slot_is_free_before_the_acknowledgement(patch: Patch) -> None:
    """A slot counts as free while the stage is still aborting its request."""
    real = Turn._abort

    async def abort(self: Turn, leg: Leg) -> None:
        leg.replica.let_go(leg)
        await real(self, leg)

    patch(Turn, "_abort", abort)


@mutant("W-40", witness=Plan(stages=_PAIR, requests=_TWO_AT_WORK))
def all_go_to_the_first_replica(patch: Patch) -> None:
    """What a replica has in hand is not looked at."""

    def pick(self: StagePool) -> Replica:
        return next(self.ready())

    patch(StagePool, "pick", pick)


# ---- outputs


@mutant(
    "U51",
    witness=Plan(
        stages=_ONE,
        requests=(
            _asked((LateChunk(), Stall()), act="leave", when=1.0),
            _asked(tokens(2, each=2.0)),
        ),
    ),
)
def a_stray_output_finds_another_request(patch: Patch) -> None:
    """A late output of an aborted request is delivered to whoever is at the same replica."""
    real = Replica.deliver

    def deliver(self: Replica, outputs: Sequence[StageOutput], now: float) -> None:
        for output in outputs:
            if output.request_id not in self.legs and self.legs:
                leg = next(iter(self.legs.values()))
                leg.owner.leg_output(leg, output)
            else:
                real(self, [output], now)

    patch(Replica, "deliver", deliver)


@mutant(
    "W-2",
    witness=Plan(
        stages=_ONE, requests=(_asked((Chunk((1,)), Chunk((2,)), Chunk((3,)), Stall()), act="leave", when=5.0),)
    ),
)
def only_one_output_of_a_step_is_taken(patch: Patch) -> None:
    """What a stage says in one step is taken up to the first output, and the rest is lost."""
    real = Replica.deliver

    def deliver(self: Replica, outputs: Sequence[StageOutput], now: float) -> None:
        real(self, outputs[:1], now)

    patch(Replica, "deliver", deliver)


@mutant("W-57", "U51", witness=Plan(stages=_PAIR, requests=_TWO_AT_WORK))
def outputs_have_the_wrong_replica(patch: Patch) -> None:
    """Whatever replica an output comes from, it is said to come from the first one."""
    real = _mailbox._event

    def event(leg: Leg, *entry: Any) -> Any:
        return msgspec.structs.replace(real(leg, *entry), replica_id=0)

    patch(_mailbox, "_event", event)


# ---- deaths


@mutant(
    "U17",
    "W-12",
    witness=Plan(stages=_PAIR, requests=(_asked((Wait(1.0), Die())), _asked(tokens(1, each=2.0)))),
)
def a_death_fails_all_of_the_stage(patch: Patch) -> None:
    """Requests at healthy replicas of the stage fail with those of the dead one."""
    real = Orchestrator.replica_died

    def replica_died(self: Orchestrator, replica: Replica, death: EngineDied) -> None:
        for other in self.pools[replica.stage_id].replicas:
            for leg in list(other.legs.values()):
                leg.owner.leg_lost(leg, death)
        real(self, replica, death)

    patch(Orchestrator, "replica_died", replica_died)


@mutant("U17", "W-11", witness=Plan(stages=_PAIR, requests=(_asked((Wait(1.0), Die())), _asked(tokens(1, each=2.0)))))
def a_death_ends_everything(patch: Patch) -> None:
    """The runtime ends with the first replica that dies, though deaths are to be isolated."""
    real = Orchestrator.replica_died

    def replica_died(self: Orchestrator, replica: Replica, death: EngineDied) -> None:
        self._policy = "fail_stop"
        real(self, replica, death)

    patch(Orchestrator, "replica_died", replica_died)


@mutant("U18", "U1", "W-8", witness=Plan(stages=_ONE, requests=(_asked((Wait(1.0), Die())),)))
def a_death_is_not_told(patch: Patch) -> None:
    """The caller of a request whose replica died waits for ever."""
    patch(RequestTask, "leg_lost", lambda *_: None)


@mutant(
    "U19",
    witness=Plan(stages=_PAIR, requests=(_asked(tokens(1)), _asked((DieOnSubmit(),)), _asked(tokens(1), arrival=1.0))),
)
def a_death_at_a_submission_is_an_end_of_all(patch: Patch) -> None:
    """A replica that dies while it is handed a request takes the requests of others with it."""

    def replica_died(self: RequestTask, replica: Replica, death: EngineDied) -> None:
        self._orchestrator._fail_stop(death)

    patch(RequestTask, "replica_died", replica_died)


@mutant(
    "U18",
    "W-36",
    witness=Plan(
        stages=_PAIR,
        requests=(_asked(tokens(1), arrival=2.0), _asked(tokens(1), arrival=2.0)),
        operator=(OperatorAct(at=1.0, act="kill"),),
    ),
)
def a_dead_replica_is_picked(patch: Patch) -> None:
    """A replica that has died is still handed requests."""

    def pick(self: StagePool) -> Replica:
        return min(self.replicas, key=lambda replica: replica.load)

    patch(StagePool, "pick", pick)


@mutant("U18", "U24", witness=Plan(stages=_ONE, requests=(), operator=(OperatorAct(at=1.0, act="kill"),), end=5.0))
def a_death_goes_unnoticed(patch: Patch) -> None:
    """A replica dies while nobody asks anything of it, and counts as alive."""

    async def read(self: Orchestrator, replica: Replica, client: Any) -> None:
        while True:
            try:
                replica.deliver(await client.receive(), trio.current_time())
            except EngineDied:
                await trio.sleep_forever()

    patch(Orchestrator, "_read", read)


@mutant("U18", witness=Plan(
    stages=_ONE, requests=(_asked((Wait(1.0), Die())), _asked((Stall(),))), on_engine_death="fail_stop"
))  # fmt: skip
def the_reason_of_a_death_is_not_told(patch: Patch) -> None:
    """The runtime ends because an engine died, and callers hear that it is closing."""

    def fail_stop(self: Orchestrator, death: EngineDied) -> None:
        self.closing = True
        self.fatal = death
        self.body_scope.cancel("the runtime ends: an engine died")

    patch(Orchestrator, "_fail_stop", fail_stop)


@mutant("U17", witness=Plan(stages=_ONE, requests=(_asked((Wait(1.0), Die())),)))
def a_death_is_told_twice(patch: Patch) -> None:
    """Instruments and logs hear of one death from everybody who has noticed it."""
    real = Orchestrator.replica_died

    def replica_died(self: Orchestrator, replica: Replica, death: EngineDied) -> None:
        real(self, replica, death)
        replica.state = ReplicaState.READY
        real(self, replica, death)

    patch(Orchestrator, "replica_died", replica_died)


@mutant("U9", witness=Plan(
    stages=(StagePlan(final=True, abort_time=99.0),),
    requests=(_asked((Stall(),), act="abort", when=1.0), _asked(tokens(1), arrival=20.0)),
))  # fmt: skip
def an_untrusted_replica_stays_in_service(patch: Patch) -> None:
    """A replica that has not confirmed an abort counts as dead, and is handed requests all the same."""

    def replica_died(self: Orchestrator, replica: Replica, death: EngineDied) -> None:
        place: dict[str, Any] = {
            "stage": replica.spec.name,
            "stage_id": replica.stage_id,
            "replica_id": replica.replica_id,
        }
        self.trace.emit("replica.died", **place, detail=death.message)

    patch(Orchestrator, "replica_died", replica_died)
