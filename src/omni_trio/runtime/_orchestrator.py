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
from omni_trio.pipeline import Pipeline, nearest
from omni_trio.routing import RoutePlan
from omni_trio.stages import ClientFactory, Replica, ReplicaContext, ReplicaState, StageClient, StagePool

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
    ) -> None:
        self.pipeline = pipeline
        self.pools = tuple(StagePool(spec, stage_id) for stage_id, spec in enumerate(pipeline.stages))
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
        self._factories = factories
        self._policy = on_engine_death
        self._max_in_flight = max_in_flight
        self._close_timeout = close_timeout
        self._nursery: trio.Nursery | None = None
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
        async with trio.open_nursery() as nursery:
            for replica in self.replicas():
                nursery.start_soon(services.start, self._serve, replica)

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
                async with self._factories[replica.stage_id](context) as client:
                    replica.client = client
                    replica.state = ReplicaState.READY
                    # From here on engines outlive those who use them: only `stop` ends this task, however the
                    # runtime's block is left, so that requests can still be aborted at the stages.
                    replica.scope.deadline = float("inf")
                    replica.scope.shield = True
                    self.trace.emit("replica.ready", **place)
                    task_status.started()
                    await self._read(replica, client)
                    self.trace.emit("replica.closing", **place)
        except OmniTrioError:
            raise
        except Exception as error:
            if replica.state is ReplicaState.STARTING:
                raise StartupFailed(
                    f"it did not come up ({replica.phase}): {type(error).__name__}: {error}",
                    phase=replica.phase,
                    **place,
                ) from error
            _logger.exception("closing stage %r, replica %d, failed", spec.name, replica.replica_id)
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

    async def _read(self, replica: Replica, client: StageClient) -> None:
        while True:
            try:
                outputs = await client.receive()
            except EngineDied as error:
                self.replica_died(replica, error)
                return
            except Exception as error:
                death = EngineDied(
                    f"its client failed with {type(error).__name__}: {error}; it counts as dead",
                    stage=replica.spec.name,
                    stage_id=replica.stage_id,
                    replica_id=replica.replica_id,
                )
                death.__cause__ = error
                self.replica_died(replica, death)
                return
            replica.deliver(outputs, trio.current_time())

    def replica_died(self, replica: Replica, death: EngineDied) -> None:
        """Do what the policy says. A death is handled once, whoever notices it first (I15)."""
        if replica.state is not ReplicaState.READY:
            return
        replica.state = ReplicaState.DEAD
        replica.death = death
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

    def admit(
        self,
        prompt: Prompt,
        *,
        sampling_params: Any,
        request_id: str | None,
        final_stage: str | int | None,
        deadline: float,
        priority: int,
    ) -> RequestTask:
        """Check a request and start its task; no stage has been touched when this raises.

        Raises:
            InvalidRequest: it can not be served as it is.
            Overloaded: as many requests as allowed are in flight.
            ShutDown: the runtime is closing.
        """
        try:
            return self._admit(prompt, sampling_params, request_id, final_stage, deadline, priority)
        except RequestError as error:
            self.rejected += 1
            if error.request_id is None:
                error.request_id = request_id
            raise

    def _admit(
        self,
        prompt: Prompt,
        sampling_params: Any,
        request_id: str | None,
        final_stage: str | int | None,
        deadline: float,
        priority: int,
    ) -> RequestTask:
        if self.closing or self._nursery is None:
            error = ShutDown("the runtime is closed and takes no requests; open a new one")
            error.__cause__ = self.fatal
            raise error
        number = next(self._ids)
        external_id = f"request-{number}" if request_id is None else _checked_id(request_id)
        if external_id in self.tasks:
            raise InvalidRequest(
                "a request with this id is in flight; ids must be unique among those, or left out to get one made"
            )
        if len(self.tasks) >= self._max_in_flight:
            raise Overloaded(
                f"{len(self.tasks)} requests are in flight, which is the limit; "
                "ask again when one has ended, or raise max_in_flight"
            )
        if isinstance(priority, bool) or not isinstance(priority, int):
            raise InvalidRequest(f"priority must be a whole number, not {priority!r}")
        task = RequestTask(
            self,
            # The number makes it unique for ever: a late output of an earlier request can not meet a later one.
            request_id=f"{external_id}-{number}",
            external_id=external_id,
            prompt=_checked_prompt(prompt),
            params=self._params(sampling_params),
            plan=self._plan(final_stage),
            deadline=deadline,
            priority=priority,
        )
        self.tasks[external_id] = task
        self.trace.emit("request.submitted", request_id=external_id)
        self._nursery.start_soon(task.run, name=f"request {external_id}")
        return task

    def _plan(self, final_stage: str | int | None) -> RoutePlan:
        stage_id: int | None
        if isinstance(final_stage, str):
            try:
                stage_id = self.pipeline.stage_id(final_stage)
            except KeyError as error:
                raise InvalidRequest(f"final_stage: {error.args[0]}") from None
        else:
            stage_id = final_stage
            if stage_id is not None and not 0 <= stage_id < len(self.pools):
                raise InvalidRequest(f"final_stage: there is no stage {stage_id}; there are {len(self.pools)}")
        if stage_id not in self._plans:
            self._plans[stage_id] = RoutePlan(self.pipeline, stage_id)
        return self._plans[stage_id]

    def _params(self, given: Any) -> tuple[Any, ...]:
        per_stage = _split_params(given, [spec.name for spec in self.pipeline.stages])
        return tuple(self._resolve(stage_id, per_stage.get(stage_id)) for stage_id in range(len(self.pools)))

    def _resolve(self, stage_id: int, given: Any) -> Any:
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


