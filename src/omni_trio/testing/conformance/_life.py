"""Checks of a client's life: how it starts, what its calls do, how it dies, and how it closes."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, Final

import trio

from omni_trio.errors import EngineDied, InvalidRequest, StageFailed
from omni_trio.messages import StageRequest

from ._run import Book, Run
from ._subject import Leave, Subject, broken, describe, within
from .operations import Submit

__all__ = ["check_bad_params", "check_calls", "check_closing", "check_death", "check_full", "check_starting"]

_UNKNOWN = "no_stage_has_a_method_of_this_name"

_PATIENCE = 1000
"""So many times a dead replica may still return what it made before."""

Make = Callable[..., AbstractAsyncContextManager[Any]]


def _request(subject: Subject, client: Any, request_id: str, *, long: bool) -> StageRequest:
    given = subject.long_params if long and subject.long_params is not None else subject.params
    return StageRequest(request_id=request_id, input=subject.input(0), params=client.resolve_params(given))


async def check_starting(subject: Subject) -> None:
    """Cancel starts."""
    for steps in (0, 1, 2, 5) if subject.thorough else (5,):
        await subject.cancelled_start(
            steps,
            f"with trio.CancelScope() as scope:\n"
            f"    ...  # scope.cancel() after {steps} scheduler steps\n"
            f"    async with make(context):\n"
            f"        await trio.sleep_forever()",
        )


def check_bad_params(client: Any, params: Sequence[Any]) -> None:
    """Give parameters that the stage can not use."""
    for given in params:
        example = f"async with make(context) as client:\n    client.resolve_params({given!r})"
        try:
            resolved = client.resolve_params(given)
        except InvalidRequest:
            continue
        except Exception as error:
            raise broken(16, f"it raised {describe(error)}", example) from error
        raise broken(16, f"it took {given!r} and made {resolved!r} of it", example)


async def check_calls(subject: Subject, method: tuple[str, Sequence[Any]] | None) -> None:
    """Call a method that there is not, and one that there is."""
    example = f"async with make(context) as client:\n    await client.call({_UNKNOWN!r})"

    async def body(client: Any) -> None:
        try:
            returned, result = await within(subject.timeout, client.call, _UNKNOWN)
        except StageFailed:
            pass
        except Exception as error:
            raise broken(19, f"it raised {describe(error)}", example) from error
        else:
            saw = f"it returned {result!r}" if returned else f"it has not returned within {subject.timeout:g} s"
            raise broken(19, saw, example)
        if method is not None:
            name, args = method
            call = f"async with make(context) as client:\n    await client.call({name!r}, {list(args)!r})"
            try:
                returned, _ = await within(subject.timeout, client.call, name, args)
            except Exception as error:
                raise broken(26, f"calling {name!r} raised {describe(error)}", call) from error
            if not returned:
                raise broken(26, f"calling {name!r} has not returned within {subject.timeout:g} s", call)
        await Run(subject, client, Book()).play((Submit(0),))

    await subject.with_client(subject.make, body)


async def check_closing(subject: Subject) -> None:
    """Close it, idle and busy, normally and cancelled."""

    async def idle(client: Any) -> None:
        del client
        await trio.lowlevel.checkpoint()

    async def busy(client: Any) -> None:
        for index in range(3):
            await within(subject.timeout, client.submit, _request(subject, client, f"r{index}", long=True))

    async def used(client: Any) -> None:
        await Run(subject, client, Book()).play((Submit(0),))

    states = {"idle": (idle, "pass"), "busy": (busy, "await client.submit(...)"), "used": (used, "...  # a request")}
    for state, leave in _LEAVINGS if subject.thorough else _LEAVINGS[::3]:
        body, work = states[state]
        cancel = "\n    scope.cancel()" if leave == "cancelled" else ""
        block = f"async with make(context) as client:\n    {work}{cancel}"
        if cancel:
            block = "with trio.CancelScope() as scope:\n    " + block.replace("\n", "\n    ")
        await subject.with_client(subject.make, body, state=state, leave=leave, example=block)


_LEAVINGS: Final[tuple[tuple[str, Leave], ...]] = (
    ("idle", "normally"),
    ("idle", "cancelled"),
    ("busy", "normally"),
    ("busy", "cancelled"),
    ("used", "normally"),
    ("used", "cancelled"),
)


async def check_full(subject: Subject, make_full: Make) -> None:
    """Submit to a replica without a free slot, cancel that, abort, and close it."""
    example = (
        "async with make_full(context) as client:\n"
        "    with trio.move_on_after(...):\n"
        "        await client.submit(request)\n"
        "    await client.abort([request.request_id])\n"
        "    await client.receive()"
    )

    async def body(client: Any) -> None:
        for index in range(3):
            request_id = f"full-{index}"
            try:
                await within(subject.quiet, client.submit, _request(subject, client, request_id, long=False))
            except Exception as error:
                raise broken(26, f"full, submit raised {describe(error)}", example) from error
            try:
                for _ in range(2):
                    returned, _ = await within(subject.timeout, client.abort, [request_id])
                    if not returned:
                        raise broken(7, f"full, abort has not returned within {subject.timeout:g} s", example)
            except EngineDied as error:
                raise broken(26, f"full, abort raised {describe(error)}", example) from error
            with trio.move_on_after(subject.quiet):
                while True:
                    if strays := [output for output in await client.receive() if output.request_id == request_id]:
                        raise broken(8, f"full, it gave {strays[0]!r} of a request that was aborted", example)
            try:
                client.statistics()
            except Exception as error:
                raise broken(20, f"full, statistics raised {describe(error)}", example) from error

    await subject.with_client(make_full, body, state="full", example=example)
    await subject.with_client(make_full, body, state="full", leave="cancelled", example=example)


async def check_death(subject: Subject, make_dead: Make, slow_method: tuple[str, Sequence[Any]] | None) -> None:
    """Have replicas die: idle, busy, and while things wait for them."""
    leave: Leave = "normally"
    for busy, steps in _DEATHS if subject.thorough else _DEATHS[-2:]:
        await _Death(subject, slow_method, busy=busy, steps=steps).check(make_dead, leave)
        leave = "cancelled" if leave == "normally" else "normally"


_DEATHS: Final = ((False, None), (True, None), (False, 5), (True, 0), (True, 1), (True, 2), (True, 5), (False, 2))
"""Whether the replica has work, and, where things wait when it dies, how many scheduler steps they wait before."""


class _Death:
    """One death."""

    def __init__(
        self,
        subject: Subject,
        slow_method: tuple[str, Sequence[Any]] | None,
        *,
        busy: bool,
        steps: int | None = None,
    ) -> None:
        self._subject = subject
        self._slow_method = slow_method
        self._busy = busy
        self._steps = steps
        self._done: list[str] = []
        self._crash: Exception | None = None

    async def check(self, make_dead: Make, leave: Leave) -> None:
        example = "async with make_dead(context) as (client, die):\n    await die()"
        await self._subject.with_client(make_dead, self._body, leave=leave, state="dead", example=example)

    def _example(self) -> str:
        lines = ["async with make_dead(context) as (client, die):", *(f"    {line}" for line in self._done)]
        return "\n".join(lines)

    async def _body(self, opened: Any) -> None:
        client, die = opened
        if self._busy:
            for index in range(2):
                self._done.append("await client.submit(...)")
                await client.submit(_request(self._subject, client, f"r{index}", long=True))
        if self._steps is None:
            await self._die(die)
        else:
            await self._die_while_things_wait(client, die, self._steps)
        await self._check_receive(client)
        await self._check_methods(client)
        await self._check_receive(client, already=True)

    async def _die(self, die: Callable[[], Any]) -> None:
        self._done.append("await die()")
        result = die()
        if inspect.isawaitable(result):
            await result
        else:
            await trio.lowlevel.checkpoint()

    async def _die_while_things_wait(self, client: Any, die: Callable[[], Any], steps: int) -> None:
        waiting: dict[str, Awaitable[Any]] = {"abort": client.abort(["r0"])}
        if self._busy:
            waiting["submit"] = client.submit(_request(self._subject, client, "w0", long=True))
        if self._slow_method is not None:
            name, args = self._slow_method
            waiting["call"] = client.call(name, args)
        waiting["receive"] = self._receive_to_the_end(client)
        self._done.append(f"...  # {', '.join(waiting)}, each in a task")
        left = dict.fromkeys(waiting)

        async def wait(name: str, call: Awaitable[Any]) -> None:
            try:
                await call
                if name == "call":
                    self._crash = broken(23, f"{name} returned, of a dead replica", self._example())
            except EngineDied:
                pass
            except Exception as error:
                self._crash = broken(23, f"{name} ended with {describe(error)}", self._example())
            del left[name]

        with trio.move_on_after(float("inf")) as scope:
            async with trio.open_nursery() as nursery:
                for name, call in waiting.items():
                    nursery.start_soon(wait, name, call)
                for _ in range(steps):
                    await trio.lowlevel.checkpoint()
                await self._die(die)
                scope.deadline = trio.current_time() + self._subject.timeout
        if scope.cancelled_caught:
            names, number = ", ".join(left), 21 if "receive" in left else 23
            raise broken(number, f"{names}: not ended {self._subject.timeout:g} s after the death", self._example())
        if self._crash is not None:
            raise self._crash

    async def _receive_to_the_end(self, client: Any) -> None:
        while True:
            await client.receive()

    async def _check_receive(self, client: Any, *, already: bool = False) -> None:
        """See that `receive` tells of the death, twice; before the first time, what was made before may come."""
        for attempt in range(2):
            self._done.append("await client.receive()")
            allowed = 0 if already or attempt else _PATIENCE
            for _ in range(allowed + 1):
                try:
                    returned, outputs = await within(self._subject.timeout, client.receive)
                except EngineDied:
                    break
                except Exception as error:
                    raise broken(21, f"receive raised {describe(error)}", self._example()) from error
                if not returned:
                    words = f"receive has not ended within {self._subject.timeout:g} s"
                    raise broken(21, words, self._example())
                if not allowed:
                    words = f"after it had raised EngineDied, receive returned {outputs!r}"
                    raise broken(21, words, self._example())
            else:
                raise broken(21, f"receive has returned {_PATIENCE} times, and no EngineDied", self._example())

    async def _check_methods(self, client: Any) -> None:
        request = _request(self._subject, client, "late", long=False)
        attempts: tuple[tuple[str, Callable[..., Awaitable[Any]], Any], ...] = (
            ("submit", client.submit, request),
            ("update", client.update, request),
            ("abort", client.abort, ["r0"]),
            ("call", client.call, _UNKNOWN),
        )
        for name, function, argument in attempts:
            self._done.append(f"await client.{name}(...)")
            try:
                returned, _ = await within(self._subject.timeout, function, argument)
            except EngineDied:
                continue
            except Exception as error:
                if name == "update" and isinstance(error, InvalidRequest) and self._subject.session is None:
                    continue  # it takes no updates, dead or alive
                raise broken(22, f"{name} raised {describe(error)}", self._example()) from error
            words = "returned" if returned else f"has not ended within {self._subject.timeout:g} s"
            raise broken(22, f"{name} {words}", self._example())
        try:
            client.statistics()
        except Exception as error:
            raise broken(20, f"statistics raised {describe(error)}, of a dead replica", self._example()) from error
