"""What a simulation does, as data: frozen, printed as the call that makes it again, and JSON in both directions."""

from __future__ import annotations

import math
from typing import Literal, TypeAlias

import msgspec

from .script import Script, is_sound

__all__ = ["BridgeAct", "CallerAct", "OperatorAct", "Plan", "RequestPlan", "SegmentPlan", "StagePlan", "load_plan"]

CallerAct: TypeAlias = Literal["wait", "leave", "abort", "deadline", "slow", "stop reading"]
"""What the caller of a request does: waits for the end; leaves its block after `RequestPlan.when`; has it aborted by
somebody else after `when`; gives it `when` seconds; takes `when` seconds over each event; or reads nothing at all and
leaves after `when`."""

BridgeAct: TypeAlias = Literal["pass", "raise", "nothing"]


class _Shown(msgspec.Struct, frozen=True):
    """Data that is printed as the call that makes it again, without what that call can leave out."""

    def __repr__(self) -> str:
        fields = msgspec.structs.fields(self)
        given = [(one.name, getattr(self, one.name)) for one in fields if getattr(self, one.name) != one.default]
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in given)})"


class StagePlan(_Shown, frozen=True, kw_only=True):
    """One simulated stage. Stage 0 is fed by the prompt."""

    source: int | None = None
    feed: Literal["finish", "output", "kv", "connector"] = "finish"
    final: bool = False
    replicas: int = 1
    capacity: int = 1000
    """Requests that a replica works on at the same time."""
    submit_time: float = 0.0
    abort_time: float = 0.0
    """Seconds until an abort is acknowledged."""
    abort_error: str | None = None
    start_time: float = 0.0
    close_time: float = 0.0


class SegmentPlan(_Shown, frozen=True):
    """One piece of a session's input."""

    tokens: tuple[int, ...]
    barge_in: bool = False
    after: float = 0.0
    """Seconds to wait before it is sent."""


class RequestPlan(_Shown, frozen=True, kw_only=True):
    """One request: when it comes, what its caller does, and what the stages and bridges do with it."""

    arrival: float = 0.0
    act: CallerAct = "wait"
    when: float = 0.0
    prompt: tuple[int, ...] = (1, 2)
    segments: tuple[SegmentPlan, ...] | None = None
    """Not None: a session. Its stages repeat what they are given, and no script is played."""
    close: bool = True
    """Whether a session is closed after its last segment."""
    scripts: tuple[Script, ...] = ()
    """One per stage."""
    companions: tuple[Script, ...] = ()
    """One per companion, at the first stage."""
    bridges: tuple[BridgeAct, ...] = ()
    """One per stage: what the bridge in front of it does; that of the first stage is ignored."""
    pace: float = 0.0
    """Seconds that the caller takes over each event, whatever else it does."""

    @property
    def is_clean(self) -> bool:
        """Whether neither the caller nor any script or bridge does anything but its work."""
        return (
            self.act == "wait"
            and (self.segments is None or self.close)
            and all(act == "pass" for act in self.bridges)
            and all(is_sound(script) for script in (*self.scripts, *self.companions))
        )


class OperatorAct(_Shown, frozen=True, kw_only=True):
    """What somebody who runs the pipeline does at some moment."""

    at: float
    act: Literal["pause", "resume", "sleep", "wake", "kill"]
    mode: Literal["wait", "abort", "keep"] = "wait"
    stage: int = 0
    replica: int = 0


class Plan(_Shown, frozen=True, kw_only=True):
    """One whole simulation. Equal plans give equal traces."""

    stages: tuple[StagePlan, ...]
    requests: tuple[RequestPlan, ...]
    operator: tuple[OperatorAct, ...] = ()
    pair: bool = False
    """Whether the first two stages are a prefill/decode pair."""
    companions: int = 0
    """How many companions each request has."""
    bundle_timeout: float = 60.0
    chunk_timeout: float = 120.0
    on_engine_death: Literal["fail_stop", "isolate"] = "isolate"
    max_in_flight: int = 10_000
    abort_timeout: float = 10.0
    end: float | None = None
    """When the runtime is closed, whatever is in flight. None: when all callers are done."""
    seed: int = 0
    """Of trio's scheduler: which of the tasks that could run runs first."""
    buggify: float = 0.0
    """Probability that a task of the runtime is held up at one of its named points, each time that it passes one."""

    def path(self, stage: int) -> tuple[int, ...]:
        """The stages from the first one to `stage`, both included."""
        way = [stage]
        while (source := self.stages[way[-1]].source) is not None:
            way.append(source)
        return tuple(reversed(way))

    @property
    def horizon(self) -> float:
        """Virtual seconds after which a simulation of it can only hang."""
        return 1e6 if self.end is None else self.end + 1e6

    def to_json(self) -> str:
        """Return the plan as text that `load_plan` reads."""
        return msgspec.json.format(msgspec.json.encode(self, enc_hook=None)).decode()


def load_plan(text: str | bytes) -> Plan:
    """Read what `Plan.to_json` wrote.

    Raises:
        msgspec.ValidationError: it is no plan; it says where.
    """
    return msgspec.json.decode(text, type=Plan)


NEVER = math.inf
