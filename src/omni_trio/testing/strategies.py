"""Hypothesis strategies for simulations: whole plans, and their parts.

All is drawn, nothing is filtered, and what is drawn is legal: the pipeline can be made, and every request ends by
itself or is ended by its caller, an operator or the end of the runtime. What an example may contain is drawn first
(`fault_plans`), so that some examples have many faults of one kind, some have all kinds, and shrinking takes out whole
kinds at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, TypeAlias, get_args

import attrs
from msgspec.structs import replace

try:
    from hypothesis import strategies as st
except ImportError as error:  # pragma: no cover - it is there where tests run
    raise ImportError("omni_trio.testing.strategies needs Hypothesis: pip install 'omni-trio[testing]'") from error

from .model import permitted
from .plan import BridgeAct, CallerAct, OperatorAct, Plan, RequestPlan, SegmentPlan, StagePlan
from .script import (
    Chunk,
    Die,
    DieOnSubmit,
    Error,
    Finish,
    FinishSilently,
    KvReady,
    LateChunk,
    Reject,
    Script,
    Stall,
    Step,
    Verb,
    Wait,
)

__all__ = [
    "NO_FAULTS",
    "TIMES",
    "Faults",
    "Level",
    "fault_plans",
    "operator_plans",
    "pipelines",
    "requests",
    "schedules",
    "scripts",
    "sessions",
    "simulations",
]

Level: TypeAlias = Literal["none", "light", "heavy"]
"""``none``: everybody does their work. ``light``: single requests go wrong, by their callers, stages or bridges.
``heavy``: replicas die, stall and do not let go; operators pause, sleep and kill; the runtime is closed under load."""

TIMES = (0.0, 0.5, 1.0, 2.0, 5.0)
"""The seconds that anything takes, or comes at: few, so that things often happen at the same instant."""

_KV = {"remote_request_id": "prefilled"}
_AMPLE = 1000.0
"""Seconds that waiting for companions or chunks never takes."""

_NO_END = 1000.0
"""When operators open again what they have closed, at the latest; pausing takes up to a minute."""


@attrs.frozen(kw_only=True)
class Faults:
    """What may go wrong in one example."""

    level: Level = "none"
    verbs: tuple[Verb, ...] = ()
    """That end a script badly."""
    acts: tuple[CallerAct, ...] = ()
    """What callers do beside waiting."""
    bridges: tuple[BridgeAct, ...] = ()
    """What bridges do beside passing on."""
    operator: tuple[str, ...] = ()
    """What operators do."""
    stages: tuple[str, ...] = ()
    """What is wrong with stages: ``slow abort``, ``no abort``, ``abort error``."""
    limits: bool = False
    """Whether fewer requests are let in than come."""
    fail_stop: bool = False
    """Whether the first death ends the runtime."""
    close: bool = False
    """Whether the runtime is closed under load."""


NO_FAULTS = Faults()
"""Everybody does their work."""

_VERBS: dict[Level, tuple[Verb, ...]] = {
    "none": (),
    "light": (Error(), Reject()),
    "heavy": (Error(), Reject(), Stall(), Die(), DieOnSubmit()),
}
_ACTS: dict[Level, tuple[CallerAct, ...]] = {
    "none": ("slow",),
    "light": ("leave", "abort", "deadline", "slow", "stop reading"),
    "heavy": ("leave", "abort", "deadline", "slow", "stop reading"),
}


def _subsets(of: Sequence[Any]) -> st.SearchStrategy[tuple[Any, ...]]:
    if not of:
        return st.just(())
    return st.lists(st.booleans(), min_size=len(of), max_size=len(of)).map(
        lambda wanted: tuple(one for one, is_wanted in zip(of, wanted, strict=True) if is_wanted)
    )


def fault_plans(level: Level = "heavy") -> st.SearchStrategy[Faults]:
    """Draw what may go wrong in one example."""
    if level not in get_args(Level):
        raise ValueError(f"level: expected one of {', '.join(get_args(Level))}, not {level!r}")
    return _fault_plans(level)


@st.composite
def _fault_plans(draw: st.DrawFn, level: Level) -> Faults:
    if level == "none":
        return Faults(acts=draw(_subsets(_ACTS[level])))
    heavy = level == "heavy"
    return Faults(
        level=level,
        verbs=draw(_subsets(_VERBS[level])),
        acts=draw(_subsets(_ACTS[level])),
        bridges=draw(_subsets(("raise", "nothing"))),
        operator=draw(_subsets(("pause", "sleep", "kill"))) if heavy else (),
        stages=draw(_subsets(("slow abort", "no abort", "abort error"))) if heavy else (),
        limits=heavy and draw(st.booleans()),
        fail_stop=heavy and draw(st.booleans()),
        close=heavy and draw(st.booleans()),
    )


def schedules() -> st.SearchStrategy[int]:
    """Draw the seed of trio's scheduler. It has to be drawn: in a test that draws none, all examples run alike."""
    return st.integers(0, 2**16)


