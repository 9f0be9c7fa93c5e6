"""`check_pipeline`: whether a pipeline's own functions carry requests through it, with and without faults."""

from __future__ import annotations

import os
import random
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, Final, Literal, TypeAlias

import attrs
import msgspec
import trio
import trio.testing

from omni_trio.bridges import Bridge, BridgeContext, BridgeSpec, Companion, Expand, ExpandContext
from omni_trio.config import load_pipeline
from omni_trio.errors import BridgeFailed, NoReplicaAvailable, ReplicaLost, RequestError
from omni_trio.messages import StageInput, StageRequest
from omni_trio.pipeline import Pipeline, StageSpec
from omni_trio.runtime import Runtime, holdings, open_runtime
from omni_trio.stages import ClientFactory, ReplicaContext, StageClient
from omni_trio.testing.script import Chunk, Die, Error, Finish, LateChunk, Reject, Script, Stall, Wait
from omni_trio.testing.simulated import SimStage

from ._bridge import check_bridge, check_expand
from ._rules import PIPELINE_RULES
from ._subject import describe, seeded
from ._values import snapshot, write
from ._violation import Conformance, ConformanceError, checked_skip

__all__ = ["Fault", "Visit", "check_pipeline", "run_pipeline_round"]

_HOUR: Final = 3600.0
"""Virtual seconds after which a request counts as hung; stages of a round take a few."""

_LEAVE: Final = 50.0
"""Seconds after which callers of requests that may stall leave."""


class Fault(msgspec.Struct, frozen=True, repr_omit_defaults=True):
    """What goes wrong with a request at one stage."""

    stage: str
    after: int
    """Verbs of the stage's script that are played before."""
    verb: Reject | Error | Stall | Die | LateChunk


class Visit(msgspec.Struct, frozen=True, repr_omit_defaults=True):
    """One request of a round."""

    prompt: int
    """Index of the prompt."""
    at: float = 0.0
    faults: tuple[Fault, ...] = ()
    leaves: float | None = None
    """Seconds after which its caller leaves."""


Round: TypeAlias = tuple[Visit, ...]
Scripts: TypeAlias = Mapping[str, Callable[[StageRequest], Script]]


def check_pipeline(
    pipeline: Pipeline | str | os.PathLike[str],
    prompts: Sequence[StageInput | str],
    *,
    scripts: Scripts | None = None,
    sampling_params: Any = None,
    streams: Sequence[str] = (),
    rounds: int = 50,
    seed: int = 0,
    skip: Mapping[int, str] | None = None,
) -> Conformance:
    """Check a pipeline with simulated stages in place of all of its own: its bridges, expand and placeholder functions.

    First each prompt goes through without a fault, and what the bridges were given then is given to `check_bridge`,
    what the expand function was given to `check_expand`. Then come rounds in which stages refuse, fail, stall and die,
    callers leave, and several requests are in flight at once. Owns its trio runs, on a virtual clock: call it from
    synchronous code.

    Args:
        pipeline: the pipeline, or the file that describes it.
        prompts: requests that it can serve.
        scripts: by stage name, what the stage does with a request that meets no fault. By default it makes a few tokens
            and words; stages whose bridges look at data need one that makes it, with ``Chunk(data=...)``.
        sampling_params: as for `omni_trio.open_runtime`'s requests. Simulated stages take any.
        streams: names of stages whose bridges have to make of pieces what they make of the whole.
        rounds: how many rounds with faults are drawn.
        seed: of the drawing, and of trio's scheduler.
        skip: by number, rules that are not to be checked, and why.

    Returns:
        Which rules were checked.

    Raises:
        ConformanceError: a rule is broken, of this kit or of `check_bridge`.
        ConfigError: the file can not be used.
        ValueError: `skip` names a rule that there is not, or there is no prompt.
    """
    skip = checked_skip(PIPELINE_RULES, skip)
    if not prompts:
        raise ValueError("prompts: expected one at least")
    if not isinstance(pipeline, Pipeline):
        pipeline = load_pipeline(pipeline)
    player = _Player(pipeline, prompts, scripts or {}, sampling_params, seed, skip)
    player.placeholders()
    player.without_faults(streams)
    rng = random.Random(seed)  # noqa: S311 - nobody must be kept from guessing it
    for _ in range(rounds):
        visits = _draw(rng, pipeline, len(prompts))
        if (error := player.found(visits)) is not None:
            raise player.shrunk(visits, error)
    return Conformance(
        kept=tuple(rule for number, rule in PIPELINE_RULES.items() if number not in skip),
        not_checked={PIPELINE_RULES[number]: why for number, why in skip.items()},
    )


