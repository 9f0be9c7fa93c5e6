"""A pipeline for Hypothesis to play with: rules are what callers and operators do, invariants what must always hold."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any, ClassVar, Literal, TypeVar, TypeVarTuple

import attrs
import trio
import trio.testing

try:
    from hypothesis import note
    from hypothesis import strategies as st
    from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, precondition, rule
except ImportError as error:  # pragma: no cover - it is there where tests run
    raise ImportError("omni_trio.testing.machine needs Hypothesis: pip install 'omni-trio[testing]'") from error

from omni_trio.bridges import BridgeContext
from omni_trio.errors import EngineDied, OmniTrioError, OperationFailed, RequestAborted, RequestError, ShutDown
from omni_trio.messages import Output, Progress, StageInput, StageMetrics, StageRequest
from omni_trio.pipeline import Pipeline, StageSpec
from omni_trio.runtime import Request, Runtime, holdings, open_runtime
from omni_trio.stages import ClientFactory, ReplicaContext, StageClient

from . import strategies
from ._guest import Guest
from .script import Die, Error, Reject, Script, Stall
from .simulated import SimStage
from .trace import Entry, timeline

__all__ = ["MachineRequest", "OrchestratorMachine"]

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

Place = tuple[int, int]

_SECONDS = st.sampled_from((0.0, 0.5, 1.0, 5.0))
"""Few, so that things happen at the same time."""

_PROMPT = (1, 2)


def _hand_on(context: BridgeContext) -> StageInput:
    return StageInput(token_ids=tuple(context.token_ids) or _PROMPT)


_SCRIPTS = strategies.scripts(strategies.Faults(level="light", verbs=(Error(), Reject(), Stall())))


@attrs.define(eq=False)
class MachineRequest:
    """A request of a machine, as its caller knows it. What rules get from the bundle `OrchestratorMachine.requests`."""

    index: int
    scripts: tuple[Script, ...]
    """One per stage."""
    handle: Request
    heard: defaultdict[int, list[int]] = attrs.field(factory=lambda: defaultdict(list))
    """By stage, the tokens that the caller got."""
    end: str | None = None
    """How it ended, as far as the caller was told: ``finished``, ``left``, or the name of an error."""
    aborted: bool = False
    """Whether somebody aborted it before it had ended."""
    at_door: trio.CancelScope = attrs.field(factory=trio.CancelScope, repr=False)
    entered: trio.Event = attrs.field(factory=trio.Event, repr=False)
    leave: trio.Event = attrs.field(factory=trio.Event, repr=False)
    over: trio.Event = attrs.field(factory=trio.Event, repr=False)
    """Set once the caller is out of the request's block."""

    @property
    def id(self) -> str:
        """What callers and errors call it."""
        return f"r{self.index}"