def _times() -> st.SearchStrategy[float]:
    return st.sampled_from(TIMES)


# ---- pipelines


def pipelines(*, max_stages: int = 5, max_replicas: int = 3) -> st.SearchStrategy[Plan]:
    """Draw a pipeline of simulated stages, in any of the modes: a plan without requests."""
    return _pipelines(max_stages, max_replicas, st.just({}))


@st.composite
def _pipelines(draw: st.DrawFn, max_stages: int, max_replicas: int, more: st.SearchStrategy[dict[str, Any]]) -> Plan:
    # A list, of which shrinking can take out whole stages; what is illegal where one ends up is bent into shape.
    wanted = draw(st.lists(st.tuples(_stage(max_replicas), more), min_size=1, max_size=max_stages))
    count = len(wanted)
    mode = draw(st.sampled_from(("", "", "pair", "companions"))) if count > 1 else ""
    pair = mode == "pair"
    stages: list[StagePlan] = []
    for index, ((final, replicas, back, feed), _) in enumerate(wanted):
        if index == 0:
            stages.append(StagePlan(final=final and not pair, replicas=replicas))
        elif pair and index == 1:
            stages.append(StagePlan(source=0, final=final, replicas=replicas))
        else:
            source = max(index - 1 - back, 1 if pair else 0)
            whole = mode == "companions" and source == 0 and feed not in ("finish", "kv")
            stages.append(StagePlan(source=source, feed="kv" if whole else feed, final=final, replicas=replicas))
    sources = {stage.source for stage in stages}
    return Plan(
        stages=tuple(
            replace(stage, final=stage.final or index not in sources, **wanted[index][1])
            for index, stage in enumerate(stages)
        ),
        requests=(),
        pair=pair,
        companions=draw(st.integers(1, 3)) if mode == "companions" else 0,
        bundle_timeout=_AMPLE,
        chunk_timeout=_AMPLE,
    )


_Feed: TypeAlias = Literal["finish", "output", "kv", "connector"]


def _stage(max_replicas: int) -> st.SearchStrategy[tuple[bool, int, int, _Feed]]:
    """Whether it is final, how many replicas it has, how far back its source is, and how it is fed."""
    feeds: tuple[_Feed, ...] = get_args(_Feed)
    return st.tuples(st.booleans(), st.integers(1, max_replicas), st.integers(0, 3), st.sampled_from(feeds))


# ---- requests


def _work() -> st.SearchStrategy[Verb]:
    verbs: tuple[Verb, ...] = (LateChunk(), KvReady(), Step(1, 2))
    return st.one_of(
        _times().map(Wait),
        st.lists(st.integers(0, 99), max_size=3).map(lambda ids: Chunk(tuple(ids))),
        st.sampled_from(verbs),
    )


_WORK: st.SearchStrategy[Script] = st.lists(_work(), max_size=4).map(tuple)
_GOOD: tuple[Verb, ...] = (Finish(), Finish("length", (7, 8)), FinishSilently())


def scripts(faults: Faults = NO_FAULTS, *, prefills: bool = False) -> st.SearchStrategy[Script]:
    """Draw what a stage does with one request.

    Args:
        faults: how it may end badly.
        prefills: whether it is a prefill's, whose good end leaves a KV cache behind.
    """
    return _scripts(faults, prefills)


