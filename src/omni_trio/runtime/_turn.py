"""One turn of a request: its legs, what is to be carried between them, and the letting go of them.

A request has one turn; in a session each barge-in of the caller begins another, and fences what the last one still
has to say.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import attrs
import trio

from omni_trio.bridges import BridgeContext, BridgeSpec, Companion, CompanionOutput
from omni_trio.errors import BridgeFailed, EngineDied, InvalidRequest, NoReplicaAvailable, RequestError, StageFailed
from omni_trio.messages import KvTransfer, StageInput, StageRequest
from omni_trio.routing import (
    Decision,
    Fail,
    Forward,
    Handoff,
    RequestFlow,
    Submit,
    SubmitCompanion,
    Update,
)
from omni_trio.stages import Leg, Mark, ReleasesKv, Replica, ReplicaState

from . import _buggify
from ._fail import failure, locate

if TYPE_CHECKING:
    from ._request import RequestTask

__all__ = ["Turn"]

_NOTHING = StageInput()
_NO_SENDERS: Mapping[str, Mapping[str, Any]] = MappingProxyType({})
_NO_LEGS: dict[str, Leg] = {}
"""Stays empty."""
_NO_COMPANIONS: Mapping[str, CompanionOutput] = MappingProxyType({})


@attrs.define(eq=False)
class _Waiting:
    """A decision that the request's task has not come to yet."""

    decision: Forward | Handoff | Update
    mark: Mark | None = None
    """In a session, at the end of a segment: how much of the source belongs to it and to those before."""
    segment: int = 0


