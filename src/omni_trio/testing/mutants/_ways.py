"""Mutants of the ways between stages: bridges, companions, hand-overs of KV caches, connectors."""

# ruff: noqa: SLF001 - to break something one has to reach it

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import attrs

from omni_trio.errors import OmniTrioError, StageFailed
from omni_trio.routing import (
    Decision,
    EdgeAction,
    EdgeFact,
    EdgeState,
    HoldFact,
    HoldState,
    LegFact,
    LegState,
    RequestFlow,
    RoutePlan,
    Tables,
)
from omni_trio.runtime import _turn
from omni_trio.runtime._request import RequestTask
from omni_trio.runtime._turn import Turn
from omni_trio.stages import Leg, Replica
from omni_trio.testing.plan import Plan, RequestPlan, StagePlan
from omni_trio.testing.script import Chunk, Error, Finish, KvReady, Reject, Stall, Wait, tokens

from ._mutant import Patch, mutant

_TWO = (StagePlan(), StagePlan(source=0, final=True))
_PIECES = (StagePlan(), StagePlan(source=0, feed="output", final=True))
_EARLY = (StagePlan(final=True), StagePlan(source=0, feed="kv", final=True))
_LINKED = (StagePlan(), StagePlan(source=0, feed="connector", final=True))
_BOTH_FINAL = (StagePlan(final=True), StagePlan(source=0, final=True))
_KV = {"remote_request_id": "p"}


def _asked(*scripts: Any, **more: Any) -> RequestPlan:
    return RequestPlan(scripts=scripts, **more)


def _tables(patch: Patch, **changes: Mapping[Any, Any]) -> None:
    whole = Tables()
    broken = attrs.evolve(whole, **{name: {**getattr(whole, name), **rules} for name, rules in changes.items()})
    real = RequestFlow.__init__

    def init(self: RequestFlow, plan: RoutePlan, **options: Any) -> None:
        real(self, plan, **{**options, "tables": broken})

    patch(RequestFlow, "__init__", init)


_HANDED_ON = Plan(stages=_TWO, requests=(_asked(tokens(1), tokens(1)),))


# ---- bridges and inputs


class _Escaped(OmniTrioError):
    def __init__(self, message: str, **_: Any) -> None:
        super().__init__(message)


@mutant(
    "U29",
    "W-9",
    witness=Plan(
        stages=_TWO,
        requests=(_asked(tokens(1), bridges=("pass", "raise")), _asked(tokens(1, each=1.0), tokens(1))),
    ),
)
def an_error_of_a_bridge_kills_everybody(patch: Patch) -> None:
    """What a bridge raises for one request ends the runtime."""
    patch(_turn, "BridgeFailed", _Escaped)


@mutant("U29", witness=Plan(stages=_TWO, requests=(_asked(tokens(1), bridges=("pass", "raise")),)))
def a_bridge_is_taken_for_a_stage(patch: Patch) -> None:
    """An error of a bridge is told as one of the stage behind it, which has not seen the request."""
    patch(_turn, "BridgeFailed", StageFailed)


@mutant("U6", "W-28", witness=_HANDED_ON)
def a_request_is_submitted_twice(patch: Patch) -> None:
    """A stage is handed the same request as a new one once more."""
    real = Turn._hand_over

    async def hand_over(self: Turn, leg: Leg, request: Any, *, update: bool) -> None:
        await real(self, leg, request, update=update)
        if not update:
            await real(self, leg, request, update=update)

    patch(Turn, "_hand_over", hand_over)


@mutant("W-28", "W-13", witness=Plan(
    stages=_PIECES, requests=(_asked((Chunk((1,)), Wait(1.0), Chunk((2,)), Wait(1.0), Finish())),)
))  # fmt: skip
def an_update_is_a_submission(patch: Patch) -> None:
    """Each piece of input makes another request of the same name at the stage."""
    real = Turn._hand_over

    async def hand_over(self: Turn, leg: Leg, request: Any, *, update: bool) -> None:
        del update
        await real(self, leg, request, update=False)

    patch(Turn, "_hand_over", hand_over)


