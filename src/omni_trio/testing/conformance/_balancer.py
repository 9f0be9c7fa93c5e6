"""`check_balancer`: whether a balancer keeps the contract of `omni_trio.stages.Balancer`."""

from __future__ import annotations

import inspect
import random
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from omni_trio.messages import StageInput
from omni_trio.stages import Balancer, ReplicaLoad, RequestInfo

from ._rules import BALANCER_RULES
from ._values import snapshot, write
from ._violation import Conformance, ConformanceError, checked_skip

__all__ = ["check_balancer"]

_ROUNDS: Final = 40
"""Times that a replica may be passed over, per replica of the stage."""


def check_balancer(
    make: Callable[[], Balancer],
    *,
    replicas: int = 5,
    picks: int = 1000,
    slow: float = 0.001,
    seed: int = 0,
    skip: Mapping[int, str] | None = None,
) -> Conformance:
    """Check that a balancer keeps its contract, under random loads with replicas that come and go.

    Args:
        make: makes a new one, each time alike.
        replicas: as many as the largest stage has.
        picks: how often it is asked.
        slow: seconds that no pick may always take.
        seed: of the loads.
        skip: by number, rules that are not to be checked, and why.

    Returns:
        Which rules were checked.

    Raises:
        ConformanceError: a rule is broken.
        ValueError: `skip` names a rule that there is not.
    """
    skip = checked_skip(BALANCER_RULES, skip)
    checker = _Checker(make, skip)
    rng = random.Random(seed)  # noqa: S311 - nobody must be kept from guessing it
    for count in range(1, replicas + 1):
        checker.history([_asked(rng, count) for _ in range(picks // replicas)])
        checker.fairness(count, rng)
    checker.speed(_asked(rng, replicas), slow)
    return Conformance(
        kept=tuple(rule for number, rule in BALANCER_RULES.items() if number not in skip),
        not_checked={BALANCER_RULES[number]: why for number, why in skip.items()},
    )


_Asked = tuple[list[ReplicaLoad], RequestInfo]


def _asked(rng: random.Random, count: int) -> _Asked:
    """Draw a question: some of the replicas, with few different loads, so that there are ties."""
    ids = sorted(rng.sample(range(count), rng.randint(1, count)))
    return [ReplicaLoad(index, rng.randint(0, 3)) for index in ids], _request(rng.randrange(1000))


def _request(number: int) -> RequestInfo:
    return RequestInfo(f"r{number}", StageInput(token_ids=(number, number + 1)))


class _Checker:
    def __init__(self, make: Callable[[], Balancer], skip: Mapping[int, str]) -> None:
        self._make = make
        self._skip = skip

    def history(self, asked: Sequence[_Asked]) -> None:
        """Ask two that were made alike, one after the other."""
        first, second = self._make(), self._make()
        for number, one in enumerate(asked):
            try:
                answer = self._pick(first, one)
                again = self._pick(second, one)
            except ConformanceError as error:
                raise self._shown(error, asked[: number + 1]) from None
            if answer != again:
                self._broken(3, f"the first said {answer!r}, the second {again!r}", asked[: number + 1])

    def fairness(self, count: int, rng: random.Random) -> None:
        """Load all replicas but one, and see whether that one is picked."""
        for idle in range(count):
            balancer = self._make()
            loads = [0 if index == idle else 50 for index in range(count)]
            asked: list[_Asked] = []
            for number in range(_ROUNDS * count):
                asked.append(([ReplicaLoad(*pair) for pair in enumerate(loads)], _request(number)))
                picked = self._pick(balancer, asked[-1])
                if picked == idle:
                    break
                loads[picked] += 1
                done = rng.choice([index for index in range(count) if index != idle])
                loads[done] = max(1, loads[done] - 1)
            else:
                words = f"with nothing in hand, replica {idle} of {count} was passed over {len(asked)} times"
                self._broken(5, words, asked[:1], times=len(asked))

    def speed(self, asked: _Asked, slow: float) -> None:
        """The quickest of many: what else runs on the machine is not the balancer's fault."""
        balancer = self._make()
        best = float("inf")
        for _ in range(50):
            began = time.perf_counter()
            self._pick(balancer, asked)
            best = min(best, time.perf_counter() - began)
        if best > slow:
            self._broken(6, f"each pick takes {best * 1000:.3g} ms or more; the limit is {slow * 1000:g} ms", [asked])

    def _pick(self, balancer: Balancer, asked: _Asked) -> int:
        replicas, request = asked
        before = snapshot(asked)
        try:
            answer: Any = balancer.pick(replicas, request)
        except Exception as error:
            raise ConformanceError(BALANCER_RULES[2], f"it raised {type(error).__name__}: {error}") from error
        if inspect.isawaitable(answer):
            if inspect.iscoroutine(answer):
                answer.close()
            raise ConformanceError(BALANCER_RULES[2], "it returned something to be awaited")
        if snapshot(asked) != before:
            raise ConformanceError(BALANCER_RULES[4], f"what it was given is now {replicas!r}")
        if not isinstance(answer, int) or isinstance(answer, bool) or not 0 <= answer < len(replicas):
            raise ConformanceError(BALANCER_RULES[1], f"of {len(replicas)} replicas it chose {answer!r}")
        return answer

    def _shown(self, error: ConformanceError, asked: Sequence[_Asked]) -> ConformanceError:
        """Show the question alone, where that is enough, else all that came before it too."""
        for start in range(len(asked) - 1, -1, -1):
            if self._fails(asked[start:], error.rule.number):
                asked = asked[start:]
                break
        return ConformanceError(error.rule, error.problem, _code(asked))

    def _fails(self, asked: Sequence[_Asked], number: int) -> bool:
        balancer = self._make()
        try:
            for one in asked:
                self._pick(balancer, one)
        except ConformanceError as error:
            return error.rule.number == number
        return False

    def _broken(self, number: int, problem: str, asked: Sequence[_Asked], *, times: int = 1) -> None:
        if number not in self._skip:
            raise ConformanceError(BALANCER_RULES[number], problem, _code(asked, times=times))


def _code(asked: Sequence[_Asked], *, times: int = 1) -> str:
    lines = ["balancer = make()"]
    for replicas, request in asked:
        call = f"balancer.pick({write(replicas)}, {write(request)})"
        lines += [f"for _ in range({times}):", f"    {call}"] if times > 1 else [call]
    return "\n".join(lines)