class Turn:
    """Carries out what routing decides for one turn. Only the request's own task calls the coroutines."""

    def __init__(self, task: RequestTask, number: int, companions: Sequence[Companion] = ()) -> None:
        self.number = number
        self.request_id = f"{task.request_id}.{number}" if number else task.request_id
        """What the stages call the request in this turn; never used again."""
        self.flow = RequestFlow(
            task.plan, roles=[companion.role for companion in companions], session=task.session is not None
        )
        self.legs: dict[int, Leg] = {}
        # Most requests have none of these, and there are many requests: what is not needed is not made.
        self.companions: dict[str, Leg] = {} if companions else _NO_LEGS
        self._inputs = {companion.role: companion for companion in companions}
        self._task = task
        self._pipeline = task.plan.pipeline
        self._waiting: deque[_Waiting] = deque()
        self._mergeable: dict[int, _Waiting] = {}
        self._states: dict[int, dict[str, Any]] = {}
        self._segments = 0

    # ---- what waits

    def __bool__(self) -> bool:
        """Whether anything waits to be carried out."""
        return bool(self._waiting)

    def put(self, decision: Forward | Handoff | Update, source: Leg | None) -> None:
        """Have a decision carried out by the task. Pieces over one edge are carried together."""
        if not isinstance(decision, Forward):
            self._waiting.append(_Waiting(decision))
            return
        stage_id = decision.stage_id
        ends_segment = decision.segment_end and not decision.last
        earlier = self._mergeable.get(stage_id)
        if earlier is not None and not ends_segment:
            earlier.decision = decision
            return
        waiting = _Waiting(decision)
        if source is not None and source.segments is not None:
            waiting.segment = source.segment
        if ends_segment:
            assert source is not None  # a segment of it has ended
            waiting.mark = source.mark()
            if earlier is not None:
                earlier.decision, earlier.mark, earlier.segment = decision, waiting.mark, waiting.segment
                del self._mergeable[stage_id]
                return
        else:
            self._mergeable[stage_id] = waiting
        self._waiting.append(waiting)

    async def carry_out_next(self) -> None:
        """Carry out what has waited longest."""
        waiting = self._waiting.popleft()
        decision = waiting.decision
        if not isinstance(decision, Forward):
            made = self._task.prompt if isinstance(decision, Handoff) else _NOTHING
            await self.carry_out((decision,), made, segment=waiting.segment)
            return
        if self._mergeable.get(decision.stage_id) is waiting:
            del self._mergeable[decision.stage_id]
        await self._forward(decision, waiting)

    # ---- decisions

    async def begin(self, first: StageInput, *, last: bool) -> None:
        """Hand the first input to the first stage, and the companions with it."""
        await self.carry_out(self.flow.start(last=last), first, segment=self._segments)

    async def feed(self, segment: StageInput, *, last: bool) -> None:
        """Hand another segment of a session to the first stage."""
        decisions = self.flow.more_input(last=last, made_input=segment != _NOTHING)
        await self.carry_out(decisions, segment, segment=self._segments)

    async def carry_out(
        self, decisions: Iterable[Decision], made: StageInput, *, bridge_s: float = 0.0, segment: int = 0
    ) -> None:
        """Carry decisions out in order. `made` is the input that they are about."""
        for decision in decisions:
            if isinstance(decision, Submit):
                await self._begin_leg(decision, made, bridge_s, segment)
            elif isinstance(decision, Update):
                leg = self.legs[decision.stage_id]
                leg.meter.bridge_s += bridge_s
                self._task.trace_leg("leg.updated", leg)
                self._note_segment(leg, decision, segment)
                given = self._given_to(decision, made)
                request = self._stage_request(leg, given, last=decision.last, segment_end=decision.segment_end)
                await self._hand_over(leg, request, update=True)
            elif isinstance(decision, SubmitCompanion):
                await self._submit_companion(decision.role)
            elif isinstance(decision, Handoff):
                await self._take_over(decision)
            elif isinstance(decision, Fail):
                raise failure(decision, self._task.place(decision.stage_id))

    async def _begin_leg(self, decision: Submit, made: StageInput, bridge_s: float, segment: int) -> None:
        stage_id = decision.stage_id
        plan = self._task.plan
        prefills = stage_id == 0 and plan.handoff is not None
        try:
            replica = await self._acquire(stage_id)
        except NoReplicaAvailable:
            if not prefills or self._pipeline.stages[0].when_empty == "fail":
                raise
            await self.carry_out(self.flow.skip_prefill(), made)
            return
        leg = self._new_leg(stage_id, replica)
        self.legs[stage_id] = leg
        leg.meter.bridge_s = bridge_s
        self._note_segment(leg, decision, segment)
        given = self._given_to(decision, made)
        kv = KvTransfer(role="prefill", transfer_id=f"xfer-{self.request_id}") if prefills else None
        await self._submit(leg, self._stage_request(leg, given, decision.last, decision.segment_end, kv))

    async def _take_over(self, decision: Handoff) -> None:
        leg = self._new_leg(decision.stage_id, await self._acquire(decision.stage_id))
        self.legs[decision.stage_id] = leg
        kv = None if decision.skipped else self._decode_transfer(decision.params)
        await self._submit(leg, self._stage_request(leg, self._task.prompt, kv_transfer=kv))
        await self.carry_out(self.flow.taken_over(), self._task.prompt)

    def _decode_transfer(self, params: Mapping[str, Any] | None) -> KvTransfer:
        return KvTransfer(role="decode", transfer_id=f"xfer-{self.request_id}", params=params)

    async def _submit_companion(self, role: str) -> None:
        companion = self._inputs[role]
        # Where the request is, since the stage behind needs the KV caches of all of them from one place (I9).
        leg = self._new_leg(0, self.legs[0].replica, role=role)
        self.companions[role] = leg
        params = self._task.companion_params(companion.sampling)
        await self._submit(leg, self._stage_request(leg, companion.input, params=params))

    async def _acquire(self, stage_id: int) -> Replica:
        try:
            return await self._task.pools[stage_id].acquire(self._task.external_id, self._task.prompt)
        except RequestError as error:
            error.request_id = self._task.external_id
            raise

    def _new_leg(self, stage_id: int, replica: Replica, *, role: str | None = None) -> Leg:
        task, plan = self._task, self._task.plan
        leg = Leg(
            task,
            replica,
            request_id=self.request_id if role is None else f"{self.request_id}.{role}",
            external_id=task.external_id,
            stage=self._pipeline.stages[stage_id].name,
            stage_id=stage_id,
            modality=self._pipeline.modalities[stage_id],
            emits=plan.emits[stage_id] and role is None,
            collects=plan.collects[stage_id],
            streams=bool(plan.pieces_to[stage_id]) and role is None,
            readers=len(plan.feeds[stage_id]),
            role=role,
            turn=self.number,
        )
        if task.session is not None:
            leg.segments = deque()
        return leg

    def _note_segment(self, leg: Leg, decision: Submit | Update, segment: int) -> None:
        if leg.segments is None:
            return
        if leg.stage_id == 0:
            self._segments += 1
        if not leg.segments or leg.segments[-1] != segment:
            leg.segments.append(segment)

    def _given_to(self, decision: Submit | Update, made: StageInput) -> StageInput:
        """What a stage is handed: what the decision is about, unless its data comes by connector."""
        if decision.placeholder:
            return self._placeholder(decision.stage_id)
        return _NOTHING if self._pipeline.stages[decision.stage_id].feed == "connector" else made

    def _placeholder(self, stage_id: int) -> StageInput:
        stage = self._pipeline.stages[stage_id]
        prompt = self._task.prompt
        if stage.kind in ("worker", "diffusion"):
            return prompt
        length = self._pipeline.placeholders[stage_id]
        if length is None:
            if not prompt.token_ids:
                raise InvalidRequest(
                    "its data comes by connector, and how long its prompt will be is not known: give the prompt as "
                    "token ids, or declare the stage's placeholder",
                    **self._task.place(stage_id),
                )
            return StageInput(token_ids=(0,) * len(prompt.token_ids))
        try:
            count = max(1, int(length(prompt)))
        except InvalidRequest as error:
            locate(error, self._task.place(stage_id))
            raise
        except Exception as error:
            raise BridgeFailed(
                f"its placeholder function raised {type(error).__name__}: {error}", **self._task.place(stage_id)
            ) from error
        return StageInput(token_ids=(0,) * count)

    # ---- handing over

    def _stage_request(
        self,
        leg: Leg,
        made: StageInput,
        last: bool = True,
        segment_end: bool = False,
        kv_transfer: KvTransfer | None = None,
        params: Any = None,
    ) -> StageRequest:
        task = self._task
        stage_id = leg.stage_id
        return StageRequest(
            request_id=leg.request_id,
            input=made,
            params=self._params_for(stage_id) if params is None else params,
            last=last,
            segment_end=segment_end,
            want_text=self._pipeline.reads_text[stage_id] or (leg.emits and leg.modality == "text"),
            priority=task.priority,
            deadline=task.deadline,
            kv_transfer=kv_transfer,
            kv_senders=self._senders_to(stage_id),
        )

    def _params_for(self, stage_id: int) -> Any:
        params = self._task.params[stage_id]
        if not self.companions or self._pipeline.sources[stage_id] != 0 or not isinstance(params, Mapping):
            return params
        ids = {role: leg.request_id for role, leg in self.companions.items()}
        return MappingProxyType({**params, "cfg_kv_request_ids": ids})

    def _senders_to(self, stage_id: int) -> Mapping[str, Mapping[str, Any]]:
        source = self._pipeline.sources[stage_id]
        leg = None if source is None else self.legs.get(source)
        if leg is None or leg.replica.sends_kv is None:
            return _NO_SENDERS
        info = leg.replica.sends_kv.kv_sender_info()
        return {} if not info else {leg.stage: info}

    async def _submit(self, leg: Leg, request: StageRequest) -> None:
        task = self._task
        leg.replica.bind(leg)  # before the submission: outputs may come before it returns
        now = leg.meter.submitted = trio.current_time()
        if leg.stage_id == 0:
            leg.meter.queue_wait_s = now - task.created
        task.trace_leg("leg.submitted", leg)
        await self._hand_over(leg, request, update=False)
        leg.meter.preprocess_s = trio.current_time() - now

    async def _hand_over(self, leg: Leg, request: StageRequest, *, update: bool) -> None:
        replica = leg.replica
        task = self._task
        client = replica.client
        assert client is not None  # a pool picks among replicas that are up
        if _buggify.hook is not None:
            await _buggify.hook("before a hand-over")
        await task.begin_hand_over(leg.stage_id)
        try:
            if update:
                await client.update(request)
            else:
                await client.submit(request)
            if _buggify.hook is not None:
                # A submission that is cancelled is none; this is one that takes its time to come back.
                await _buggify.hook("after a hand-over", shield=True)
        except EngineDied as error:
            task.replica_died(replica, error)
            raise error.for_request(task.external_id) from error
        except RequestError as error:
            if not update:
                replica.let_go(leg)  # by contract a stage that refuses a request does not have it
            locate(error, task.place(replica))
            error.request_id = task.external_id
            if leg.role is not None:
                error.message = f"its companion {leg.role!r} was refused: {error.message}"
            raise
        except Exception as error:
            raise StageFailed(
                f"handing the request to it raised {type(error).__name__}: {error}", **task.place(replica)
            ) from error
        finally:
            task.end_hand_over(leg.stage_id)

    # ---- bridges

    async def _forward(self, decision: Forward, waiting: _Waiting) -> None:
        stage_id = decision.stage_id
        spec = self._pipeline.bridges[stage_id]
        source = self._pipeline.sources[stage_id]
        assert spec is not None  # only the first stage has no source
        assert source is not None
        leg = self.legs[source]
        started = trio.current_time()
        self._task.trace_bridge("bridge.started", stage_id)
        context = self._context(spec, decision, leg, waiting)
        try:
            made = await _run_bridge(spec, context)
        except InvalidRequest as error:  # a bridge may refuse what the caller asked for, and say so
            locate(error, self._task.place(stage_id))
            raise
        except Exception as error:
            raise BridgeFailed(
                f"the bridge {spec.name!r} in front of it raised {type(error).__name__}: {error}",
                **self._task.place(stage_id),
            ) from error
        if made is not None and not isinstance(made, StageInput):
            raise BridgeFailed(
                f"the bridge {spec.name!r} in front of it returned {type(made).__name__}; "
                "a bridge returns a StageInput, or None for nothing",
                **self._task.place(stage_id),
            )
        self._task.trace_bridge("bridge.finished", stage_id)
        if _buggify.hook is not None:
            await _buggify.hook("after a bridge")
        follows = self.flow.bridged(
            stage_id,
            made_input=made is not None,
            last=decision.last,
            saw_end=context.finished,
            segment_end=decision.segment_end,
        )
        for again in follows:
            if isinstance(again, Forward):  # it came to nothing, and the source has ended meanwhile
                self.put(again, leg)
                return
        took = trio.current_time() - started
        if decision.last and (made is not None or context.finished):  # else it will be asked again at the end
            self._let_forget(leg)
        await self.carry_out(follows, made or _NOTHING, bridge_s=took, segment=waiting.segment)

    def _let_forget(self, source: Leg) -> None:
        """A bridge has had all that its source makes for it; what no other one waits for need not be kept."""
        source.readers -= 1
        if source.readers:
            return
        source.forget()
        if source.stage_id == 0:
            for leg in self.companions.values():
                leg.forget()
        elif source.stage_id == self._task.plan.handoff and 0 in self.legs:
            self.legs[0].forget()

    def _context(self, spec: BridgeSpec, decision: Forward, leg: Leg, waiting: _Waiting) -> BridgeContext:
        stage = self._pipeline.stages[decision.stage_id]
        token_ids = leg.tokens_up_to(waiting.mark)
        return BridgeContext(
            request_id=self._task.external_id,
            prompt=self._task.prompt,
            source=leg.stage,
            stage=stage.name,
            # A reader goes on appending to the list while a thread looks at it, so a thread gets a copy.
            token_ids=tuple(token_ids) if spec.run_in == "thread" else token_ids,
            text=leg.text_up_to(waiting.mark) if "text" in spec.reads else "",
            data=leg.data_up_to(waiting.mark) if "data" in spec.reads else {},
            prefill_data=self._prefill_data(leg) if "data" in spec.reads else {},
            finished=decision.last and leg.finish_reason is not None,
            finish_reason=leg.finish_reason,
            segment=waiting.segment,
            segment_end=decision.segment_end,
            companions=self._companion_outputs(spec) if self.companions and leg.stage_id == 0 else _NO_COMPANIONS,
            state=self._states.setdefault(decision.stage_id, {}),
            requires_multimodal_data=stage.requires_multimodal_data,
            params=self._task.params[decision.stage_id],
        )

    def _prefill_data(self, leg: Leg) -> Mapping[str, Any]:
        return self.legs[0].data() if leg.stage_id == self._task.plan.handoff and 0 in self.legs else {}

    def _companion_outputs(self, spec: BridgeSpec) -> Mapping[str, CompanionOutput]:
        return {
            role: CompanionOutput(
                request_id=leg.request_id,
                token_ids=tuple(leg.token_ids),
                text=leg.text() if "text" in spec.reads else "",
                data=leg.data() if "data" in spec.reads else {},
                finish_reason=leg.finish_reason,
            )
            for role, leg in self.companions.items()
        }

    # ---- letting go

    def holds(self) -> bool:
        """Whether any replica may still be at work on it."""
        return any(leg.held for leg in self.legs.values()) or any(leg.held for leg in self.companions.values())

    def held(self) -> list[Leg]:
        """The legs that their replicas may still be at work on."""
        return [leg for legs in (self.legs, self.companions) for leg in legs.values() if leg.held]

    def fence(self) -> None:
        """Take no more outputs of this turn, and carry nothing out any more."""
        for leg in self.held():
            leg.replica.unbind(leg)
        self._waiting.clear()
        self._mergeable.clear()

    async def let_go(self, budget: float) -> None:
        """Abort at every stage that still holds the turn, and release what a prefill holds for it.

        Args:
            budget: seconds that this may take in all; a replica that needs more counts as dead.
        """
        self.fence()
        held = self.held()
        handoff = self._task.plan.handoff
        if handoff is not None and (decode := self.legs.get(handoff)) is not None and decode.meter.outputs:
            self.flow.taken_over()  # its submission has not come back yet, but what it said is proof enough
        kv = self.flow.release().kv
        if not held and kv is None:
            return
        with trio.move_on_after(budget, shield=True):
            if _buggify.hook is not None:
                await _buggify.hook("before a release")
            if len(held) == 1 and kv is None:
                await self._abort(held[0])
            else:
                async with trio.open_nursery() as nursery:
                    for leg in held:
                        nursery.start_soon(self._abort, leg)
                    if kv is not None:
                        nursery.start_soon(self._release_kv, kv)
        for leg in held:
            if leg.held:
                self._task.unacknowledged(leg, f"it did not acknowledge an abort within {budget:g} s")
            self._task.trace_leg("leg.released", leg)

    async def _abort(self, leg: Leg) -> None:
        client = leg.replica.client
        assert client is not None  # it was up when the leg was bound to it
        if _buggify.hook is not None:
            await _buggify.hook("before an abort")
        try:
            if leg.replica.state is ReplicaState.READY:  # else it is dead, and holds nothing
                await client.abort([leg.request_id])
        except EngineDied as error:
            self._task.replica_died(leg.replica, error)
        except Exception as error:
            self._task.unacknowledged(leg, f"its abort raised {type(error).__name__}: {error}", error)
        leg.replica.let_go(leg)

    async def _release_kv(self, params: Mapping[str, Any]) -> None:
        decode = self._task.plan.handoff
        assert decode is not None  # something was prefilled for it
        client = self._decode_client(decode)
        if client is None:
            self._task.trace_bridge("kv.unreleased", decode)  # the prefill engine's own time-out has to do
            return
        request = StageRequest(
            request_id=self.request_id,
            input=self._task.prompt,
            params=self._task.params[decode],
            kv_transfer=self._decode_transfer(params),
        )
        try:
            await client.release_kv(request)
        except Exception as error:
            self._task.log_unreleased(decode, error)
        else:
            self._task.trace_bridge("kv.released", decode)

    def _decode_client(self, stage_id: int) -> ReleasesKv | None:
        for replica in self._task.pools[stage_id].ready():
            if replica.releases_kv is not None:
                return replica.releases_kv
        return None


async def _run_bridge(spec: BridgeSpec, context: BridgeContext) -> StageInput | None:
    if spec.run_in == "thread":
        # Abandoned where the request ends meanwhile: an abort is bounded, a bridge in a thread is not.
        return await trio.to_thread.run_sync(spec.function, context, abandon_on_cancel=True)
    return spec.function(context)