@st.composite
def _scripts(draw: st.DrawFn, faults: Faults, prefills: bool) -> Script:
    body = draw(_WORK) if draw(st.integers(0, 3)) else ()
    if faults.verbs and draw(st.integers(0, 2)) == 2:
        fault = draw(st.sampled_from(faults.verbs))
        return (fault,) if isinstance(fault, Reject | DieOnSubmit) else (*body, fault)
    if prefills:
        lost = bool(faults.verbs) and draw(st.integers(0, 5)) == 5
        return (*body, Finish("length", (0,), kv=None if lost else _KV))
    return (*body, draw(st.sampled_from(_GOOD)))


def sessions(*, max_segments: int = 4) -> st.SearchStrategy[tuple[SegmentPlan, ...]]:
    """Draw the input of a session: what is said, and when the caller barges in."""
    return _sessions(max_segments)


@st.composite
def _sessions(draw: st.DrawFn, max_segments: int) -> tuple[SegmentPlan, ...]:
    segment = st.builds(
        SegmentPlan,
        st.lists(st.integers(0, 99), min_size=1, max_size=3).map(tuple),
        st.sampled_from((False, False, False, True)),
        _times(),
    )
    return tuple(draw(st.lists(segment, min_size=1, max_size=max_segments)))


def requests(pipeline: Plan, faults: Faults = NO_FAULTS) -> st.SearchStrategy[RequestPlan]:
    """Draw one request to a pipeline: when it comes, and what its caller, stages and bridges do.

    Args:
        pipeline: a plan, whose requests are not looked at.
        faults: what may go wrong. About half of the requests are clean whatever that is.
    """
    return _requests(pipeline, faults)


@st.composite
def _requests(draw: st.DrawFn, pipeline: Plan, faults: Faults) -> RequestPlan:
    if faults.level != "none" and not draw(st.booleans()):
        faults = NO_FAULTS
    arrival = draw(_times())
    act: CallerAct = draw(st.sampled_from(("wait", *faults.acts)))
    when = draw(_times()) if act != "wait" else 0.0
    if _takes_sessions(pipeline) and draw(st.booleans()):
        asked = RequestPlan(
            arrival=arrival,
            act=act,
            when=when,
            segments=draw(sessions()),
            close=faults.level == "none" or draw(st.integers(0, 3)) < 3,
            bridges=_bridges(draw, pipeline, faults),
        )
    else:
        asked = RequestPlan(
            arrival=arrival,
            act=act,
            when=when,
            scripts=tuple(
                draw(scripts(faults, prefills=pipeline.pair and index == 0)) for index in range(len(pipeline.stages))
            ),
            companions=tuple(draw(scripts(faults)) for _ in range(pipeline.companions)),
            bridges=_bridges(draw, pipeline, faults),
        )
    return asked


def _has_connectors(pipeline: Plan) -> bool:
    return any(stage.feed == "connector" for stage in pipeline.stages)


def _takes_sessions(pipeline: Plan) -> bool:
    return not (pipeline.pair or pipeline.companions or any(stage.feed == "kv" for stage in pipeline.stages))


def _bridges(draw: st.DrawFn, pipeline: Plan, faults: Faults) -> tuple[BridgeAct, ...]:
    if not faults.bridges:
        return ()
    acts = st.sampled_from(("pass", "pass", *faults.bridges))
    return tuple(draw(acts) for _ in pipeline.stages)


def _patient(plan: Plan, request: int) -> RequestPlan:
    """The request, with a caller who does not wait for ever for what never comes."""
    asked = plan.requests[request]
    if asked.act in ("leave", "deadline", "stop reading") or permitted(plan, request).must_end:
        return asked
    if asked.act == "abort":  # at once it might come before the request
        return replace(asked, when=max(asked.when, 0.5))
    return replace(asked, act="leave", when=asked.when or 20.0)


# ---- what comes from outside


def operator_plans(
    pipeline: Plan, acts: Sequence[str] = ("pause", "sleep", "kill"), *, max_acts: int = 3
) -> st.SearchStrategy[tuple[OperatorAct, ...]]:
    """Draw what operators do; whatever they close, they open again."""
    return _operator_plans(pipeline, acts, max_acts)


