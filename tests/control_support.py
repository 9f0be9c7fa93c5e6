"""What tests of operating a pipeline share: engines that answer calls as told, and what runs beside a test."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

import attrs
import trio

from omni_trio.errors import OmniTrioError
from omni_trio.stages import ClientStatistics
from omni_trio.testing import SimStage


@attrs.define(eq=False)
class Engine:
    """A factory of simulated replicas that answer some calls in their own way.

    An answer is a value, an error, or a function that is called with the client, the arguments and the keyword
    arguments; if it returns an awaitable, that is awaited.
    """

    sim: SimStage = attrs.field(factory=SimStage)
    answers: dict[str, Any] = attrs.field(factory=dict)
    methods: tuple[str, ...] | None = None
    """What the client says that its engine has, in place of what it has."""
    running: int | None = None
    waiting: int | None = None
    asked: list[tuple[int, str, Mapping[str, Any]]] = attrs.field(factory=list)
    """The replica, method and keyword arguments of each call."""

    @asynccontextmanager
    async def __call__(self, context):
        async with self.sim(context) as client:
            yield _Client(self, context.replica_id, client)

    def calls(self, method: str) -> list[Mapping[str, Any]]:
        return [kwargs for _, asked, kwargs in self.asked if asked == method]


class _Client:
    def __init__(self, engine: Engine, replica_id: int, client: Any) -> None:
        self.engine = engine
        self.replica_id = replica_id
        self.client = client
        self.resolve_params = client.resolve_params
        self.submit = client.submit
        self.update = client.update
        self.abort = client.abort
        self.receive = client.receive
        self._work = client._work

    @property
    def methods(self):
        return self.client.methods if self.engine.methods is None else self.engine.methods

    def statistics(self):
        said = self.client.statistics()
        running, waiting = self.engine.running, self.engine.waiting
        return ClientStatistics(
            running=said.running if running is None else running, waiting=said.waiting if waiting is None else waiting
        )

    async def call(self, method, args=(), kwargs=None):
        self.engine.asked.append((self.replica_id, method, dict(kwargs or {})))
        if method not in self.engine.answers:
            return await self.client.call(method, args, kwargs)
        answer = self.engine.answers[method]
        if callable(answer) and not isinstance(answer, type):
            answer = answer(self, *args, **(kwargs or {}))
        await trio.lowlevel.checkpoint()
        if isinstance(answer, Awaitable):
            answer = await answer
        if isinstance(answer, Exception):
            raise answer
        return answer


async def hangs(*_: Any, **__: Any) -> None:
    """An answer that never comes."""
    await trio.sleep_forever()


def takes(seconds: float) -> Callable[..., Awaitable[None]]:
    """An answer that takes its time."""

    async def answer(*_: Any, **__: Any) -> None:
        await trio.sleep(seconds)

    return answer


def ask_for(nursery: trio.Nursery, runtime: Any, *ids: str, **options: Any) -> dict[str, Any]:
    """Ask for results in the background; returns a dict that gets each one's result, or error, when it has ended."""
    ends: dict[str, Any] = {}

    async def one(request_id: str) -> None:
        try:
            ends[request_id] = await runtime.generate("one two", request_id=request_id, **options)
        except OmniTrioError as error:
            ends[request_id] = error

    for request_id in ids:
        nursery.start_soon(one, request_id)
    return ends


@attrs.define(eq=False)
class Outcome:
    """What came of an operation."""

    value: Any = None
    error: OmniTrioError | None = None
    at: float | None = None
    """When it ended."""


def begin(nursery: trio.Nursery, operation: Callable[..., Awaitable[Any]], *args: Any, **kwargs: Any) -> Outcome:
    """Have an operation run in the background."""
    outcome = Outcome()

    async def carry_out() -> None:
        try:
            outcome.value = await operation(*args, **kwargs)
        except OmniTrioError as error:
            outcome.error = error
        outcome.at = trio.current_time()

    nursery.start_soon(carry_out)
    return outcome


def activities(runtime: Any) -> list[str]:
    return [replica.activity for replica in runtime.health().replicas]