def run_pipeline_round(
    pipeline: Pipeline | str | os.PathLike[str],
    prompts: Sequence[StageInput | str],
    visits: Sequence[Visit],
    *,
    scripts: Scripts | None = None,
    sampling_params: Any = None,
    seed: int = 0,
) -> None:
    """Run one round, as `check_pipeline` shows it in its examples.

    Raises:
        ConformanceError: a rule is broken.
    """
    if not isinstance(pipeline, Pipeline):
        pipeline = load_pipeline(pipeline)
    _Player(pipeline, prompts, scripts or {}, sampling_params, seed, {}).play(tuple(visits))


def _draw(rng: random.Random, pipeline: Pipeline, prompts: int) -> Round:
    names = [stage.name for stage in pipeline.stages]

    def visit() -> Visit:
        faults = tuple(
            Fault(name, rng.randint(0, 3), rng.choice(_FAULTS)) for name in names if rng.random() < 0.5 / len(names)
        )
        stalls = any(isinstance(fault.verb, Stall) for fault in faults)
        leaves = _LEAVE if stalls else rng.choice((None, None, 0.0, 1.0, 3.0))
        return Visit(rng.randrange(prompts), rng.choice((0.0, 0.0, 1.0, 2.0)), faults, leaves)

    return tuple(visit() for _ in range(rng.randint(1, 4)))


_FAULTS: Final = (Reject(), Error(), Stall(), Die(), LateChunk())


@attrs.define(eq=False)
class _Seen:
    """What was seen of one request."""

    inputs: list[tuple[str, Any]] = attrs.field(factory=list)
    """What stages were given, by name."""
    contexts: dict[str, list[BridgeContext]] = attrs.field(factory=dict)
    """What bridges were given, by the name of the stage behind."""
    expands: list[ExpandContext] = attrs.field(factory=list)
    end: RequestError | None = None
    left: bool = False
    done: bool = False


