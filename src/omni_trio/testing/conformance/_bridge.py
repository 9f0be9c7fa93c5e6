"""`check_bridge` and `check_expand`: whether the functions between stages keep what they promise."""

from __future__ import annotations

import random
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

import msgspec

from omni_trio.bridges import Bridge, BridgeContext, Companion, ExpandContext, resolve_bridge
from omni_trio.errors import InvalidRequest
from omni_trio.merging import merge_data
from omni_trio.messages import StageInput

from ._rules import BRIDGE_RULES
from ._values import mutable_parts, overlap, snapshot, write
from ._violation import ConformanceError, checked_skip

__all__ = ["SlowBridgeWarning", "bridge_context", "check_bridge", "check_expand"]

_UNREAD: Final[Mapping[str, Any]] = {"text": "", "data": {}}

_CUTS: Final = 5
"""In so many ways a context is cut into pieces."""


class SlowBridgeWarning(UserWarning):
    """A bridge that runs inline takes long, and nothing else runs meanwhile."""


def bridge_context(**fields: Any) -> BridgeContext:
    """Make the context of a plain request whose source has ended, unless `fields` say otherwise."""
    usual: dict[str, Any] = {
        "request_id": "r",
        "prompt": StageInput(text="hello"),
        "source": "thinker",
        "stage": "talker",
        "token_ids": (),
        "text": "",
        "data": {},
        "finished": True,
        "finish_reason": "stop" if fields.get("finished", True) else None,
    }
    return BridgeContext(**{**usual, **fields})


def check_bridge(
    bridge: Bridge | str,
    contexts: Sequence[BridgeContext],
    *,
    streams: bool = False,
    sends: Callable[[StageInput], object] | None = None,
    slow: float = 0.02,
    seed: int = 0,
    skip: Mapping[int, str] | None = None,
) -> list[StageInput | None]:
    """Run a bridge over the contexts of one request, in order, and check what every bridge promises.

    Args:
        bridge: a function, or the name of one.
        contexts: as the runtime would give them, one per call, each with all that the source has made so far; its
            state is made here.
        streams: whether it is for ``feed = "output"`` or sessions, and what it makes of the pieces has to add up to
            what it makes of the last context alone. A single context without data is cut into pieces here.
        sends: raises for an input that can not be sent to the stage.
        slow: seconds that a bridge that runs inline may take per call; one that always takes longer is warned of.
        seed: of the cutting.
        skip: by number, rules that are not to be checked, and why.

    Returns:
        What it made, call by call.

    Raises:
        ConformanceError: a rule is broken.
        InvalidRequest: it refused a context, and broke no rule.
        ValueError: `skip` names a rule that there is not.

    Warns:
        SlowBridgeWarning: it runs inline and is slow; it says how slow.
    """
    spec = resolve_bridge(bridge)
    checker = _Checker(spec.name, spec.function, checked_skip(BRIDGE_RULES, skip), sends)
    made, refusal = checker.run(contexts)
    checker.same(made, refusal, contexts, 5, "given the same contexts")
    unread = {name: value for name, value in _UNREAD.items() if name not in spec.reads}
    if unread:
        without = [_without(one, unread) for one in contexts]
        checker.same(made, refusal, without, 6, f"given nothing but {', '.join(sorted(spec.reads))}")
    if spec.run_in == "inline" and checker.quickest > slow:
        problem = f"each call takes {checker.quickest * 1000:.3g} ms or more, and nothing else runs meanwhile"
        error = checker.error(7, f"{problem}; use run_in='thread'", contexts)
        if 7 not in checker.skip:
            warnings.warn(str(error), SlowBridgeWarning, stacklevel=2)
    if refusal is not None:
        raise refusal
    if streams and contexts:
        checker.pieces(contexts, random.Random(seed))  # noqa: S311 - nobody must be kept from guessing it
    return made