class OrchestratorMachine(RuleBasedStateMachine):
    """A Hypothesis state machine that drives one runtime: subclass it, and add rules and invariants of your own.

    Each example is one trio run on a virtual clock, with one runtime in it. Rules are synchronous and call
    `run_async`; between rules nothing happens. After every rule all tasks are let run until they wait, and the
    books are checked; in the end everything that can end must do so, and nothing may be left.

    What is checked, with the numbers of the guarantees: every request that can end does (I2), what a caller gets of a
    stage is what the stage said, in order (I4), a request that nobody waits for leaves nothing behind (I5), nothing
    comes after an abort (I6), the statistics are true (I11), closing ends everything (I12), no wait is for ever (I16).

    Use it like any state machine: ``TestMine = MyMachine.TestCase``, or
    `hypothesis.stateful.run_state_machine_as_test`.
    """

    pipeline: ClassVar[Pipeline] = Pipeline(
        [
            StageSpec(name="first", kind="simulated", replicas=2, final_output=True),
            StageSpec(name="second", kind="simulated", bridge=_hand_on),
        ]
    )
    """What is run."""
    stages: ClassVar[Mapping[str, ClientFactory]] = {}
    """By stage name: a `SimStage` without a script, for its times and limits, or a factory of your own."""
    scripts: ClassVar[st.SearchStrategy[Script]] = _SCRIPTS
    """What simulated stages do with a request; one is drawn per request and stage."""
    runtime_options: ClassVar[Mapping[str, Any]] = {"on_engine_death": "isolate"}
    """Further arguments of `open_runtime`."""
    patience: ClassVar[float] = 3600.0
    """Virtual seconds after which whatever is waited for counts as hung."""

    requests = Bundle[MachineRequest]("requests")

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[MachineRequest] = []
        """All requests of this example."""
        self.entries: list[Entry] = []
        """What has happened."""
        self.failure: OmniTrioError | None = None
        """What ended the runtime, where it did not live until the end of the example."""
        self._guest: Guest | None = None
        self._opened: Runtime | None = None
        self._replicas: dict[Place, Any] = {}
        self._said: defaultdict[Place, list[int]] = defaultdict(list)  # by request and stage
        self._close = trio.Event()
        self._closed = trio.Event()

    # ---- for rules

    @property
    def runtime(self) -> Runtime:
        """The runtime under test."""
        assert self._opened is not None  # it is opened before the first rule
        return self._opened

    @property
    def is_open(self) -> bool:
        """Whether the runtime still runs."""
        return self._opened is not None and not self._closed.is_set()

    def run_async(self, function: Callable[[*Ts], Awaitable[T]], *args: *Ts) -> T:
        """Call an async function inside the example's trio run and return its result.

        Everything else in the run goes on meanwhile, and stops when it returns.

        Raises:
            AssertionError: it has not returned within `patience` virtual seconds.
        """
        assert self._guest is not None  # it is there before the first rule
        return self._guest.run(function, *args)

    @property
    def nursery(self) -> trio.Nursery:
        """For tasks that shall go on from rule to rule; they are cancelled at the end of the example."""
        assert self._guest is not None  # as above
        return self._guest.nursery

    def client(self, stage: StageSpec) -> ClientFactory:
        """Return what opens the replicas of a stage. Override it to wrap what this returns.

        By default that is what `stages` has, else a plain `SimStage`. A `SimStage` without a script plays those that
        are drawn.
        """
        given = self.stages.get(stage.name, SimStage())
        if not isinstance(given, SimStage):
            return given
        stage_id = self.pipeline.stage_id(stage.name)
        script = given.script or functools.partial(self._script, stage_id)
        sim = attrs.evolve(given, script=script, log=None, watch=self._watch)

        @asynccontextmanager
        async def factory(context: ReplicaContext) -> AsyncIterator[StageClient]:
            async with sim(context) as client:
                self._replicas[context.stage_id, context.replica_id] = client
                yield client

        return factory

    def must_end(self, request: MachineRequest) -> bool:
        """Whether a request has to end by itself when it is given time. Override it for stages of your own.

        By default: where every stage is a simulated one that plays drawn scripts, and none of them stalls.
        """
        played = all(
            isinstance(stage := self.stages.get(spec.name, SimStage()), SimStage) and stage.script is None
            for spec in self.pipeline.stages
        )
        return played and not any(isinstance(verb, Stall) for script in request.scripts for verb in script)

    def ask(self, scripts: tuple[Script, ...], **options: Any) -> MachineRequest:
        """Have a new caller ask for something, and let it get as far as it can without time passing.

        Args:
            scripts: what each stage does with it.
            options: further arguments of `Runtime.request`; ``prompt`` is one of them.
        """
        index = len(self.asked)
        handle = self.runtime.request(options.pop("prompt", list(_PROMPT)), request_id=f"r{index}", **options)
        request = MachineRequest(index, scripts, handle)
        self.asked.append(request)
        self.nursery.start_soon(self._call, request)
        self.settle()
        return request

    def read_one(self, request: MachineRequest, *, within: float) -> Output | Progress | StageMetrics | None:
        """Have a request's caller take its next event.

        Returns:
            The event; None: it has ended (see `MachineRequest.end`), or nothing came within so many seconds.
        """
        return self.run_async(self._read_one, request, within)

    def settle(self) -> None:
        """Let every task run until all of them wait; no time passes."""
        self.run_async(trio.testing.wait_all_tasks_blocked)

    def timeline(self) -> str:
        """What has happened in this example, as text."""
        return timeline(self.entries)

    # ---- rules

    @initialize(seed=st.integers(0, 2**32 - 1))
    def open(self, seed: int) -> None:
        """Open the runtime; `seed` decides which of the tasks that could run runs first."""
        self._guest = Guest(seed, patience=self.patience)
        self.run_async(self.nursery.start, self._live)

    def _is_open(self) -> bool:
        return self.is_open

    @precondition(_is_open)
    @rule(
        target=requests,
        scripts=st.runner().flatmap(lambda self: st.tuples(*(self.scripts for _ in self.pipeline.stages))),
    )
    def submit(self, scripts: tuple[Script, ...]) -> MachineRequest:
        """A caller asks for something."""
        return self.ask(scripts)

    @rule(request=requests)
    def read(self, request: MachineRequest) -> None:
        """A caller takes its next event, if one comes within ten seconds."""
        self.read_one(request, within=10.0)

    @precondition(_is_open)
    @rule(request=requests)
    def abort(self, request: MachineRequest) -> None:
        """Somebody aborts a request."""
        self.run_async(self._abort, request)

    @rule(request=requests)
    def leave(self, request: MachineRequest) -> None:
        """A caller leaves its request's block."""
        self.run_async(self._leave, request)

    @rule(seconds=_SECONDS)
    def tick(self, seconds: float) -> None:
        """Time passes."""
        self.run_async(trio.sleep, seconds)

    def _has_replicas(self) -> bool:
        return self.is_open and bool(self._replicas)

    @precondition(_has_replicas)
    @rule(place=st.runner().flatmap(lambda self: st.sampled_from(sorted(self._replicas))))
    def kill(self, place: Place) -> None:
        """A simulated replica dies; `place` is its stage's index and its own."""
        self._note("operator", "kill", stage=place[0], replica=place[1])
        self.run_async(self._kill, place)

    @precondition(_is_open)
    @rule(mode=st.sampled_from(("wait", "abort", "keep")))
    def pause(self, mode: Literal["wait", "abort", "keep"]) -> None:
        """An operator pauses the runtime; it may fail, since requests may be stalled."""
        self.run_async(self._operate, "pause", mode)

    @precondition(_is_open)
    @rule()
    def resume(self) -> None:
        """An operator lets requests through again."""
        self.run_async(self._operate, "resume")

    # ---- invariants

    @invariant()
    def books_are_true(self) -> None:
        """Whoever is not in flight leaves nothing behind, and the runtime's numbers add up (I5, I11)."""
        if not self.is_open:
            return
        self.settle()
        held, stats = holdings(self.runtime), self.runtime.stats()
        waiting = [request for request in self.asked if not request.over.is_set()]
        ended = stats.finished + stats.failed + stats.aborted + stats.expired + stats.rejected
        assert stats.in_flight == held.requests, f"I11: {stats.in_flight} count as in flight, {held.requests} are"
        assert ended + stats.in_flight == len(self.asked), f"I11: of {len(self.asked)} requests: {stats}"
        assert held.requests <= len(waiting), f"I5: {held.requests} requests for {len(waiting)} callers"
        if not waiting:
            self._check_nothing_is_left()

    def teardown(self) -> None:
        """Run to quiescence: what can end must, then everybody leaves, the runtime closes, and nothing is left."""
        if self._guest is None:
            return
        try:
            if self._opened is not None:
                self.run_async(self._finish)
        finally:
            note(f"What has happened:\n{self.timeline()}")  # shown of the smallest failing example only
            self._guest.close()

    # ---- inside the run

    async def _live(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        clients = {stage.name: self.client(stage) for stage in self.pipeline.stages}
        try:
            async with open_runtime(self.pipeline, clients=clients, **self.runtime_options) as runtime:
                self._opened = runtime
                self._note("runtime", "open")
                task_status.started()
                await self._close.wait()
        except OmniTrioError as error:
            if self._opened is None:
                raise
            self.failure = error
        finally:
            self._closed.set()
            text = "" if self.failure is None else f"{type(self.failure).__name__}: {self.failure}"
            self._note("runtime", "closed", text=text)

    async def _call(self, request: MachineRequest) -> None:
        self._note("caller", "ask", request=request.index)
        try:
            with request.at_door:
                async with request.handle:
                    self._note("caller", "admitted", request=request.index)
                    request.entered.set()
                    await request.leave.wait()
            if request.end is None:
                self._end(request, "left")
        except RequestError as error:
            self._end(request, type(error).__name__, error)
        finally:
            request.entered.set()
            request.over.set()

    async def _read_one(self, request: MachineRequest, within: float) -> Output | Progress | StageMetrics | None:
        with trio.move_on_after(within):
            await request.entered.wait()
            if request.over.is_set() or request.end is not None:
                return None
            try:
                event = await anext(request.handle)
            except StopAsyncIteration:
                self._end(request, "finished")
            except RequestError as error:
                self._end(request, type(error).__name__, error)
            else:
                self._hear(request, event)
                return event
        return None

    def _hear(self, request: MachineRequest, event: Output | Progress | StageMetrics) -> None:
        tokens = tuple(event.token_ids) if isinstance(event, Output) else ()
        what = "output" if isinstance(event, Output) else "progress" if isinstance(event, Progress) else "metrics"
        stage = event.stage_id
        self._note("caller", what, request=request.index, stage=stage, replica=event.replica_id, tokens=tokens)
        assert not request.aborted, f"I6: {request.id} was aborted, and then got {event}"
        assert request.end is None, f"I1: {request.id} had ended ({request.end}), and then got {event}"
        request.heard[stage] += tokens
        if (request.index, stage) in self._said:
            heard, said = request.heard[stage], self._said[request.index, stage]
            assert said[: len(heard)] == heard, (
                f"I4: stage {stage} said {said} for {request.id}, its caller got {heard}"
            )

    def _end(self, request: MachineRequest, how: str, error: RequestError | None = None) -> None:
        text, stage = ("", None) if error is None else (str(error), error.stage_id)
        what = "left" if how == "left" else "end"
        self._note("caller", what, request=request.index, detail=how, stage=stage, text=text)
        request.end = how
        if request.aborted and how != "left":
            assert how == RequestAborted.__name__, f"I6: {request.id} was aborted, and ended with {how}"
        if how == "finished":
            for (index, stage_id), said in self._said.items():
                if index == request.index and self.pipeline.finals[stage_id]:
                    heard = request.heard[stage_id]
                    assert heard == said, f"I4: stage {stage_id} said {said} for {request.id}, its caller got {heard}"

    async def _abort(self, request: MachineRequest) -> None:
        self._note("operator", "abort", request=request.index)
        try:
            ended = await self.runtime.abort(request.id)
        except EngineDied as error:  # a stage that does not acknowledge counts as dead
            self._note("operator", "abort done", request=request.index, text=str(error))
            return
        request.aborted = request.aborted or request.id in ended
        self._note("operator", "abort done", request=request.index, count=len(ended))

    async def _leave(self, request: MachineRequest) -> None:
        request.leave.set()
        if not request.entered.is_set():
            request.at_door.cancel("its caller leaves")  # a paused runtime does not let it in
        await request.over.wait()

    async def _kill(self, place: Place) -> None:
        self._replicas[place].die(Die("killed by a rule"))
        await trio.testing.wait_all_tasks_blocked()

    async def _operate(self, act: str, *args: Any) -> None:
        self._note("operator", act, detail=" ".join(map(str, args)))
        try:
            await getattr(self.runtime, act)(*args)
        except (OperationFailed, ShutDown) as error:  # the latter: an engine died, and the runtime ends with it
            self._note("operator", f"{act} done", text=str(error))
        else:
            self._note("operator", f"{act} done")

    async def _finish(self) -> None:
        if self.is_open:
            await self._operate("resume")
            for request in self.asked:
                if not self.must_end(request):
                    await self._leave(request)  # it may hold what others wait for
            for request in self.asked:
                deadline = trio.current_time() + self.patience / 2
                while request.end is None and trio.current_time() < deadline:
                    await self._read_one(request, deadline - trio.current_time())
                assert request.end is not None, (
                    f"I2: {request.id} has not ended in {self.patience / 2:g} virtual seconds"
                )
        for request in self.asked:
            request.leave.set()
        self._close.set()
        await self._closed.wait()
        for request in self.asked:
            await request.over.wait()
        self._check_nothing_is_left()

    def _check_nothing_is_left(self) -> None:
        held = holdings(self.runtime)
        work = {
            f"stage {stage}, replica {replica}": count
            for (stage, replica), client in self._replicas.items()
            if (count := client.statistics().running + client.statistics().waiting)
        }
        assert (held.requests, held.legs, held.load) == (0, 0, 0), f"I5: nobody waits for anything, and there is {held}"
        assert not work, f"I5: nobody waits for anything, and replicas are at work: {work}"

    # ---- stages

    def _script(self, stage_id: int, request: StageRequest) -> Script:
        return self.asked[_index(request.request_id)].scripts[stage_id]

    def _watch(self, what: str, context: ReplicaContext, request_id: str, **facts: Any) -> None:
        index = _index(request_id) if request_id else None
        if what == "says" and index is not None:
            self._said[index, context.stage_id] += facts["tokens"]
        self._note("stage", what, request=index, stage=context.stage_id, replica=context.replica_id, **facts)

    def _note(self, who: Any, what: str, **facts: Any) -> None:
        self.entries.append(Entry(time=trio.current_time(), who=who, what=what, **facts))


def _index(request_id: str) -> int:
    """The number of a request, from what a stage calls it."""
    return int(request_id.removeprefix("r").partition("-")[0])
