"""`check_stage_client`: whether a client keeps the contract of `omni_trio.stages.StageClient`."""

from __future__ import annotations

import random
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, Final

import attrs

from omni_trio.messages import StageInput
from omni_trio.pipeline import StageSpec

from ._life import check_bad_params, check_calls, check_closing, check_death, check_full, check_starting
from ._programs import fixed_programs
from ._rules import CLIENT_RULES
from ._run import Book, Run
from ._subject import VARIANTS, Subject, numbers, seeded
from ._violation import Conformance, ConformanceError, checked_skip
from .operations import Program, Submit, draw_program, join_programs, simpler, write_program

__all__ = ["check_stage_client", "run_client_program"]

_SHRINK_SECONDS: Final = 20.0
"""Real seconds after which a failing program is shown as small as it has become by then."""

_SHRINK_RUNS: Final = 500

_PER_CLIENT: Final = 60
"""Programs that one client is used for."""


async def check_stage_client(
    make: Callable[..., AbstractAsyncContextManager[Any]],
    *,
    make_full: Callable[..., AbstractAsyncContextManager[Any]] | None = None,
    make_dead: Callable[..., AbstractAsyncContextManager[Any]] | None = None,
    stage: StageSpec | None = None,
    request: Callable[[int], StageInput] = numbers,
    params: Any = None,
    long_params: Any = None,
    session: Callable[[int, int], StageInput] | None = None,
    session_params: Any = None,
    bad_params: Sequence[Any] = (),
    bad_inputs: Sequence[StageInput] = (),
    method: tuple[str, Sequence[Any]] | None = None,
    slow_method: tuple[str, Sequence[Any]] | None = None,
    expect: Callable[[int], Sequence[int] | str] | None = None,
    deterministic: bool = True,
    timeout: float = 5.0,
    close_timeout: float = 5.0,
    quiet: float = 0.1,
    storm: int = 64,
    programs: int = 50,
    operations: int = 12,
    seed: int = 0,
    thorough: bool = True,
    skip: Mapping[int, str] | None = None,
) -> Conformance:
    """Check that a `StageClient` keeps its contract: many short programs, and its start, death and end.

    Runs in any trio run, on a real clock or a `trio.testing.MockClock`; needs neither pytest nor anything else. Every
    wait is bounded. A program that breaks a rule is made as small as it goes, and shown as code.

    Args:
        make: opens a client: a `ClientFactory`, or a function without arguments that does as much.
        make_full: opens one whose replica has no free slot, and gets none. Without it rules are checked on replicas
            with free slots only.
        make_dead: opens one, and yields ``(client, die)``; ``die()`` or ``await die()`` kills its replica.
        stage: what `ReplicaContext.stage` is; None: a simulated stage without any settings.
        request: makes the input of a request, for the numbers from 0 to 5. Each should be answered in its own way, with
            several outputs, and within `timeout`.
        params: the parameters of requests, as a caller gives them.
        long_params: parameters with which any request takes much longer than the others. None: there are none, and
            aborts mostly come too late to be of use.
        session: makes piece ``k`` of request ``n`` (``session(n, k)``), for stages that take input in pieces. None: the
            stage does not.
        session_params: the parameters of such requests; None: `params`.
        bad_params: parameters that `StageClient.resolve_params` has to refuse.
        bad_inputs: inputs that the stage can not use.
        method: a method of the engine that answers, and its arguments.
        slow_method: one that does not answer for a while.
        expect: what a request gets, all in all: its token ids, or its text. Without it outputs that are always missing
            are not missed.
        deterministic: whether equal requests get equal outputs.
        timeout: seconds that anything but closing may take.
        close_timeout: what `ReplicaContext.close_timeout` is.
        quiet: seconds for which nothing may come, where nothing must.
        storm: requests that are aborted one after the other; more than a replica has slots.
        programs: how many programs are drawn, besides those that are always run.
        operations: the longest program that is drawn.
        seed: of the drawing, and of trio's scheduler, where this version of trio lets us.
        thorough: False where starting a replica takes long: about 10 are started instead of 25.
        skip: by number, rules that are not to be checked, and why.

    Returns:
        Which rules were checked, and what the others would have needed.

    Raises:
        ConformanceError: a rule is broken.
        ValueError: `skip` names a rule that there is not.
    """
    skip = checked_skip(CLIENT_RULES, skip)
    subject = Subject(
        make=make,
        stage=stage or StageSpec(name="checked", kind="simulated"),
        request=request,
        params=params,
        long_params=long_params,
        session=session,
        session_params=session_params,
        bad_inputs=tuple(bad_inputs),
        expect=expect,
        deterministic=deterministic,
        timeout=timeout,
        close_timeout=close_timeout,
        quiet=quiet,
        seed=seed,
        thorough=thorough,
        skip=skip,
    )
    lives: list[Callable[[], Awaitable[None]]] = [
        lambda: check_starting(subject),
        lambda: check_calls(subject, method),
        lambda: check_closing(subject),
    ]
    if make_full is not None:
        lives.append(lambda: check_full(subject, make_full))
    if make_dead is not None:
        lives.append(lambda: check_death(subject, make_dead, slow_method))
    sessions, refusals = session is not None, len(subject.bad_inputs)
    rng = random.Random(seed)  # noqa: S311 - nobody must be kept from guessing it
    drawn = (draw_program(rng, operations, sessions=sessions, refusals=refusals) for _ in range(programs))
    fixed = fixed_programs(sessions=sessions, refusals=refusals, storm=storm)
    with seeded(seed):
        await _Programs(subject, bad_params).check((*fixed, *drawn))
        for life in lives:
            await _unless_skipped(skip, life)
    return _summary(
        skip,
        {
            "make_dead": (make_dead is not None, (21, 22, 23)),
            "session": (session is not None, (12, 13)),
            "bad_params": (bool(bad_params), (16,)),
            "bad_inputs": (bool(bad_inputs), (17,)),
            "deterministic or expect": (deterministic or expect is not None, (4, 5)),
        },
    )