def check_expand(
    expand: Callable[[ExpandContext], Iterable[Companion]],
    given: ExpandContext,
    *,
    skip: Mapping[int, str] | None = None,
) -> list[Companion]:
    """Check a function that makes companions, as `check_bridge` does; their roles have to differ, too.

    Args:
        expand: the function.
        given: what it is given.
        skip: by number, rules that are not to be checked, and why.

    Returns:
        What it made.

    Raises:
        ConformanceError: a rule is broken.
        InvalidRequest: it refused what it was given, and broke no rule.
        ValueError: `skip` names a rule that there is not.
    """
    name = getattr(expand, "__qualname__", repr(expand))
    checker = _Checker(name, expand, checked_skip(BRIDGE_RULES, skip), None)
    before = snapshot(given)
    made: list[list[Companion]] = []
    for _ in range(2):
        try:
            made.append(list(expand(given)))
        except InvalidRequest:
            checker.expect(snapshot(given) == before, 3, "it changed what it was given", [given])
            raise
        except Exception as error:
            raise checker.error(1, f"it raised {type(error).__name__}: {error}", [given]) from error
        checker.expect(snapshot(given) == before, 3, "it changed what it was given", [given])
    companions, again = made
    checker.expect(snapshot(companions) == snapshot(again), 5, "it made something else the second time", [given])
    checker.own(given, companions, [given])
    checker.own(companions, again, [given])
    roles = [one.role for one in companions]
    checker.expect(len(set(roles)) == len(roles), 10, f"it made {roles}", [given])
    for one in companions:
        checker.input(one.input, [given])
    return companions


class _Checker:
    def __init__(
        self, name: str, function: Any, skip: Mapping[int, str], sends: Callable[[StageInput], object] | None
    ) -> None:
        self._name = name
        self._function = function
        self._sends = sends
        self.skip = skip
        self.quickest = float("inf")
        """Seconds that the quickest call took. What else runs on the machine is not the bridge's fault."""

    def run(self, contexts: Sequence[BridgeContext]) -> tuple[list[StageInput | None], InvalidRequest | None]:
        state: dict[str, Any] = {}
        made: list[StageInput | None] = []
        for number, one in enumerate(contexts):
            shown = contexts[: number + 1]
            given = msgspec.structs.replace(one, state=state)
            before = snapshot(one)
            refusal: InvalidRequest | None = None
            result: Any = None
            began = time.perf_counter()
            try:
                result = self._function(given)
            except InvalidRequest as error:
                refusal = error
            except Exception as error:
                if 1 not in self.skip:
                    raise self.error(1, f"it raised {type(error).__name__}: {error}", shown) from error
            self.quickest = min(self.quickest, time.perf_counter() - began)
            self.expect(snapshot(one) == before, 3, "it changed what it was given", shown)
            if refusal is not None:
                return made, refusal
            self._result(one, result, made, shown)
            made.append(result)
        return made, None

    def _result(self, given: BridgeContext, result: Any, made: Sequence[Any], shown: Sequence[Any]) -> None:
        is_input = isinstance(result, StageInput)
        self.expect(result is None or is_input, 2, f"it returned {type(result).__name__}", shown)
        if not is_input:
            return
        self.input(result, shown)
        self.own(given, [result], shown)
        self.own([earlier for earlier in made if earlier is not None], [result], shown)
        batch = result.batch or ()
        for index, item in enumerate(batch):
            self.own(batch[:index], [item], shown)

    def input(self, made: StageInput, shown: Sequence[Any]) -> None:
        for one in (made, *(made.batch or ())):
            ids = one.token_ids
            self.expect(ids is None or all(type(token) is int for token in ids), 9, f"token_ids are {ids!r}", shown)
            self.expect(one.text is None or type(one.text) is str, 9, f"text is {one.text!r}", shown)
            if self._sends is not None:
                try:
                    self._sends(one)
                except Exception as error:
                    if 11 not in self.skip:
                        raise self.error(11, f"{type(error).__name__}: {error}", shown) from error

    def own(self, given: Any, made: Iterable[Any], shown: Sequence[Any]) -> None:
        """What is made has to be of its own, as far as it can change."""
        theirs = {id(part): part for part in mutable_parts(given)}
        arrays = [part for part in theirs.values() if not isinstance(part, list | dict)]
        for ours in (part for one in made for part in mutable_parts(one)):
            self.expect(id(ours) not in theirs, 4, f"it handed on a {type(ours).__name__} that is not its own", shown)
            shared = any(overlap(ours, array) for array in arrays)
            self.expect(not shared, 4, "it handed on an array whose memory is not its own; copy it", shown)

    def same(
        self,
        made: Sequence[StageInput | None],
        refusal: InvalidRequest | None,
        contexts: Sequence[BridgeContext],
        number: int,
        given: str,
    ) -> None:
        """What is made again has to be the same."""
        if number == 6:  # with less to read it may fail in many ways, and all mean that it reads what it does not say
            try:
                again, refusal_again = self.run(contexts)
            except ConformanceError as error:
                self.expect(False, number, f"{given}, this happens: {error.problem}", contexts)
                return
        else:
            again, refusal_again = self.run(contexts)
        words = f"{given}, it made something else: {_short(again)}, and first {_short(made)}"
        self.expect(snapshot(again) == snapshot(list(made)), number, words, contexts)
        self.expect(str(refusal_again) == str(refusal), number, f"{given}, it said something else", contexts)

    def pieces(self, contexts: Sequence[BridgeContext], rng: random.Random) -> None:
        """What is made of the pieces has to add up to what is made of the whole."""
        ways = [contexts] if len(contexts) > 1 else [_cut(contexts[0], rng) for _ in range(_CUTS)]
        whole, refusal = self.run(contexts[-1:])
        for way in ways:
            parts, refusal_of_parts = self.run(way)
            if refusal is not None or refusal_of_parts is not None:
                self.expect(str(refusal) == str(refusal_of_parts), 8, f"it said: {refusal_of_parts}", way)
                continue
            ours, theirs = _sum(parts), _sum(whole)
            self.expect(ours == theirs, 8, f"the pieces add up to {ours}, the whole is {theirs}", way)

    def expect(self, kept: bool, number: int, problem: str, shown: Sequence[Any]) -> None:
        if not kept and number not in self.skip:
            raise self.error(number, problem, shown)

    def error(self, number: int, problem: str, shown: Sequence[Any]) -> ConformanceError:
        function = self._name.rpartition(":")[2]
        calls = [_code(one) for one in shown]
        if len(calls) == 1 and isinstance(shown[0], ExpandContext):
            example = f"check_expand({function}, {calls[0]})"
        else:
            example = f"check_bridge({function}, [\n" + "".join(f"    {call},\n" for call in calls) + "])"
        return ConformanceError(BRIDGE_RULES[number], f"{self._name}: {problem}", example)


