"""The task of one request: carries out what routing decides, and lets go of every stage at the end."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import trio

from omni_trio.bridges import BridgeContext, BridgeSpec
from omni_trio.errors import (
    BridgeFailed,
    DeadlineExceeded,
    EngineDied,
    ReplicaLost,
    RequestAborted,
    RequestError,
    ShutDown,
    StageFailed,
)
from omni_trio.messages import StageInput, StageOutput, StageRequest
from omni_trio.routing import Decision, Fail, Finish, Forward, RequestFlow, RoutePlan, Submit, Update
from omni_trio.stages import Leg, Replica, ReplicaState

from ._mailbox import Mailbox
from ._signal import Signal

if TYPE_CHECKING:
    from ._orchestrator import Orchestrator

__all__ = ["RequestTask", "Verdict"]

Verdict: TypeAlias = Literal["finished", "failed", "aborted", "expired"]


class RequestTask:
    """One request, from admission until no stage holds it.

    There is one way out for all ends. `end` gives the verdict: the first call counts, tells the consumer, and
    cancels the task's scope where the task may be waiting for something. The task's own `finally` then aborts at
    every stage that still holds the request, waits for the acknowledgements, and only then counts as done.
    """

    def __init__(
        self,
        orchestrator: Orchestrator,
        *,
        request_id: str,
        external_id: str,
        prompt: StageInput,
        params: tuple[Any, ...],
        plan: RoutePlan,
        deadline: float,
        priority: int,
    ) -> None:
        self.request_id = request_id
        self.external_id = external_id
        self.prompt = prompt
        self.params = params
        self.plan = plan
        self.deadline = deadline
        self.priority = priority
        self.mailbox = Mailbox()
        self.verdict: Verdict | None = None
        self.error: RequestError | None = None
        self.abort_error: EngineDied | None = None
        """Set where a stage did not acknowledge the abort."""
        self.admitted = False
        """Whether the first stage has the request."""
        self.at_door = Signal()
        """Set once the first stage has the request, or it has ended before."""
        self.done = trio.Event()
        """Set once no stage holds the request any more."""
        self.scope = trio.CancelScope(deadline=deadline)
        self.legs: dict[int, Leg] = {}
        self._flow = RequestFlow(plan)
        self._orchestrator = orchestrator
        self._pipeline = plan.pipeline
        self._trace = orchestrator.trace
        self._created = trio.current_time()
        self._forwards: dict[int, bool] = {}
        self._bridge_states: dict[int, dict[str, Any]] = {}
        self._wake = Signal()
        self._idle = False

    # ---- facts from the readers of replicas; synchronous

    def leg_output(self, leg: Leg, output: StageOutput) -> None:
        """A stage gave an output that is not its last one."""
        if leg.emits:
            self.mailbox.put(leg, output)
        if leg.collects:
            leg.collect(output)
            if leg.streams:
                self._follow(self._flow.output(leg.stage_id, finished=False))
        if self._trace:
            self._emit_leg("leg.output", leg, value=float(len(output.token_ids) or 1))

    def leg_ended(self, leg: Leg, output: StageOutput, now: float) -> None:
        """A stage gave its last output, or failed the request."""
        if output.error is not None:
            self._emit_leg("leg.finished", leg, detail="error")
            self.end(StageFailed(output.error, **self._place(leg.replica)))
            return
        if leg.collects:
            leg.collect(output)
        metrics = leg.finish(now)
        if leg.emits:
            self.mailbox.put(leg, output)
        else:
            self.mailbox.put_metrics(leg, metrics)
        self._emit_leg("leg.finished", leg, detail=output.finish_reason or "")
        self._follow(self._flow.output(leg.stage_id, finished=True))

    def leg_lost(self, leg: Leg, death: EngineDied) -> None:
        """The replica that worked on a leg is gone."""
        error = ReplicaLost(f"the replica that worked on it is gone: {death.message}", **self._place(leg.replica))
        error.__cause__ = death
        self.end(error)

    def _follow(self, decisions: Iterable[Decision]) -> None:
        for decision in decisions:
            if isinstance(decision, Forward):
                self._forwards[decision.stage_id] = decision.last or self._forwards.get(decision.stage_id, False)
                self._wake.set()
            elif isinstance(decision, Finish):
                self.end(None)

    # ---- the end

    def end(self, error: RequestError | None, verdict: Verdict | None = None) -> None:
        """Give the verdict. Only the first call counts."""
        if self.verdict is not None:
            return
        self.verdict = verdict or ("finished" if error is None else "failed")
        self.error = error
        discard = self.verdict == "aborted"  # when abort() returns, no output may be delivered any more (I6)
        self.mailbox.close(error, discard=discard)
        if not self._idle:
            # The task may be inside a bridge, a submit or an update, whose result nobody needs any more.
            self.scope.cancel(f"request {self.external_id}: {self.verdict}")
        self._wake.set()
        self.at_door.set()
        self._trace.emit(
            f"request.{self.verdict}", request_id=self.external_id, detail="" if error is None else str(error)
        )
        if self._idle and not any(leg.held for leg in self.legs.values()):
            # The usual end: nothing is under way and no stage holds it, so it is done here and now, and its caller
            # need not wait until the task has run once more only to find that out.
            self._close()

    def abort(self, why: str) -> None:
        """End with `RequestAborted`."""
        self.end(RequestAborted(why, request_id=self.external_id), "aborted")

    def shut_down(self) -> None:
        """End because the runtime closes."""
        self.end(ShutDown("the runtime is closing; ask the next one again", request_id=self.external_id), "aborted")

    # ---- the task

    async def run(self) -> None:
        """Live. Started by the orchestrator in its requests' nursery."""
        try:
            with self.scope:
                await self._drive()
            # A verdict is missing where the scope's own deadline ended it.
            self.end(DeadlineExceeded("its deadline passed before it was done", request_id=self.external_id), "expired")
        finally:
            self.shut_down()  # counts only where the whole runtime is being cancelled
            if not self.done.is_set():
                await self._release()
                self._close()

    async def _drive(self) -> None:
        try:
            for decision in self._flow.start():
                await self._carry_out(decision, self.prompt, 0.0)
            self.admitted = True
            self.at_door.set()
            while self.verdict is None:
                if self._forwards:
                    stage_id = next(iter(self._forwards))
                    await self._forward(stage_id, last=self._forwards.pop(stage_id))
                else:
                    self._idle = True
                    await self._wake.wait()
                    self._idle = False
        except RequestError as error:
            self.end(error)

    async def _carry_out(self, decision: Decision, made: StageInput, bridge_s: float) -> None:
        if isinstance(decision, Submit):
            await self._submit(decision.stage_id, made, last=decision.last, bridge_s=bridge_s)
        elif isinstance(decision, Update):
            await self._update(self.legs[decision.stage_id], made, last=decision.last, bridge_s=bridge_s)
        elif isinstance(decision, Fail):
            raise BridgeFailed(decision.reason, **self._place(decision.stage_id))

    async def _submit(self, stage_id: int, made: StageInput, *, last: bool, bridge_s: float) -> None:
        pipeline = self._pipeline
        try:
            replica = self._orchestrator.pools[stage_id].pick()
        except RequestError as error:
            error.request_id = self.external_id
            raise
        leg = Leg(
            self,
            replica,
            request_id=self.request_id,
            external_id=self.external_id,
            stage=pipeline.stages[stage_id].name,
            stage_id=stage_id,
            modality=pipeline.modalities[stage_id],
            emits=self.plan.emits[stage_id],
            collects=bool(self.plan.feeds[stage_id]),
            streams=bool(self.plan.streams_to[stage_id]),
        )
        self.legs[stage_id] = leg
        replica.bind(leg)  # before the submission: outputs may come before it returns
        now = leg.meter.submitted = trio.current_time()
        leg.meter.bridge_s = bridge_s
        if stage_id == 0:
            leg.meter.queue_wait_s = now - self._created
        self._emit_leg("leg.submitted", leg)
        await self._hand_over(leg, made, last=last, update=False)
        leg.meter.preprocess_s = trio.current_time() - now

    async def _update(self, leg: Leg, made: StageInput, *, last: bool, bridge_s: float) -> None:
        leg.meter.bridge_s += bridge_s
        self._emit_leg("leg.updated", leg)
        await self._hand_over(leg, made, last=last, update=True)

    async def _hand_over(self, leg: Leg, made: StageInput, *, last: bool, update: bool) -> None:
        replica = leg.replica
        request = StageRequest(
            request_id=self.request_id,
            input=made,
            params=self.params[leg.stage_id],
            last=last,
            want_text=self._pipeline.reads_text[leg.stage_id] or (leg.emits and leg.modality == "text"),
            priority=self.priority,
            deadline=self.deadline,
        )
        client = replica.client
        assert client is not None  # a pool picks among replicas that are up
        try:
            if update:
                await client.update(request)
            else:
                await client.submit(request)
        except EngineDied as error:
            self._orchestrator.replica_died(replica, error)
            raise error.for_request(self.external_id) from error
        except RequestError as error:
            if not update:
                replica.let_go(leg)  # by contract a stage that refuses a request does not have it
            for field, value in self._place(replica).items():
                if getattr(error, field) is None:
                    setattr(error, field, value)
            error.request_id = self.external_id
            raise
        except Exception as error:
            raise StageFailed(
                f"handing the request to it raised {type(error).__name__}: {error}", **self._place(replica)
            ) from error

    async def _forward(self, stage_id: int, *, last: bool) -> None:
        spec = self._pipeline.bridges[stage_id]
        source = self._pipeline.sources[stage_id]
        assert spec is not None  # only the first stage has no source
        assert source is not None
        started = trio.current_time()
        self._emit_bridge("bridge.started", stage_id)
        try:
            made = await self._run_bridge(spec, stage_id, self.legs[source], last=last)
        except Exception as error:
            raise BridgeFailed(
                f"the bridge {spec.name!r} in front of it raised {type(error).__name__}: {error}",
                **self._place(stage_id),
            ) from error
        if made is not None and not isinstance(made, StageInput):
            raise BridgeFailed(
                f"the bridge {spec.name!r} in front of it returned {type(made).__name__}; "
                "a bridge returns a StageInput, or None for nothing",
                **self._place(stage_id),
            )
        self._emit_bridge("bridge.finished", stage_id)
        took = trio.current_time() - started
        for decision in self._flow.bridged(stage_id, made_input=made is not None, last=last):
            await self._carry_out(decision, made or StageInput(), took)

    async def _run_bridge(self, spec: BridgeSpec, stage_id: int, leg: Leg, *, last: bool) -> StageInput | None:
        in_thread = spec.run_in == "thread"
        context = BridgeContext(
            request_id=self.external_id,
            prompt=self.prompt,
            source=leg.stage,
            stage=self._pipeline.stages[stage_id].name,
            # A reader goes on appending to the list while a thread looks at it, so a thread gets a copy.
            token_ids=tuple(leg.token_ids) if in_thread else leg.token_ids,
            text=leg.text() if "text" in spec.reads else "",
            data=leg.data() if "data" in spec.reads else {},
            finished=last,
            finish_reason=leg.finish_reason,
            state=self._bridge_states.setdefault(stage_id, {}),
            requires_multimodal_data=self._pipeline.stages[stage_id].requires_multimodal_data,
        )
        if in_thread:
            # Abandoned where the request ends meanwhile: an abort is bounded, a bridge in a thread is not.
            return await trio.to_thread.run_sync(spec.function, context, abandon_on_cancel=True)
        return spec.function(context)

    # ---- letting go

    def _close(self) -> None:
        self._flow.release()
        self._orchestrator.forget(self)
        self.done.set()

    async def _release(self) -> None:
        held = [leg for leg in self.legs.values() if leg.held]
        for leg in held:
            leg.replica.unbind(leg)
        if not held:
            return
        budget = self._orchestrator.abort_timeout
        with trio.move_on_after(budget, shield=True):
            if len(held) == 1:
                await self._abort_leg(held[0])
            else:
                async with trio.open_nursery() as nursery:
                    for leg in held:
                        nursery.start_soon(self._abort_leg, leg)
        for leg in held:
            if leg.held:
                self._unacknowledged(leg, f"it did not acknowledge an abort within {budget:g} s")
            self._emit_leg("leg.released", leg)

    async def _abort_leg(self, leg: Leg) -> None:
        client = leg.replica.client
        assert client is not None  # it was up when the leg was bound to it
        try:
            if leg.replica.state is ReplicaState.READY:  # else it is dead, and holds nothing
                await client.abort([self.request_id])
        except EngineDied as error:
            self._orchestrator.replica_died(leg.replica, error)
        except Exception as error:
            self._unacknowledged(leg, f"its abort raised {type(error).__name__}: {error}", error)
        leg.replica.let_go(leg)

    def _unacknowledged(self, leg: Leg, why: str, cause: Exception | None = None) -> None:
        # Nobody can know whether the work goes on, so the replica is not to be trusted with its slots (I6, I8).
        death = EngineDied(f"{why}; it counts as dead", **(self._place(leg.replica) | {"request_id": None}))
        death.__cause__ = cause
        self.abort_error = death.for_request(self.external_id)
        self._orchestrator.replica_died(leg.replica, death)
        leg.replica.let_go(leg)

    # ---- words

    def _place(self, where: Replica | int) -> dict[str, Any]:
        stage_id = where if isinstance(where, int) else where.stage_id
        return {
            "request_id": self.external_id,
            "stage": self._pipeline.stages[stage_id].name,
            "stage_id": stage_id,
            "replica_id": None if isinstance(where, int) else where.replica_id,
        }

    def _emit_bridge(self, name: str, stage_id: int) -> None:
        if self._trace:
            self._trace.emit(name, **self._place(stage_id))

    def _emit_leg(self, name: str, leg: Leg, *, detail: str = "", value: float = 0.0) -> None:
        if self._trace:
            self._trace.emit(name, **self._place(leg.replica), detail=detail, value=value)