async def run_client_program(
    make: Callable[..., AbstractAsyncContextManager[Any]], program: Sequence[Any], **options: Any
) -> None:
    """Run one program on a fresh client, as `check_stage_client` does, and bring all its requests to an end.

    Args:
        make: as for `check_stage_client`.
        program: what is done, in order (`omni_trio.testing.conformance.operations`).
        **options: those of `check_stage_client` that say what requests are and how long things may take.

    Raises:
        ConformanceError: a rule is broken.
    """
    known = {field.name for field in attrs.fields(Subject)} - {"make", "alone", "_inputs", "_replicas"}
    if unknown := set(options) - known:
        raise TypeError(f"run_client_program: no such option: {', '.join(sorted(unknown))}")
    subject = Subject(make=make, **{**_DEFAULTS, **options})
    with seeded(subject.seed):
        if subject.deterministic:
            await _run(subject, tuple((Submit(number),) for number in range(VARIANTS)))
        await _run(subject, (tuple(program),))


_DEFAULTS: Final[Mapping[str, Any]] = {
    "stage": StageSpec(name="checked", kind="simulated"),
    "request": numbers,
    "params": None,
    "long_params": None,
    "session": None,
    "session_params": None,
    "bad_inputs": (),
    "expect": None,
    "deterministic": True,
    "timeout": 5.0,
    "close_timeout": 5.0,
    "quiet": 0.1,
    "seed": 0,
    "thorough": True,
    "skip": {},
}


async def _unless_skipped(skip: Mapping[int, str], check: Callable[[], Awaitable[None]]) -> None:
    try:
        await check()
    except ConformanceError as error:
        if error.rule.number not in skip:
            raise