def _without(one: BridgeContext, unread: Mapping[str, Any]) -> BridgeContext:
    companions = {role: msgspec.structs.replace(output, **unread) for role, output in one.companions.items()}
    return msgspec.structs.replace(one, companions=companions, **unread)


def _cut(whole: BridgeContext, rng: random.Random) -> list[BridgeContext]:
    """Give the whole bit by bit. Data stays out of it: how it is cut, its kind decides."""
    if whole.data:
        return [whole]
    steps = max(len(whole.token_ids), len(whole.text))
    ends = sorted(rng.sample(range(1, steps), min(rng.randint(1, 4), steps - 1))) if steps > 1 else []
    pieces = [
        msgspec.structs.replace(
            whole,
            token_ids=whole.token_ids[: len(whole.token_ids) * end // steps],
            text=whole.text[: len(whole.text) * end // steps],
            finished=False,
            finish_reason=None,
        )
        for end in ends
    ]
    return [*pieces, whole]


def _sum(made: Sequence[StageInput | None]) -> Any:
    parts = [one for one in made if one is not None]
    tokens = [token for one in parts for token in one.token_ids or ()]
    text = "".join(one.text or "" for one in parts)
    return {"token_ids": tokens, "text": text, "data": snapshot(merge_data(one.data for one in parts))}


def _short(made: Sequence[Any]) -> str:
    text = repr(list(made))
    return text if len(text) <= 300 else f"{text[:300]} ..."


def _code(one: Any) -> str:
    """Write what a function was given as code, as far as it is not as usual."""
    usual = bridge_context() if isinstance(one, BridgeContext) else None
    fields = []
    for name in one.__struct_fields__:
        value = getattr(one, name)
        if name == "state" or (usual is not None and snapshot(value) == snapshot(getattr(usual, name))):
            continue
        fields.append(f"{name}={write(value)}")
    call = "bridge_context" if usual is not None else type(one).__name__
    return f"{call}({', '.join(fields)})"
