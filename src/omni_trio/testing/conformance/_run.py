"""Runs a program on an open client, keeps the books of what is known, and tells which rule is broken."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any, Literal, TypeAlias

import attrs
import trio

from omni_trio.errors import InvalidRequest
from omni_trio.merging import merge_data
from omni_trio.messages import StageInput, StageOutput, StageRequest
from omni_trio.stages import ClientStatistics

from ._subject import VARIANTS, Subject, broken, describe, seeded, within
from ._values import snapshot
from ._violation import ConformanceError
from .operations import (
    Abort,
    CancelReceive,
    CancelSubmit,
    Close,
    Drain,
    More,
    Open,
    Pause,
    Program,
    Receive,
    Refused,
    Single,
    Submit,
    Together,
)

__all__ = ["Book", "Run"]

State: TypeAlias = Literal["submitting", "live", "maybe", "ended", "gone", "refused", "cancelled"]
"""``maybe``: an abort crossed with its submission. ``gone``: an abort was acknowledged. The last four are final."""

_NOTHING = StageInput()


@attrs.define(eq=False)
class _Entry:
    """One request, as far as it is known."""

    id: str
    number: int
    long: bool = False
    session: bool = False
    bad: bool = False
    """Whether the stage can not use its input."""
    state: State = "submitting"
    outputs: list[StageOutput] = attrs.field(factory=list)
    pieces: int = 0
    """Of a session: segments handed over."""
    answered: int = 0
    closed: bool = True
    """Whether its input is complete."""
    all_answered: bool = False
    """Of a session: whether every segment was answered when the closing update was sent."""
    crossed: bool = False
    """Whether an abort of it returned while it was being submitted."""
    interrupted: bool = False
    """Whether a receive was cancelled while it was at work."""
    company: bool = False
    """Whether others were at work at the same time."""

    @property
    def owed(self) -> bool:
        """Whether the client has to say something about it."""
        if self.state != "live" or self.long:
            return False
        return self.closed or self.answered < self.pieces

    @property
    def lasts(self) -> bool:
        """Whether it does not end by itself, or not soon."""
        return self.long or not self.closed

    @property
    def name(self) -> str:
        return f"request {self.number}"


class Book:
    """All requests that one client was ever given."""

    def __init__(self) -> None:
        self.entries: dict[str, _Entry] = {}
        self.programs: list[Program] = []
        self.aborts = 0

    def live(self) -> list[_Entry]:
        """Those that the client may have."""
        return [entry for entry in self.entries.values() if entry.state in ("submitting", "live", "maybe")]


class Run:
    """One program on one client. Raises `ConformanceError` out of `play` for the first rule that is broken."""

    def __init__(self, subject: Subject, client: Any, book: Book) -> None:
        self._subject = subject
        self._client = client
        self._book = book
        self._prefix = f"p{len(book.programs)}-"
        self._own: dict[int, _Entry] = {}
        self._failure: ConformanceError | None = None
        self._cancelled_submits = 0

    async def play(self, program: Program) -> None:
        """Do what the program says, bring everything to an end, and look at what came of it."""
        self._book.programs.append(program)
        # Each program for itself: what fails after others has to fail alone, too.
        with seeded(self._subject.seed):
            await self._play(program)

    async def _play(self, program: Program) -> None:
        self._resolve()
        for operation in program:
            match operation:
                case Receive():
                    await self._receive_owed()
                case Drain():
                    await self._drain()
                case CancelReceive(steps=steps):
                    await self._cancel_receive(steps)
                case Together(operations=singles):
                    await self._together(singles)
                case single:
                    await self._single(single)
            self._check()
        await self._end()

    async def _end(self) -> None:
        await self._drain()
        unsure = [entry for entry in self._own.values() if entry.state in ("live", "maybe")]
        if rest := tuple(entry.number for entry in unsure if entry.lasts or entry.state == "maybe"):
            await self._single(Abort(rest))
        # One more request: if anything comes that must not, it comes before this one's outputs, or among them.
        number = VARIANTS * (1 + max(self._own, default=0) // VARIANTS)
        await self._single(Submit(number))
        self._check()
        await self._drain()
        self._check_statistics(at_rest=True)
        for entry in self._own.values():
            self._check_content(entry)
        self._check_unchanged()

    async def settle(self) -> None:
        """See that nothing more comes, for a while."""
        with trio.move_on_after(self._subject.quiet):
            self._note(await self._client.receive())
        self._check()

    # ---- parameters

    def _resolve(self) -> None:
        subject = self._subject
        self._params = self._resolved(subject.params)
        self._long_params = self._resolved(subject.long_params) if subject.long_params is not None else self._params
        self._session_params = (
            self._resolved(subject.session_params) if subject.session_params is not None else self._params
        )
        self._all_params = (self._params, self._long_params, self._session_params)
        self._params_before = [snapshot(params) for params in self._all_params]
        self._inputs_before = [snapshot(subject.input(number)) for number in range(VARIANTS)]

    def _resolved(self, params: Any) -> Any:
        before = snapshot(params)
        try:
            resolved = self._client.resolve_params(params)
        except Exception as error:
            raise broken(14, f"resolve_params({params!r}) raised {describe(error)}") from error
        if inspect.isawaitable(resolved):
            if inspect.iscoroutine(resolved):
                resolved.close()
            raise broken(14, f"resolve_params({params!r}) returned something to be awaited")
        if snapshot(params) != before:
            raise broken(14, f"it changed what it was given: now that is {params!r}")
        return resolved

    def _check_unchanged(self) -> None:
        if [snapshot(params) for params in self._all_params] != self._params_before:
            raise broken(15, f"the parameters that requests shared were changed: now they are {self._params!r}")
        if [snapshot(self._subject.input(number)) for number in range(VARIANTS)] != self._inputs_before:
            raise broken(15, "the input of a request was changed")

    # ---- what is done

    async def _together(self, singles: Sequence[Single]) -> None:
        async def one(single: Single) -> None:
            try:
                await self._single(single)
            except ConformanceError as error:
                self._fail(error)

        async with trio.open_nursery() as receiving:
            receiving.start_soon(self._keep_receiving)
            async with trio.open_nursery() as nursery:
                for single in singles:
                    nursery.start_soon(one, single)
            receiving.cancel_scope.cancel("what was done meanwhile is done")
        self._interrupt()

    async def _keep_receiving(self) -> None:
        try:
            while self._failure is None:
                self._note(await self._called(26, "receive", self._client.receive))
        except ConformanceError as error:
            self._fail(error)

    async def _single(self, operation: Single) -> None:
        match operation:
            case Submit(request=number, long=long):
                await self._submit(number, long=long)
            case CancelSubmit(request=number, steps=steps, long=long):
                await self._submit(number, long=long, cancel_after=steps)
            case Refused(request=number, index=index):
                await self._refused(number, index)
            case Open(request=number):
                await self._open(number)
            case More(request=number):
                await self._more(number)
            case Close(request=number):
                await self._close(number)
            case Abort(requests=numbers):
                await self._abort(numbers)
            case Pause(seconds=seconds):
                await trio.sleep(seconds)

    async def _submit(self, number: int, *, long: bool, cancel_after: int | None = None) -> None:
        if number in self._own:
            return
        params = self._long_params if long else self._params
        entry = self._enter(number, long=long)
        request = StageRequest(request_id=entry.id, input=self._subject.input(number), params=params)
        if cancel_after is None:
            await self._hand_over(entry, request)
            return
        self._cancelled_submits += 1
        scope = trio.CancelScope()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._hand_over, entry, request, scope)
            for _ in range(cancel_after):
                await trio.lowlevel.checkpoint()
            scope.cancel("the program cancels the submission")
        if scope.cancelled_caught and entry.state != "ended":
            entry.state = "cancelled"

    def _enter(self, number: int, **facts: Any) -> _Entry:
        others = self._book.live()
        entry = self._own[number] = _Entry(f"{self._prefix}{number}", number, company=bool(others), **facts)
        for other in others:
            other.company = True
        self._book.entries[entry.id] = entry
        return entry

    async def _hand_over(self, entry: _Entry, request: StageRequest, scope: trio.CancelScope | None = None) -> None:
        """Submit; where it is cancelled by `scope`, the entry's state is the caller's business."""
        try:
            with scope or trio.CancelScope():
                await self._called(26, "submit", self._client.submit, request)
                self._accepted(entry)
        except ConformanceError as error:
            if scope is None:
                raise
            self._fail(error)

    def _accepted(self, entry: _Entry) -> None:
        if entry.state == "submitting":
            entry.state = "maybe" if entry.crossed else "live"

    async def _refused(self, number: int, index: int) -> None:
        if number in self._own or not self._subject.bad_inputs:
            return
        entry = self._enter(number, bad=True)
        given = self._subject.bad_inputs[index % len(self._subject.bad_inputs)]
        request = StageRequest(request_id=entry.id, input=given, params=self._params)
        try:
            returned, _ = await within(self._subject.timeout, self._client.submit, request)
        except InvalidRequest:
            entry.state = "refused"
            return
        except Exception as error:
            raise broken(17, f"for an input that it can not use, submit raised {describe(error)}") from error
        if not returned:
            raise self._late(17, "submit, for an input that it can not use,")
        self._accepted(entry)  # it may also fail it through `receive`

    async def _open(self, number: int) -> None:
        session = self._subject.session
        if session is None or number in self._own:
            return
        entry = self._enter(number, session=True, closed=False, pieces=1)
        request = StageRequest(
            request_id=entry.id,
            input=session(number % VARIANTS, 0),
            params=self._session_params,
            last=False,
            segment_end=True,
        )
        await self._hand_over(entry, request)

    async def _more(self, number: int) -> None:
        entry = self._own.get(number)
        if entry is None or entry.state in ("ended", "gone"):
            # An id that was never submitted is one that will not be, either: not even at the same time.
            await self._update_unknown(number, f"{self._prefix}never-{number}" if entry is None else entry.id)
        elif entry.session and not entry.closed and entry.state == "live":
            assert self._subject.session is not None  # there would be no session
            given = self._subject.session(number % VARIANTS, entry.pieces)
            entry.pieces += 1
            await self._update(entry, given, last=False)

    async def _close(self, number: int) -> None:
        entry = self._own.get(number)
        if entry is not None and entry.session and not entry.closed and entry.state == "live":
            entry.all_answered = entry.answered == entry.pieces
            entry.closed = True
            await self._update(entry, _NOTHING, last=True)

    async def _update(self, entry: _Entry, given: StageInput, *, last: bool) -> None:
        request = StageRequest(
            request_id=entry.id, input=given, params=self._session_params, last=last, segment_end=not last
        )
        await self._called(26, "update", self._client.update, request)

    async def _update_unknown(self, number: int, request_id: str) -> None:
        session = self._subject.session
        given = self._subject.input(number) if session is None else session(number % VARIANTS, 1)
        request = StageRequest(request_id=request_id, input=given, params=self._params, last=False)
        try:
            returned, _ = await within(self._subject.timeout, self._client.update, request)
        except InvalidRequest as error:
            if session is not None:
                raise broken(11, f"it raised {describe(error)}") from error
            return  # a stage that takes no updates may say so
        except Exception as error:
            raise broken(11, f"it raised {describe(error)}") from error
        if not returned:
            raise self._late(11, "update, for a request that it does not know,")

    async def _abort(self, numbers: Sequence[int]) -> None:
        entries = [self._own.get(number) for number in numbers]
        live = [entry for entry in entries if entry is not None and entry.state in ("live", "maybe")]
        all_known = len(live) == len(set(numbers))
        try:
            returned, _ = await within(
                self._subject.timeout, self._client.abort, [f"{self._prefix}{number}" for number in numbers]
            )
        except Exception as error:
            words = f"abort raised {describe(error)}"
            raise broken(26 if all_known else 9, words) from error
        if not returned:
            raise self._late(7 if live else 9, "abort")
        self._book.aborts += len(live)
        for entry in live:
            if entry.state != "ended":
                entry.state = "gone"
        # Those that came meanwhile, or that were being submitted when it began: nobody can say which was first.
        for number in numbers:
            other = self._own.get(number)
            if other is not None and other.state in ("submitting", "live"):
                other.crossed = True
                other.state = "maybe" if other.state == "live" else other.state

    async def _receive_owed(self) -> bool:
        """Receive once where something is owed; return whether anything came."""
        if not (owed := self._owed()):
            await trio.lowlevel.checkpoint()
            return False
        patient = self._blocked(owed[0])
        try:
            limit = self._subject.quiet if patient else self._subject.timeout
            returned, outputs = await within(limit, self._client.receive)
        except Exception as error:
            raise broken(26, f"receive raised {describe(error)}") from error
        if returned:
            self._note(outputs)
        elif patient:
            self._interrupt()
        else:
            raise self._silent(owed)
        self._check()
        return returned

    async def _drain(self) -> None:
        """Receive until nothing is owed, or, where something may have to wait for a slot, for a while."""
        until = trio.current_time() + self._subject.quiet
        while await self._receive_owed():
            if (owed := self._owed()) and self._blocked(owed[0]) and trio.current_time() >= until:
                break

    def _blocked(self, owed: _Entry) -> bool:
        """Whether a request may have to wait for others: the replica may have few slots, and they may take long."""
        return any(entry is not owed and (entry.lasts or entry.state == "maybe") for entry in self._book.live())

    async def _cancel_receive(self, steps: int) -> None:
        scope = trio.CancelScope()

        async def receive() -> None:
            try:
                with scope:
                    self._note(await self._called(26, "receive", self._client.receive))
            except ConformanceError as error:
                self._fail(error)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(receive)
            for _ in range(steps):
                await trio.lowlevel.checkpoint()
            scope.cancel("the program cancels the receive")
        if scope.cancelled_caught:
            self._interrupt()

    async def _called(self, number: int, name: str, function: Any, *args: Any) -> Any:
        """Call a method that has nothing to raise here. Only `receive` may take as long as it likes."""
        limit = float("inf") if name == "receive" else self._subject.timeout
        try:
            returned, result = await within(limit, function, *args)
        except Exception as error:
            raise broken(number, f"{name} raised {describe(error)}") from error
        if not returned:
            # A replica without room may make a submission wait; what nobody holds is room.
            leaking = name == "submit" and self._book.aborts and len(self._book.live()) <= 1
            raise self._late(10 if leaking else 1, name)
        return result

    # ---- what is found

    def _note(self, outputs: Any) -> None:
        """Take outputs as they come. The first rule that is broken is kept for `_check`."""
        try:
            self._take(outputs)
        except ConformanceError as error:
            self._fail(error)

    def _take(self, outputs: Any) -> None:
        if not isinstance(outputs, Sequence) or not outputs:
            raise broken(3, f"receive returned {outputs!r}")
        for output in outputs:
            if not isinstance(output, StageOutput):
                raise broken(3, f"receive returned {output!r} among its outputs")
            entry = self._book.entries.get(output.request_id)
            if entry is None:
                raise broken(3, f"an output came of a request that it was never given: {output!r}")
            if (number := _SILENT.get(entry.state)) is not None:
                raise broken(number, f"of {entry.name}, which {_WORDS[entry.state]}, there came {output!r}")
            entry.outputs.append(output)
            if output.segment_end:
                entry.answered += 1
                if entry.answered > entry.pieces:
                    raise broken(12, f"{entry.name} had {entry.pieces} segments; one more was answered")
            if output.finished:
                entry.state = "ended"
                if entry.session and entry.closed and entry.answered < entry.pieces - (not entry.all_answered):
                    count = f"{entry.answered} of {entry.pieces}"
                    raise broken(12, f"{entry.name} ended, and {count} segments had been answered")

    def _owed(self) -> list[_Entry]:
        return [entry for entry in self._own.values() if entry.owed]

    def _interrupt(self) -> None:
        for entry in self._own.values():
            if entry.state in ("live", "ended"):
                entry.interrupted = True

    def _silent(self, owed: Sequence[_Entry]) -> ConformanceError:
        first = owed[0]
        names = ", ".join(entry.name for entry in owed)
        waited = f"nothing came within {self._subject.timeout:g} s, and owed are outputs of {names}"
        if first.session and not first.interrupted:
            return broken(13 if first.closed else 12, waited)
        return broken(self._blame(first, 1), waited)

    def _blame(self, entry: _Entry, otherwise: int) -> int:
        """Which rule explains best that outputs of a request are missing."""
        if entry.interrupted:
            return 6
        if self._book.aborts:
            return 10
        return 18 if self._cancelled_submits else otherwise

    def _check_content(self, entry: _Entry) -> None:
        if entry.state != "ended" or entry.long or entry.session:
            return
        last = entry.outputs[-1]
        if entry.bad:
            if last.error is None:
                raise broken(17, f"it took an input that it can not use, and {entry.name} ended well")
            return
        if last.error is not None:
            raise broken(1, f"{entry.name} failed: {last.error}")
        if last.finish_reason is None:
            raise broken(1, f"the last output of {entry.name} has no finish_reason")
        content = _content(entry.outputs)
        variant = entry.number % VARIANTS
        self._check_expected(entry, variant)
        if not self._subject.deterministic:
            return
        if variant not in self._subject.alone:
            if not entry.company and not entry.interrupted:
                self._subject.alone[variant] = content
            return
        alone = self._subject.alone[variant]
        if content != alone:
            number = 6 if entry.interrupted else 5 if entry.company else 4
            more = "" if number != 4 else "; pass deterministic=False where that may differ"
            raise broken(number, f"{entry.name} got {content!r}, and the first time, alone, {alone!r}{more}")

    def _check_expected(self, entry: _Entry, variant: int) -> None:
        if self._subject.expect is None:
            return
        expected = self._subject.expect(variant)
        if isinstance(expected, str):
            got: Any = "".join(output.text for output in entry.outputs)
        else:
            expected, got = list(expected), [token for output in entry.outputs for token in output.token_ids]
        if got != expected:
            number = 6 if entry.interrupted else 5 if entry.company else 4
            raise broken(number, f"{entry.name} got {got!r}, expected was {expected!r}")

    def _check_statistics(self, *, at_rest: bool) -> None:
        try:
            said = self._client.statistics()
        except Exception as error:
            raise broken(20, f"statistics raised {describe(error)}") from error
        if not isinstance(said, ClientStatistics):
            raise broken(20, f"statistics returned {said!r}")
        if said.running < -1 or said.waiting < -1:
            raise broken(20, f"a count is below -1, which stands for 'not known': {said!r}")
        if at_rest and (said.running > 0 or said.waiting > 0):
            raise broken(20, f"it has no request any more, and says {said!r}")

    def _fail(self, error: ConformanceError) -> None:
        if self._failure is None:
            self._failure = error

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure
        self._check_statistics(at_rest=False)

    def _late(self, number: int, what: str) -> ConformanceError:
        return broken(number, f"{what} has not returned within {self._subject.timeout:g} s")


_SILENT: dict[str, int] = {"ended": 2, "gone": 8, "refused": 17, "cancelled": 18}
"""In these states a request has no outputs any more; by which rule."""

_WORDS = {
    "ended": "has had its last output",
    "gone": "was aborted",
    "refused": "was refused",
    "cancelled": "was cancelled while it was submitted",
}


def _content(outputs: Sequence[StageOutput]) -> Any:
    """What outputs add up to, however they are cut."""
    completions: dict[int, tuple[list[int], str]] = {}
    for output in outputs:
        token_ids, text = completions.get(output.index, ([], ""))
        completions[output.index] = [*token_ids, *output.token_ids], text + output.text
    data = merge_data(output.data for output in outputs if output.data)
    return {"completions": completions, "data": snapshot(data), "finish_reason": outputs[-1].finish_reason}