@mutant("W-24", "U10", witness=Plan(
    stages=_EARLY, requests=(_asked((KvReady(), Wait(1.0), Finish()), tokens(1, each=5.0)),)
))  # fmt: skip
def the_end_is_forwarded_after_the_cache(patch: Patch) -> None:
    """A stage that has started from a KV cache gets its whole input again when the source ends."""
    _tables(
        patch,
        edge={(EdgeState.CLOSED, EdgeFact.WHOLE): (EdgeState.CLOSING, EdgeAction.CARRY_WHOLE)},
        leg={(LegState.FED, LegFact.FEED_LAST): LegState.FED},
    )


@mutant("U2", "W-13", witness=Plan(stages=_TWO, requests=(_asked(tokens(1), bridges=("pass", "nothing")),)))
def a_bridge_that_makes_nothing_is_waited_for(patch: Patch) -> None:
    """There is no input for the next stage and never will be, and the request waits for it."""
    real = RequestFlow.bridged

    def bridged(self: RequestFlow, stage_id: int, *, made_input: bool, **more: Any) -> Sequence[Decision]:
        return real(self, stage_id, made_input=made_input, **more) if made_input else ()

    patch(RequestFlow, "bridged", bridged)


@mutant("U43", "U44", witness=Plan(stages=_PIECES, requests=(_asked((Chunk((1,)), Wait(1.0), *tokens(1))),)))
def the_last_piece_is_not_marked(patch: Patch) -> None:
    """A stage that is fed piece by piece is never told that its input is complete."""
    real = RequestFlow._fed

    def fed(self: RequestFlow, stage_id: int, *, last: bool, **more: Any) -> Any:
        decision = real(self, stage_id, last=last, **more)
        return type(decision)(stage_id, last and stage_id == 0, decision.segment_end, decision.placeholder)

    patch(RequestFlow, "_fed", fed)


@mutant("U48", witness=Plan(stages=_BOTH_FINAL, requests=(_asked(tokens(1), tokens(1, each=5.0)),)))
def the_first_end_ends_all(patch: Patch) -> None:
    """A request is over with the first of the stages whose outputs go to the caller."""
    real = RequestFlow._finished

    def finished(self: RequestFlow, stage_id: int, kv_params: Any) -> Sequence[Decision]:
        self._awaiting = min(self._awaiting, 1)
        return real(self, stage_id, kv_params)

    patch(RequestFlow, "_finished", finished)


@mutant("W-15", "U8", witness=_HANDED_ON)
def the_last_end_ends_nothing(patch: Patch) -> None:
    """Every stage is done, and nobody notices that the request is."""
    real = RequestFlow._finished

    def finished(self: RequestFlow, stage_id: int, kv_params: Any) -> Sequence[Decision]:
        self._awaiting = 9
        return real(self, stage_id, kv_params)

    patch(RequestFlow, "_finished", finished)


# ---- companions

_GUIDED = Plan(
    stages=_TWO,
    requests=(_asked(tokens(1), tokens(1), companions=((Wait(5.0), Finish()), (Wait(2.0), Finish()))),),
    companions=2,
)


@mutant("U31", "W-17", witness=_GUIDED)
def companions_are_not_waited_for(patch: Patch) -> None:
    """A request goes on to the next stage as soon as it is ready itself."""
    _tables(patch, edge={(EdgeState.OPEN, EdgeFact.WHOLE_EARLY): (EdgeState.CLOSED, EdgeAction.CARRY_WHOLE),
                         (EdgeState.CLOSED, EdgeFact.CARRIED_WHOLE): (EdgeState.CLOSED, EdgeAction.NOTHING),
                         (EdgeState.CLOSED, EdgeFact.BUNDLED): (EdgeState.CLOSED, EdgeAction.NOTHING)})  # fmt: skip