class _Player:
    def __init__(
        self,
        pipeline: Pipeline,
        prompts: Sequence[StageInput | str],
        scripts: Scripts,
        sampling_params: Any,
        seed: int,
        skip: Mapping[int, str],
    ) -> None:
        self._pipeline = pipeline
        self._prompts = prompts
        self._scripts = scripts
        self._sampling_params = sampling_params
        self._seed = seed
        self._skip = skip

    def placeholders(self) -> None:
        for stage, function in zip(self._pipeline.stages, self._pipeline.placeholders, strict=True):
            for prompt in self._prompts if function is not None else ():
                given = prompt if isinstance(prompt, StageInput) else StageInput(text=prompt)
                assert function is not None  # else there is nothing to go through
                example = f"placeholder({write(given)})"
                try:
                    length: Any = function(given)
                except Exception as error:
                    raise self._error(5, f"that of stage {stage.name!r} raised {describe(error)}", example) from error
                if isinstance(length, bool) or not isinstance(length, int) or length < 1:
                    self._broken(5, f"that of stage {stage.name!r} returned {length!r}", example)

    def without_faults(self, streams: Sequence[str]) -> None:
        for index in range(len(self._prompts)):
            visits = (Visit(index),)
            (first,) = self.play(visits)
            (second,) = self.play(visits)
            if snapshot(first.inputs) != snapshot(second.inputs):
                self._broken(6, _difference(first.inputs, second.inputs), self._example(visits))
            for name, contexts in first.contexts.items():
                spec = self._pipeline.bridges[self._pipeline.stage_id(name)]
                assert spec is not None  # it was asked
                check_bridge(_as_declared(spec, spec.function), contexts, streams=name in streams)
            for given in first.expands:
                assert self._pipeline.expander is not None  # it was asked
                check_expand(self._pipeline.expander.function, given)

    def found(self, visits: Round) -> ConformanceError | None:
        try:
            self.play(visits)
        except ConformanceError as error:
            return error
        return None

    def shrunk(self, visits: Round, error: ConformanceError) -> ConformanceError:
        going = True
        while going:
            going = False
            for fewer in _simpler(visits):
                if (again := self.found(fewer)) is not None:
                    visits, error, going = fewer, again, True
                    break
        return error

    def play(self, visits: Round) -> list[_Seen]:
        """Run one round and look at what came of it."""
        table = _Table(self._pipeline, visits, self._scripts)
        with seeded(self._seed):
            trio.run(self._main, table, visits, clock=trio.testing.MockClock(autojump_threshold=0))
        for visit, seen in zip(visits, table.seen, strict=True):
            self._judge(visit, seen, visits)
        return table.seen

    async def _main(self, table: _Table, visits: Round) -> None:
        async with open_runtime(table.pipeline, clients=table.clients(), on_engine_death="isolate") as runtime:
            async with trio.open_nursery() as nursery:
                for index in range(len(visits)):
                    nursery.start_soon(self._call, runtime, index, visits[index], table.seen[index])
            if not all(seen.done for seen in table.seen):
                hung = [index for index, seen in enumerate(table.seen) if not seen.done]
                self._broken(2, f"requests {hung} have not ended after a virtual hour", self._example(visits))
            left = holdings(runtime)
            if left.requests or left.legs or left.load:
                self._broken(3, f"after all requests had ended, there was {left!r}", self._example(visits))
            if work := table.work():
                self._broken(3, f"after all requests had ended, stages {work} still worked", self._example(visits))

    async def _call(self, runtime: Runtime, index: int, visit: Visit, seen: _Seen) -> None:
        await trio.sleep(visit.at)
        with trio.move_on_after(_HOUR):
            with trio.move_on_after(_HOUR if visit.leaves is None else visit.leaves) as scope:
                try:
                    await runtime.generate(
                        self._prompts[visit.prompt], request_id=f"v{index}", sampling_params=self._sampling_params
                    )
                except RequestError as error:
                    seen.end = error
            seen.left = scope.cancelled_caught
            seen.done = not (seen.left and visit.leaves is None)

    def _judge(self, visit: Visit, seen: _Seen, visits: Round) -> None:
        error = seen.end
        if error is None or seen.left:
            return
        name = f"request v{visits.index(visit)}"
        if isinstance(error, BridgeFailed):
            self._broken(4, f"{name} ended with {describe(error)}", self._example(visits))
            return
        died = any(isinstance(fault.verb, Die) for other in visits for fault in other.faults)
        if visit.faults or (died and isinstance(error, ReplicaLost | NoReplicaAvailable)):
            return
        number = 1 if len(visits) == 1 else 4
        self._broken(number, f"{name}, which met no fault, ended with {describe(error)}", self._example(visits))

    def _example(self, visits: Round) -> str:
        prompts = ", ".join(write(prompt) for prompt in self._prompts)
        lines = "".join(f"    {visit!r},\n" for visit in visits)
        more = ", scripts=scripts" if self._scripts else ""
        if self._sampling_params is not None:
            more += f", sampling_params={self._sampling_params!r}"
        if self._seed:
            more += f", seed={self._seed}"
        return f"visits = [\n{lines}]\nrun_pipeline_round(pipeline, [{prompts}], visits{more})"

    def _broken(self, number: int, problem: str, example: str) -> None:
        if number not in self._skip:
            raise self._error(number, problem, example)

    def _error(self, number: int, problem: str, example: str) -> ConformanceError:
        return ConformanceError(PIPELINE_RULES[number], problem, example)


def _difference(first: Sequence[tuple[str, Any]], second: Sequence[tuple[str, Any]]) -> str:
    for (name, one), (_, other) in zip(first, second, strict=False):
        if snapshot(one) != snapshot(other):
            return f"stage {name!r} was given {write(one)}, and the second time {write(other)}"
    return f"{len(first)} inputs were handed over, and the second time {len(second)}"


def _simpler(visits: Round) -> Iterator[Round]:
    for index, visit in enumerate(visits):
        before, after = visits[:index], visits[index + 1 :]
        if len(visits) > 1:
            yield (*before, *after)
        for skipped in range(len(visit.faults)):
            fewer = visit.faults[:skipped] + visit.faults[skipped + 1 :]
            yield (*before, msgspec.structs.replace(visit, faults=fewer), *after)
        if visit.at:
            yield (*before, msgspec.structs.replace(visit, at=0.0), *after)
        if visit.leaves is not None and not any(isinstance(fault.verb, Stall) for fault in visit.faults):
            yield (*before, msgspec.structs.replace(visit, leaves=None), *after)