@st.composite
def _operator_plans(
    draw: st.DrawFn,
    pipeline: Plan,
    acts: Sequence[str],
    max_acts: int,
) -> tuple[OperatorAct, ...]:
    made: list[OperatorAct] = []
    for _ in range(draw(st.integers(0, max_acts)) if acts else 0):
        at, act = draw(_times()), draw(st.sampled_from(acts))
        if act == "kill":
            stage = draw(st.integers(0, len(pipeline.stages) - 1))
            replica = draw(st.integers(0, pipeline.stages[stage].replicas - 1))
            made.append(OperatorAct(at=at, act="kill", stage=stage, replica=replica))
            continue
        until = at + draw(_times())
        if act == "pause":
            made.append(OperatorAct(at=at, act="pause", mode=draw(st.sampled_from(("wait", "abort", "keep")))))
        else:
            made.append(OperatorAct(at=at, act="sleep", mode=draw(st.sampled_from(("wait", "abort")))))
            made.append(OperatorAct(at=until, act="wake"))
        made.append(OperatorAct(at=until, act="resume"))
    if any(one.act in ("pause", "sleep") for one in made):
        made += [OperatorAct(at=_NO_END, act="wake"), OperatorAct(at=_NO_END + 1, act="resume")]
    return tuple(made)


def simulations(
    pipeline: Plan | None = None, *, faults: Level | Faults = "heavy", min_requests: int = 1, max_requests: int = 4
) -> st.SearchStrategy[Plan]:
    """Draw a whole simulation, for `omni_trio.testing.run_simulation`.

    Args:
        pipeline: a plan whose requests and operators are replaced; None: any pipeline.
        faults: what may go wrong, or how much of it is drawn.
        min_requests: requests at least.
        max_requests: requests at most.
    """
    return _simulations(pipeline, faults, min_requests, max_requests)


@st.composite
def _simulations(
    draw: st.DrawFn,
    pipeline: Plan | None,
    faults: Level | Faults,
    min_requests: int,
    max_requests: int,
) -> Plan:
    allowed = draw(fault_plans(faults)) if isinstance(faults, str) else faults
    more = _disturbances(allowed)
    if pipeline is None:
        plan = draw(_pipelines(5, 3, more))
    else:
        plan = replace(pipeline, stages=tuple(replace(stage, **draw(more)) for stage in pipeline.stages))
    if pipeline is None and allowed.level != "none":
        plan = replace(
            plan,
            bundle_timeout=draw(st.sampled_from((_AMPLE, 3.0))) if plan.companions else _AMPLE,
            chunk_timeout=draw(st.sampled_from((_AMPLE, 4.0))) if _has_connectors(plan) else _AMPLE,
        )
    count = draw(st.integers(min_requests, max_requests))
    plan = replace(
        plan,
        requests=tuple(draw(requests(plan, allowed)) for _ in range(count)),
        operator=draw(operator_plans(plan, allowed.operator)) if allowed.operator else (),
        on_engine_death="fail_stop" if allowed.fail_stop else "isolate",
        max_in_flight=draw(st.integers(1, 3)) if allowed.limits else plan.max_in_flight,
        end=draw(st.sampled_from((3.0, 0.5, 8.0))) if allowed.close and draw(st.booleans()) else None,
        buggify=draw(st.sampled_from((0.0, 0.0, 0.0, 0.2))) if allowed.level == "heavy" else 0.0,
        seed=draw(schedules()),
    )
    if plan.end is not None:
        return plan
    return replace(plan, requests=tuple(_patient(plan, index) for index in range(count)))


@st.composite
def _disturbances(draw: st.DrawFn, faults: Faults) -> dict[str, Any]:
    """Draw what a stage is like beside its place in the pipeline."""
    made: dict[str, Any] = {"capacity": draw(st.sampled_from((1000, 2, 1)))}
    if faults.level != "none":
        made["submit_time"] = draw(st.sampled_from((0.0, 0.0, 0.0, 0.5)))
        made["close_time"] = draw(st.sampled_from((0.0, 0.0, 2.0)))
    wrong = draw(st.sampled_from(("", *faults.stages))) if faults.stages else ""
    if wrong == "slow abort":
        made["abort_time"] = draw(_times())
    elif wrong == "no abort":
        made["abort_time"] = 30.0
    elif wrong:
        made["abort_error"] = "simulated refusal to abort"
    return made