@mutant("U32", "W-16", witness=Plan(
    stages=_TWO,
    requests=(_asked(tokens(1), tokens(1), companions=((KvReady(), Wait(5.0), Finish()),)),),
    companions=1,
))  # fmt: skip
def a_ready_cache_counts_as_an_end(patch: Patch) -> None:
    """A companion counts as done when its KV cache is, though its output does not exist yet."""
    real = RequestTask._heard

    def heard(self: RequestTask, leg: Leg, output: Any, *, kv_ready: bool) -> None:
        if leg.role in self.turn.flow.missing and kv_ready:
            self._follow(self.turn.flow.companion_output(leg.role, finished=True), leg)
        else:
            real(self, leg, output, kv_ready=kv_ready)

    patch(RequestTask, "_heard", heard)


@mutant("U33", "W-19", witness=Plan(
    stages=_TWO, requests=(_asked(tokens(1), tokens(1), companions=((Error(),),)),), companions=1
))  # fmt: skip
def a_failed_companion_is_ignored(patch: Patch) -> None:
    """The request waits for a companion that has failed."""
    real = RequestTask.leg_ended

    def leg_ended(self: RequestTask, leg: Leg, output: Any, now: float) -> None:
        if output.error is None or leg.role is None:
            real(self, leg, output, now)

    patch(RequestTask, "leg_ended", leg_ended)


@mutant("U33", "W-19", witness=Plan(
    stages=_TWO, requests=(_asked(tokens(1), tokens(1), companions=((Error(),),)),), companions=1
))  # fmt: skip
def a_failed_companion_is_not_named(patch: Patch) -> None:
    """The caller is told that some companion has failed, under a name that nobody knows."""
    real = RequestTask.leg_ended

    def leg_ended(self: RequestTask, leg: Leg, output: Any, now: float) -> None:
        if output.error is None or leg.role is None:
            real(self, leg, output, now)
        else:
            name = leg.request_id
            self.end(StageFailed(f"its companion {name} failed: {output.error}", **self.place(leg.replica)))

    patch(RequestTask, "leg_ended", leg_ended)


@mutant("U35", "W-18", witness=Plan(
    stages=_TWO, requests=(_asked(tokens(1), tokens(1), companions=((Stall(),),)),), companions=1
))  # fmt: skip
def a_bundle_is_waited_for_for_ever(patch: Patch) -> None:
    """A companion that never ends keeps its request for ever."""
    patch(RequestFlow, "bundle_expired", lambda _: ())


@mutant("U36", "W-22", witness=Plan(
    stages=(StagePlan(replicas=2), StagePlan(source=0, final=True)),
    requests=(_asked(tokens(1), tokens(1), companions=(tokens(1),)),),
    companions=1,
))  # fmt: skip
def companions_go_anywhere(patch: Patch) -> None:
    """A companion is at another replica than its request."""
    real = Turn._new_leg

    def new_leg(self: Turn, stage_id: int, replica: Replica, *, role: str | None = None) -> Leg:
        return real(self, stage_id, replica if role is None else self._task.pools[stage_id].pick(), role=role)

    patch(Turn, "_new_leg", new_leg)


@mutant("W-27", witness=Plan(
    stages=_BOTH_FINAL, requests=(_asked((Wait(5.0), Finish()), tokens(1), companions=(tokens(2),)),), companions=1
))  # fmt: skip
def outputs_of_companions_are_delivered(patch: Patch) -> None:
    """The caller gets what a companion says as if its request had said it."""
    real = Turn._new_leg

    def new_leg(self: Turn, stage_id: int, replica: Replica, *, role: str | None = None) -> Leg:
        leg = real(self, stage_id, replica, role=role)
        leg.emits = leg.emits or role is not None
        return leg

    patch(Turn, "_new_leg", new_leg)


# ---- prefill and decode