async def _run(subject: Subject, programs: Sequence[Program]) -> None:
    """Run programs on one fresh client."""

    async def body(client: Any) -> None:
        book = Book()
        for program in programs:
            await Run(subject, client, book).play(program)
        if programs:
            await Run(subject, client, book).settle()

    example = _example(subject, programs[-1]) if programs else ""
    await subject.with_client(subject.make, body, state="used", example=example)


class _Programs:
    """Runs programs, several on each client, and finds the smallest one that shows what breaks."""

    def __init__(self, subject: Subject, bad_params: Sequence[Any]) -> None:
        self._subject = subject
        self._bad_params = bad_params

    async def check(self, programs: Sequence[Program]) -> None:
        left = list(programs)
        while left:
            batch, left = left[:_PER_CLIENT], left[_PER_CLIENT:]
            done: list[Program] = []
            failure: ConformanceError | None = None
            try:
                await self._batch(batch, done)
            except ConformanceError as error:
                failure = error
            if failure is None:
                continue
            if failure.rule.number not in self._subject.skip:
                raise failure if failure.example else await self._explained(failure, done)
            left = batch[len(done) :] + left  # those that have not been run yet, on a client that is not spoilt

    async def _batch(self, batch: Sequence[Program], done: list[Program]) -> None:
        async def body(client: Any) -> None:
            book = Book()
            for program in batch:
                done.append(program)
                await Run(self._subject, client, book).play(program)
            await Run(self._subject, client, book).settle()
            if 16 not in self._subject.skip:
                check_bad_params(client, self._bad_params)

        await self._subject.with_client(self._subject.make, body, state="used")

    async def _explained(self, failure: ConformanceError, done: Sequence[Program]) -> ConformanceError:
        """Make the smallest example that can be found of a failure, in a program or all that came before it."""
        for program in (*done[-1:], join_programs(done)):
            again = await self._try(program)
            if again is not None:
                return await self._shrink(program, again)
        example = _example(self._subject, join_programs(done))
        return ConformanceError(failure.rule, failure.problem, example, again=False)

    async def _try(self, program: Program) -> ConformanceError | None:
        try:
            await _run(self._subject, (program,))
        except ConformanceError as error:
            return None if error.rule.number in self._subject.skip else error
        return None

    async def _shrink(self, program: Program, failure: ConformanceError) -> ConformanceError:
        until = time.monotonic() + _SHRINK_SECONDS
        tried = {program}
        going = True
        while going:
            going = False
            for candidate in simpler(program):
                if candidate in tried:
                    continue
                if len(tried) > _SHRINK_RUNS or time.monotonic() > until:
                    break
                tried.add(candidate)
                if (again := await self._try(candidate)) is not None:
                    program, failure, going = candidate, again, True
                    break
        return ConformanceError(failure.rule, failure.problem, _example(self._subject, program))


def _example(subject: Subject, program: Program) -> str:
    options = [
        f"{name}={value!r}"
        for name in ("timeout", "close_timeout", "quiet", "deterministic", "seed", "params", "long_params")
        if (value := getattr(subject, name)) != _DEFAULTS[name]
    ]
    options += [
        f"{name}=..."
        for name in ("stage", "request", "session", "session_params", "bad_inputs", "expect")
        if getattr(subject, name) != _DEFAULTS[name]
    ]
    arguments = "".join(f", {option}" for option in options)
    return f"program = {write_program(program)}\nawait run_client_program(make, program{arguments})"


def _summary(skip: Mapping[int, str], needs: Mapping[str, tuple[bool, Sequence[int]]]) -> Conformance:
    reasons = dict(skip)
    for name, (given, rules) in needs.items():
        for number in rules:
            if not given:
                reasons.setdefault(number, f"it needs {name}")
    return Conformance(
        kept=tuple(rule for number, rule in CLIENT_RULES.items() if number not in reasons),
        not_checked={CLIENT_RULES[number]: why for number, why in sorted(reasons.items())},
    )