def _checked_id(request_id: Any) -> str:
    if not isinstance(request_id, str):
        raise InvalidRequest(f"a request id must be a string, not {type(request_id).__name__}")
    if not request_id:
        raise InvalidRequest("a request id must not be empty; leave it out to get one made")
    return request_id


def _checked_prompt(prompt: Any) -> StageInput:
    if isinstance(prompt, StageInput):
        given = (prompt.text, prompt.token_ids, prompt.messages, prompt.embeds)
        if all(part is None or (isinstance(part, str | tuple) and not part) for part in given) and not prompt.data:
            raise InvalidRequest("the prompt is empty: give it text, token_ids, messages, embeds or data")
        return prompt
    if isinstance(prompt, str):
        if not prompt:
            raise InvalidRequest("the prompt is empty")
        return StageInput(text=prompt)
    if isinstance(prompt, Sequence) and not isinstance(prompt, bytes | bytearray):
        if not prompt:
            raise InvalidRequest("the prompt is empty")
        # Looked at in C: a prompt may have a hundred thousand tokens, and this runs on the trio thread.
        if set(map(type, prompt)) != {int} or min(prompt) < 0:
            wrong = next(token for token in prompt if type(token) is not int or token < 0)
            raise InvalidRequest(f"a prompt of token ids holds whole numbers from 0 up, not {wrong!r}")
        return StageInput(token_ids=tuple(prompt))
    raise InvalidRequest(f"a prompt is a string, a sequence of token ids or a StageInput, not {type(prompt).__name__}")


def _split_params(given: Any, names: Sequence[str]) -> dict[int, Any]:
    if given is None:
        return {}
    if isinstance(given, list | tuple):
        if len(given) != len(names):
            raise InvalidRequest(
                f"sampling_params as a list needs one entry per stage ({len(names)}: {', '.join(names)}), "
                f"not {len(given)}"
            )
        return dict(enumerate(given))
    if not isinstance(given, Mapping):
        return {0: given}
    named = [key for key in given if key in names]
    looks_per_stage = bool(given) and all(isinstance(value, Mapping) for value in given.values())
    if not named and not looks_per_stage:
        return {0: given}
    for key in given:
        if key not in names:
            raise InvalidRequest(
                f"sampling_params: no stage is called {key!r}{nearest(str(key), names)} (stages: {', '.join(names)})"
            )
    return {names.index(key): value for key, value in given.items()}