_PREFILLED = Plan(
    stages=(StagePlan(), StagePlan(source=0, final=True, submit_time=2.0)),
    requests=(_asked((Finish("length", (0,), _KV),), tokens(1), act="leave", when=1.0),),
    pair=True,
)


@mutant("U39", witness=_PREFILLED)
def a_cache_is_never_released(patch: Patch) -> None:
    """A request ends between prefill and decode, and the prefill engine keeps its KV cache."""

    async def release_kv(_: Turn, _params: Any) -> None:
        pass

    patch(Turn, "_release_kv", release_kv)


@mutant("U39", witness=_PREFILLED)
def a_cache_is_released_twice(patch: Patch) -> None:
    """A block is freed that may be another request's by then."""
    real = Turn._release_kv

    async def release_kv(self: Turn, params: Any) -> None:
        await real(self, params)
        await real(self, params)

    patch(Turn, "_release_kv", release_kv)


@mutant("U39", witness=Plan(
    stages=(StagePlan(), StagePlan(source=0, final=True)),
    requests=(_asked((Finish("length", (0,), _KV),), (Stall(),), act="leave", when=1.0),),
    pair=True,
))  # fmt: skip
def a_cache_is_released_under_its_reader(patch: Patch) -> None:
    """A KV cache is let go of twice: by the decode engine that has it, and by an abort."""
    _tables(patch, hold={(HoldState.HELD, HoldFact.TAKEN): HoldState.HELD})


@mutant("U14", "U41", witness=Plan(
    stages=(StagePlan(), StagePlan(source=0, final=True)),
    requests=(_asked((Finish("length", (0,)),), tokens(1)),),
    pair=True,
))  # fmt: skip
def a_prefill_without_a_cache_is_handed_on(patch: Patch) -> None:
    """The decode engine is told to take over a KV cache that nobody knows how to find."""
    real = RequestFlow._hand_off

    def hand_off(self: RequestFlow, decode: int, kv_params: Any) -> Sequence[Decision]:
        return real(self, decode, kv_params or _KV)

    patch(RequestFlow, "_hand_off", hand_off)


# ---- connectors


@mutant("W-14", witness=Plan(stages=_LINKED, requests=(_asked(tokens(1), tokens(1)),)))
def a_placeholder_is_never_submitted(patch: Patch) -> None:
    """A stage whose data comes by connector is not told that a request is coming."""

    def with_it(*_: Any, **__: Any) -> Iterator[Decision]:
        return iter(())

    patch(RequestFlow, "_with_it", with_it)


@mutant("U43", witness=Plan(stages=_LINKED, requests=(_asked(tokens(1), (Stall(),)),)))
def a_chunk_is_waited_for_for_ever(patch: Patch) -> None:
    """A stage whose data comes by connector waits for the next piece of it without a limit."""
    patch(RequestTask, "_chunks_due", lambda _: [])


@mutant("W-21", witness=Plan(stages=_LINKED, requests=(_asked(tokens(2, each=5.0), tokens(1)),)))
def a_sender_is_cut_off(patch: Patch) -> None:
    """The request ends with the stage that receives, while the one that sends is at work."""
    real = RoutePlan.__attrs_post_init__

    def post_init(self: RoutePlan) -> None:
        real(self)
        object.__setattr__(self, "needed", frozenset(one for one in self.needed if self.emits[one]))

    patch(RoutePlan, "__attrs_post_init__", post_init)


@mutant("U39", witness=Plan(stages=_TWO, requests=(_asked(tokens(1), (Reject(),)),)))
def a_refusal_by_a_later_stage_is_ignored(patch: Patch) -> None:
    """A stage refuses what a bridge has made, and the request waits for it."""
    real = Turn.carry_out_next

    async def carry_out_next(self: Turn) -> None:
        with contextlib.suppress(OmniTrioError):
            await real(self)

    patch(Turn, "carry_out_next", carry_out_next)
