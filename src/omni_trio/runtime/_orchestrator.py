"""The tables: pools, replicas and requests, and what a death or the end means for all of them."""

from __future__ import annotations

import functools
import itertools
import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeAlias

import trio

from omni_trio.errors import (
    EngineDied,
    InvalidRequest,
    OmniTrioError,
    Overloaded,
    RequestError,
    ShutDown,
    StartupFailed,
)
from omni_trio.messages import Prompt, StageInput
from omni_trio.pipeline import Pipeline
from omni_trio.routing import RoutePlan
from omni_trio.stages import (
    BalancerFactory,
    ClientFactory,
    Replica,
    ReplicaContext,
    ReplicaState,
    StageClient,
    StagePool,
)

from . import _buggify
from ._admission import RequestOptions, check_completions, checked_id, checked_prompt, split_params
from ._gate import Gate
from ._groups import leaves
from ._request import RequestTask
from ._trace import Trace

__all__ = ["DeathPolicy", "Orchestrator"]

DeathPolicy: TypeAlias = Literal["fail_stop", "isolate"]

_NEWS_TIMEOUT = 0.5
"""Seconds that the consumers of requests have to take the news of a death, before the block is cancelled."""

_logger = logging.getLogger("omni_trio")


class Orchestrator:
    """What the parts of one open runtime share. Only touched from the trio thread."""

    def __init__(
        self,
        pipeline: Pipeline,
        factories: Sequence[ClientFactory],
        *,
        trace: Trace,
        on_engine_death: DeathPolicy,
        max_in_flight: int,
        abort_timeout: float,
        close_timeout: float,
        balancers: Mapping[str, BalancerFactory] | None = None,
    ) -> None:
        self.pipeline = pipeline
        chosen = {name: make() for name, make in (balancers or {}).items()}
        self.pools = tuple(
            StagePool(spec, stage_id, chosen.get(spec.name)) for stage_id, spec in enumerate(pipeline.stages)
        )
        self.trace = trace
        self.abort_timeout = abort_timeout
        self.tasks: dict[str, RequestTask] = {}
        """By the id under which the caller knows the request."""
        self.rejected = 0
        self.verdicts: Counter[str] = Counter()
        self.fatal: EngineDied | None = None
        """The death that ended the runtime."""
        self.closing = False
        self.body_scope = trio.CancelScope()
        """Around the user's block and all requests."""
        self.gate = Gate()
        self._factories = factories
        self._policy = on_engine_death
        self._max_in_flight = max_in_flight
        self._close_timeout = close_timeout
        self._nursery: trio.Nursery | None = None
        self._token = trio.lowlevel.current_trio_token()
        self._ids = itertools.count(1)
        self._plans: dict[int | None, RoutePlan] = {}
        self._default_params: dict[int, Any] = {}

    # ---- replicas

    def replicas(self) -> list[Replica]:
        """All replicas of all stages."""
        return [replica for pool in self.pools for replica in pool.replicas]

    async def start(self, services: trio.Nursery) -> None:
        """Bring all replicas up, at the same time. Each lives in a task of its own in `services`.

        Raises:
            StartupFailed: one did not come up. The caller has to `stop`, which stops the others.
        """
        failures: list[StartupFailed] = []
        try:
            async with trio.open_nursery() as nursery:
                for replica in self.replicas():
                    nursery.start_soon(services.start, self._serve, replica)
        except* StartupFailed as group:
            failures = [error for error in leaves(group) if isinstance(error, StartupFailed)]
        if failures:
            # Several replicas of one broken stage are one piece of news, not a group of them.
            first, *others = sorted(failures, key=lambda error: (error.stage_id or 0, error.replica_id or 0))
            for other in others:
                first.add_note(f"another that did not come up: {other}")
            raise first

    def stop(self, why: str) -> None:
        """Make every replica's task close its client and end."""
        for replica in self.replicas():
            replica.scope.cancel(why)

    async def _serve(self, replica: Replica, task_status: trio.TaskStatus[None]) -> None:
        spec = replica.spec
        place: dict[str, Any] = {
            "stage": spec.name,
            "stage_id": replica.stage_id,
            "replica_id": replica.replica_id,
        }

        def report(phase: str) -> None:
            replica.phase = phase
            self.trace.emit("replica.phase", **place, detail=phase)

        context = ReplicaContext(
            stage=spec,
            stage_id=replica.stage_id,
            replica_id=replica.replica_id,
            want_text=self.pipeline.reads_text[replica.stage_id],
            report=report,
            close_timeout=self._close_timeout,
        )
        # Factories keep to start_timeout themselves and then can say what the process left in its log; this is
        # for those that do not.
        replica.scope.deadline = trio.current_time() + spec.start_timeout + self._close_timeout
        try:
            with replica.scope:
                if _buggify.hook is not None:
                    await _buggify.hook("a replica starts")
                async with self._factories[replica.stage_id](context) as client:
                    replica.open(client)
                    self.pools[replica.stage_id].note_change()
                    # From here on engines outlive those who use them: only `stop` ends this task, however the
                    # runtime's block is left, so that requests can still be aborted at the stages.
                    replica.scope.deadline = float("inf")
                    replica.scope.shield = True
                    self.trace.emit("replica.ready", **place)
                    task_status.started()
                    await self._read(replica, client)
                    self.trace.emit("replica.closing", **place)
        except OmniTrioError as error:
            if replica.state is ReplicaState.STARTING:
                raise
            self._broke(replica, error)
        except Exception as error:
            if replica.state is ReplicaState.STARTING:
                raise StartupFailed(
                    f"it did not come up ({replica.phase}): {type(error).__name__}: {error}",
                    phase=replica.phase,
                    **place,
                ) from error
            self._broke(replica, error)
        finally:
            if replica.state is not ReplicaState.DEAD:
                was_starting = replica.state is ReplicaState.STARTING
                replica.state = ReplicaState.CLOSED
            else:
                was_starting = False
            self.trace.emit("replica.closed", **place)
        if was_starting and replica.scope.cancelled_caught:
            raise StartupFailed(
                f"it did not come up within {spec.start_timeout:g} s; it was at: {replica.phase}. "
                "If it needs more, raise the stage's start_timeout",
                phase=replica.phase,
                **place,
            )

    def _broke(self, replica: Replica, error: Exception) -> None:
        """A replica's client raised where it has nothing to raise: while it ran, or while it was closed."""
        if replica.scope.cancel_called:
            _logger.error("closing stage %r, replica %d, failed", replica.spec.name, replica.replica_id, exc_info=error)
            return
        self.replica_died(replica, self._breach(replica, error))

    def _breach(self, replica: Replica, error: Exception) -> EngineDied:
        words = "; ".join(f"{type(leaf).__name__}: {leaf}" for leaf in leaves(error))
        death = EngineDied(
            f"its client failed with {words}; it counts as dead",
            stage=replica.spec.name,
            stage_id=replica.stage_id,
            replica_id=replica.replica_id,
        )
        death.__cause__ = error
        return death

    async def _read(self, replica: Replica, client: StageClient) -> None:
        while True:
            try:
                outputs = await client.receive()
                if _buggify.hook is not None:
                    await _buggify.hook("outputs are received")
                replica.deliver(outputs, trio.current_time())
            except EngineDied as error:
                self.replica_died(replica, error)
                return
            except Exception as error:
                self.replica_died(replica, self._breach(replica, error))
                return

    def replica_died(self, replica: Replica, death: EngineDied) -> None:
        """Do what the policy says. A death is handled once, whoever notices it first (I15)."""
        if replica.state is not ReplicaState.READY:
            return
        replica.state = ReplicaState.DEAD
        replica.death = death
        self.pools[replica.stage_id].note_change()
        for field in ("stage_id", "replica_id"):
            if getattr(death, field) is None:
                setattr(death, field, getattr(replica, field))
        if death.stage is None:
            death.stage = replica.spec.name
        self.trace.emit(
            "replica.died",
            stage=replica.spec.name,
            stage_id=replica.stage_id,
            replica_id=replica.replica_id,
            detail=death.message,
        )
        if self._policy == "fail_stop":
            self._fail_stop(death)
        else:
            for leg in list(replica.legs.values()):
                leg.owner.leg_lost(leg, death)
        replica.scope.cancel(death.message)

    def _fail_stop(self, death: EngineDied) -> None:
        if self.closing:
            return
        self.closing = True
        self.fatal = death
        tasks = list(self.tasks.values())
        untold = set(tasks)
        reason = "the runtime ends: an engine died"

        def told(task: RequestTask) -> None:
            untold.discard(task)
            if not untold:
                self.body_scope.cancel(reason)

        # The block is cancelled, but not before those who wait for a request have been told: a consumer that is
        # just taking an earlier output would otherwise be cancelled there and never hear what happened.
        self.body_scope.deadline = trio.current_time() + _NEWS_TIMEOUT
        for task in tasks:
            task.mailbox.when_told(functools.partial(told, task))
            task.end(death.for_request(task.external_id))
            task.scope.cancel(reason)
        if not tasks:
            self.body_scope.cancel(reason)

    # ---- requests

    def open(self, nursery: trio.Nursery) -> None:
        """Take requests from now on; their tasks live in `nursery`."""
        self._nursery = nursery

    def close(self) -> None:
        """Take no more requests and end those in flight. Doing it again does nothing."""
        self.closing = True
        for task in list(self.tasks.values()):
            task.shut_down()

    def forget(self, task: RequestTask) -> None:
        """Drop a request that no stage holds any more."""
        del self.tasks[task.external_id]
        assert task.verdict is not None  # its task has given one by now
        if task.verdict == "failed" and not task.admitted:
            self.rejected += 1
        else:
            self.verdicts[task.verdict] += 1

    def admit(self, prompt: Prompt | None, options: RequestOptions) -> RequestTask:
        """Check a request and start its task; no stage has been touched when this raises.

        A request without a prompt is a session, whose input comes later.

        Raises:
            InvalidRequest: it can not be served as it is.
            Overloaded: as many requests as allowed are in flight.
            ShutDown: the runtime is closing.
        """
        try:
            return self._admit(prompt, options)
        except RequestError as error:
            self.rejected += 1
            if error.request_id is None and isinstance(options.request_id, str):
                error.request_id = options.request_id
            raise

    def _admit(self, prompt: Prompt | None, options: RequestOptions) -> RequestTask:
        if self.closing or self._nursery is None:
            error = ShutDown("the runtime is closed and takes no requests; open a new one")
            error.__cause__ = self.fatal
            raise error
        if trio.lowlevel.current_trio_token() is not self._token:
            raise RuntimeError("a runtime can only be used inside the trio.run() that it was opened in")
        number = next(self._ids)
        external_id = f"request-{number}" if options.request_id is None else checked_id(options.request_id)
        if external_id in self.tasks:
            raise InvalidRequest(
                "a request with this id is in flight; ids must be unique among those, or left out to get one made"
            )
        if len(self.tasks) >= self._max_in_flight:
            raise Overloaded(
                f"{len(self.tasks)} requests are in flight, which is the limit; "
                "ask again when one has ended, or raise max_in_flight"
            )
        session = prompt is None
        if session and (why := self.pipeline.no_sessions) is not None:
            raise InvalidRequest(f"the pipeline takes no streaming input: {why}")
        plan = self._plan(options.final_stage_id(self.pipeline))
        given = split_params(options.sampling_params, self.pipeline)
        params = self.params(given)
        check_completions(params, plan, session=session)
        task = RequestTask(
            self,
            # The number makes it unique for ever: a late output of an earlier request can not meet a later one.
            request_id=f"{external_id}-{number}",
            external_id=external_id,
            prompt=StageInput() if prompt is None else checked_prompt(prompt, self.pipeline),
            params=params,
            given=given.get(0),
            plan=plan,
            deadline=options.absolute_deadline(),
            priority=options.checked_priority(),
            session=session,
        )
        self.tasks[external_id] = task
        self.trace.emit("request.submitted", request_id=external_id)
        self._nursery.start_soon(task.run, name=f"request {external_id}")
        return task

    def _plan(self, final_stage: int | None) -> RoutePlan:
        if final_stage not in self._plans:
            self._plans[final_stage] = RoutePlan(self.pipeline, final_stage)
        return self._plans[final_stage]

    def params(self, given: Mapping[int, Any]) -> tuple[Any, ...]:
        """Check what was given per stage; returns the parameters of every stage.

        Raises:
            InvalidRequest: some can not be used.
        """
        return tuple(self.resolve(stage_id, given.get(stage_id)) for stage_id in range(len(self.pools)))

    def resolve(self, stage_id: int, given: Any) -> Any:
        """Check what was given for one stage, and merge it with the stage's defaults.

        Raises:
            InvalidRequest: it can not be used.
        """
        if given is None and stage_id in self._default_params:
            return self._default_params[stage_id]
        pool = self.pools[stage_id]
        client = next((replica.client for replica in pool.replicas if replica.client is not None), None)
        assert client is not None  # the runtime opens when every replica is up, and clients stay
        try:
            params = client.resolve_params(given)
        except RequestError as error:
            error.stage = pool.spec.name
            error.stage_id = stage_id
            raise
        if given is None:
            self._default_params[stage_id] = params
        return params