def _as_declared(spec: BridgeSpec, function: Bridge) -> Bridge:
    """Declare a function as another one is: `resolve_bridge` looks at no more than this."""

    def declared(context: BridgeContext) -> StageInput | None:
        return function(context)

    inline: Literal["inline"] = "inline"  # on a virtual clock, no thread
    run_in = spec.run_in if function is spec.function else inline
    declared.__omni_trio_bridge__ = BridgeSpec(  # type: ignore[attr-defined]
        spec.name, declared, spec.reads, run_in
    )
    return declared


class _Table:
    """The simulated side of one round: its stages, and what they and the bridges are given."""

    def __init__(self, pipeline: Pipeline, visits: Round, scripts: Scripts) -> None:
        self._visits = visits
        self._scripts = scripts
        self._clients: list[tuple[str, StageClient]] = []
        self.seen = [_Seen() for _ in visits]
        self.pipeline = self._watched(pipeline)

    def _watched(self, pipeline: Pipeline) -> Pipeline:
        """The same pipeline, with bridges and expand function that write down what they are given."""
        stages = [
            stage if stage.bridge is None else attrs.evolve(stage, bridge=self._bridge(stage.name, spec))
            for stage, spec in zip(pipeline.stages, pipeline.bridges, strict=True)
        ]
        expand = None if pipeline.expander is None else self._expand(pipeline.expander.function)
        return attrs.evolve(pipeline, stages=stages, expand=expand)

    def _expand(self, function: Expand) -> Expand:
        def watched(context: ExpandContext) -> Iterable[Companion]:
            self.seen[_number(context.request_id)].expands.append(context)
            return function(context)

        return watched

    def _bridge(self, name: str, spec: BridgeSpec | None) -> Bridge:
        assert spec is not None  # there is a bridge

        def watched(context: BridgeContext) -> StageInput | None:
            given = msgspec.structs.replace(context, token_ids=tuple(context.token_ids), state={})
            self.seen[_number(context.request_id)].contexts.setdefault(name, []).append(given)
            return spec.function(context)

        return _as_declared(spec, watched)

    def clients(self) -> dict[str, ClientFactory]:
        return {stage.name: self._factory(stage) for stage in self.pipeline.stages}

    def work(self) -> list[str]:
        """The stages that still work on something."""
        said = ((name, client.statistics()) for name, client in self._clients)
        return [name for name, one in said if one.running > 0 or one.waiting > 0]

    def _factory(self, stage: StageSpec) -> ClientFactory:
        sim = SimStage(script=lambda request: self._script(stage, request), log=None)

        @asynccontextmanager
        async def factory(context: ReplicaContext) -> AsyncIterator[StageClient]:
            async with sim(context) as client:
                self._clients.append((stage.name, client))
                lenient: Any = _Lenient(client, stage)
                yield lenient

        return factory

    def _script(self, stage: StageSpec, request: StageRequest) -> Script:
        index = _number(request.request_id)
        visit = self._visits[index]
        self.seen[index].inputs.append((stage.name, request.input))
        script = self._usual(stage, request)
        for fault in visit.faults:
            if fault.stage == stage.name:
                return _with(script, fault)
        return script

    def _usual(self, stage: StageSpec, request: StageRequest) -> Script:
        if request.kv_transfer is not None and request.kv_transfer.role == "prefill":
            return (Wait(1.0), Finish("length", (0,), kv={"do_remote_prefill": True}))
        if (own := self._scripts.get(stage.name)) is not None:
            return own(request)
        if request.last and request.input == StageInput():
            return (Finish(),)
        return (Wait(0.5), Chunk((1, 2)), Wait(0.5), Chunk((3,)), Wait(0.5), Finish("stop", (4,)))


def _with(script: Script, fault: Fault) -> Script:
    if isinstance(fault.verb, Reject):
        return (fault.verb,)
    before = script[: min(fault.after, len(script) - 1)]
    if isinstance(fault.verb, LateChunk):
        return (*before, fault.verb, *script[len(before) :])
    return (*before, fault.verb)


def _number(request_id: str) -> int:
    """Which visit a request belongs to: the runtime's own ids begin with the one that its caller gave it."""
    return int(request_id.removeprefix("v").partition("-")[0])


class _Lenient:
    """A simulated client that takes any parameters: a pipeline's own are for its real engines."""

    def __init__(self, client: StageClient, stage: StageSpec) -> None:
        self._client = client
        self._stage = stage

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    def resolve_params(self, params: Any) -> Any:
        if params is not None and not isinstance(params, Mapping):
            return params
        return {**self._stage.sampling, **(params or {})}
