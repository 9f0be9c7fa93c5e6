"""A stage whose engine is a script on trio's clock: the same `StageClient` as the real ones, without a process."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, TypeAlias

import attrs
import trio

from omni_trio.errors import ConfigError, EngineDied, InvalidRequest, StageFailed
from omni_trio.messages import StageInput, StageOutput, StageRequest
from omni_trio.pipeline import nearest
from omni_trio.stages import ClientStatistics, ReplicaContext, StageClient

from .script import (
    Chunk,
    Die,
    DieOnSubmit,
    Duplicate,
    Error,
    Finish,
    FinishSilently,
    KvReady,
    LateChunk,
    Reject,
    Script,
    Step,
    Wait,
    tokens,
)

__all__ = ["SimStage", "Watch"]

Watch: TypeAlias = Callable[..., None]
"""Is told what a simulated replica is asked and says: ``watch(what, context, request_id, **facts)``."""

_PARAMS = ("max_tokens", "temperature", "seed")

_NOTHING = StageInput()


@attrs.frozen(kw_only=True)
class SimStage:
    """A `ClientFactory` for simulated replicas.

    As a stage of kind ``simulated`` in a pipeline file, its options are these fields, except for `script`. With no
    script of its own every request gets ``max_tokens`` (a sampling parameter) or else `tokens` tokens. Their ids
    depend on the prompt alone, so that a pipeline's output can be predicted.
    """

    script: Callable[[StageRequest], Script] | None = None
    """Says what happens to a request. Called once per input: at the submission and at each update."""
    tokens: int = 8
    token_time: float = 0.0
    """Seconds per token."""
    prefill_time: float = 0.0
    """Seconds before the first token."""
    capacity: int = 1_000_000
    """Requests that one replica works on at the same time; the others wait, first come first served."""
    submit_time: float = 0.0
    """Seconds that a submission takes."""
    abort_time: float = 0.0
    """Seconds until an abort is acknowledged; ``math.inf``: never."""
    abort_error: str | None = None
    """Makes every abort raise `StageFailed` with this text."""
    start_time: float = 0.0
    start_error: str | None = None
    """Makes start-up fail with this text, after `start_time`."""
    close_time: float = 0.0
    """Seconds that closing takes; the replica is cut off after `ReplicaContext.close_timeout`."""
    max_prompt_tokens: int = 1_000_000
    kv_sender: Mapping[str, Any] | None = None
    """Where later stages are told to get KV caches of this one."""
    log: list[tuple[Any, ...]] | None = attrs.field(factory=list, repr=False, eq=False)
    """What the replicas were asked, in order: ``("submit", stage, replica, request id)`` and so on. It grows with every
    request; None keeps nothing, which is how a stage of a pipeline file has it."""

    watch: Watch | None = attrs.field(default=None, repr=False, eq=False)
    """Is told everything, for traces (see `omni_trio.testing.run_simulation`)."""

    @classmethod
    def from_options(cls, options: Mapping[str, Any], *, stage: str) -> SimStage:
        """Make one from a pipeline file's options.

        Raises:
            ConfigError: an option is unknown, of the wrong type or out of range.
        """
        known = {field.name for field in attrs.fields(cls)} - {"script", "kv_sender", "log", "watch"}
        for key, value in options.items():
            where = f"stages.{stage}.options.{key}"
            if key not in known:
                raise ConfigError(
                    f"unknown option{nearest(key, known)} (options: {', '.join(sorted(known))})", key=where
                )
            if (wanted := _unmet(key, value)) is not None:
                raise ConfigError(f"expected {wanted}, not {value!r}", key=where)
        return cls(**options, log=None)

    @asynccontextmanager
    async def __call__(self, context: ReplicaContext) -> AsyncIterator[StageClient]:
        """Open one replica."""
        context.report("spawn")
        await trio.sleep(self.start_time)
        if self.start_error is not None:
            raise RuntimeError(self.start_error)
        context.report("ready")
        async with trio.open_nursery() as nursery:
            client = _SimClient(self, context, nursery)
            client.tell("up")
            try:
                yield client
            finally:
                client.tell("down")
                client.close()
                with trio.move_on_after(context.close_timeout, shield=True):
                    await trio.sleep(self.close_time)
                nursery.cancel_scope.cancel("the simulated replica closes")


def _unmet(key: str, value: Any) -> str | None:
    """Return what an option has to be, where its value is not that."""
    if key.endswith("_error"):
        return None if isinstance(value, str) else "a text"
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if key.endswith("_time"):
        # So written, it catches nan as well; inf is for ever.
        return None if is_number and value >= 0 else "a number of seconds from 0 up"
    return None if is_number and isinstance(value, int) and value >= 1 else "a whole number from 1 up"


class _Work:
    """One request at one simulated replica."""

    def __init__(self) -> None:
        self.scope = trio.CancelScope()
        self.scripts: deque[tuple[Script, StageRequest]] = deque()
        self.more = trio.Event()
        self.late: tuple[int, ...] | None = None
        self.running = False
        self.over = False


class _SimClient:
    def __init__(self, stage: SimStage, context: ReplicaContext, nursery: trio.Nursery) -> None:
        self._stage = stage
        self._context = context
        self._nursery = nursery
        self._work: dict[str, _Work] = {}
        self._slots = trio.CapacityLimiter(stage.capacity)
        self._outputs: list[StageOutput] = []
        self._news = trio.Event()
        self._death: EngineDied | None = None
        self._last_said: StageOutput | None = None
        # A dict, not a set: the order in which scopes are cancelled must not depend on where they lie in memory.
        self._calls: dict[trio.CancelScope, None] = {}
        self._asleep: frozenset[str] = frozenset()
        """What of its memory is given up."""
        self._paused: str | None = None
        """The mode in which the scheduler is paused."""
        self._changed = trio.Event()
        """Replaced whenever the scheduler is resumed or a request is let go of."""

    # ---- StageClient

    def resolve_params(self, params: Any) -> Any:
        merged = dict(self._context.stage.sampling)
        if params is not None:
            if not isinstance(params, Mapping):
                raise InvalidRequest(f"a simulated stage takes a mapping of parameters, not {type(params).__name__}")
            merged.update(params)
        for key in merged:
            if key not in _PARAMS:
                raise InvalidRequest(f"unknown sampling parameter {key!r}{nearest(key, _PARAMS)}")
        limit = merged.get("max_tokens", 1)
        if isinstance(limit, bool) or not isinstance(limit, int) or limit < 1:
            raise InvalidRequest(f"max_tokens must be a whole number from 1 up, not {limit!r}")
        return merged

    async def submit(self, request: StageRequest) -> None:
        self._check_alive()
        self._note("submit", request.request_id)
        if self._asleep:
            raise StageFailed("it is asleep")
        script = self._script(request)
        if self._stage.submit_time:
            await trio.sleep(self._stage.submit_time)
        else:
            await trio.lowlevel.checkpoint()
        if script and isinstance(script[0], Reject):
            raise InvalidRequest(script[0].message)
        if script and isinstance(script[0], DieOnSubmit):
            self.die(script[0])
        self._check_alive()
        work = self._work[request.request_id] = _Work()
        work.scripts.append((script, request))
        self._tell_input("submit", request, count=len(self._work))
        self._nursery.start_soon(self._run, request.request_id, work)

    async def update(self, request: StageRequest) -> None:
        self._check_alive()
        self._note("update", request.request_id)
        await trio.lowlevel.checkpoint()
        work = self._work.get(request.request_id)
        if work is None:
            return
        work.scripts.append((self._script(request), request))
        self._tell_input("update", request)
        work.more.set()

    async def abort(self, request_ids: Sequence[str]) -> None:
        self._check_alive()
        self._note("abort", *request_ids)
        for request_id in request_ids:
            self.tell("abort", request_id)
        if self._stage.abort_error is not None:
            await trio.lowlevel.checkpoint()
            raise StageFailed(self._stage.abort_error)
        for request_id in request_ids:
            work = self._work.get(request_id)
            if work is not None:
                work.scope.cancel("aborted")
                if work.late is not None and not work.over:
                    self._put(StageOutput(request_id=request_id, token_ids=work.late))
        if self._stage.abort_time == math.inf:
            await trio.sleep_forever()
        await trio.sleep(self._stage.abort_time)
        for request_id in request_ids:
            if (work := self._work.pop(request_id, None)) is not None:
                work.scope.cancel("aborted")  # it may have come since: an abort can cross with a submission
            self.tell("aborted", request_id, count=len(self._work))
        self._note_change()
        self._outputs = [output for output in self._outputs if output.request_id not in request_ids]

    async def receive(self) -> Sequence[StageOutput]:
        await trio.lowlevel.checkpoint()
        while not self._outputs:
            if self._death is not None:
                raise self._death
            self._news = trio.Event()
            await self._news.wait()
        outputs, self._outputs = self._outputs, []
        if self._stage.watch is not None:
            for output in outputs:
                self._tell_output(output)
        return outputs

    async def call(self, method: str, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        self._check_alive()
        self._note("call", method, tuple(args), dict(kwargs or {}))
        if (function := _METHODS.get(method)) is None:
            await trio.lowlevel.checkpoint()
            raise StageFailed(f"a simulated stage has no {method!r}{nearest(method, _METHODS)}")
        with trio.CancelScope() as scope:  # cancelled when the replica dies
            self._calls[scope] = None
            try:
                await trio.lowlevel.checkpoint()
                return await function(self, *args, **(kwargs or {}))
            except TypeError as error:
                raise StageFailed(f"{method!r}: {error}") from error
            finally:
                del self._calls[scope]
        assert self._death is not None  # nothing else cancels the scope
        raise self._death

    @property
    def methods(self) -> Collection[str]:
        return _METHODS.keys()

    async def echo(self, *args: Any) -> list[Any]:
        return list(args)

    async def wait(self, seconds: float) -> None:
        await trio.sleep(seconds)

    async def pause_scheduler(self, mode: str = "abort", *, clear_cache: bool = True) -> None:
        self._paused = mode
        while mode != "keep" and self._work:
            await self._changed.wait()

    async def resume_scheduler(self) -> None:
        self._paused = None
        self._note_change()

    async def sleep(self, level: int = 1) -> None:
        self._asleep = frozenset(("weights", "kv_cache"))

    async def wake_up(self, tags: Sequence[str] | None = None) -> bool:
        self._asleep -= self._asleep if tags is None else frozenset(tags)
        if not self._asleep:
            await self.resume_scheduler()
        return not self._asleep

    async def is_sleeping(self) -> bool:
        return bool(self._asleep or self._paused)

    async def is_scheduler_paused(self) -> bool:
        return self._paused is not None

    async def release_kv(self, request: StageRequest) -> None:
        self._check_alive()
        self._note("release_kv", request.request_id)
        self.tell("release_kv", request.request_id)
        await trio.lowlevel.checkpoint()

    def kv_sender_info(self) -> Mapping[str, Any] | None:
        return self._stage.kv_sender

    def statistics(self) -> ClientStatistics:
        running = sum(1 for work in self._work.values() if work.running)
        return ClientStatistics(running=running, waiting=len(self._work) - running)

    # ---- the engine

    def close(self) -> None:
        if self._death is None:
            self._death = EngineDied("the replica is closed", exit_code=0)
        self._end_calls()
        self._news.set()

    def _end_calls(self) -> None:
        for scope in self._calls:
            scope.cancel("the simulated replica is dead")

    def _note_change(self) -> None:
        self._changed.set()
        self._changed = trio.Event()

    def _script(self, request: StageRequest) -> Script:
        if self._stage.script is not None:
            return self._stage.script(request)
        if request.last and request.input == _NOTHING:
            return (Finish(),)  # the closing update of a session: nothing is left to do
        if request.kv_transfer is not None and request.kv_transfer.role == "prefill":
            return (Wait(self._stage.prefill_time), Finish("length", (0,), kv=_kv_of(request)))
        size = len(request.input.token_ids or ()) or len((request.input.text or "").split())
        if size > self._stage.max_prompt_tokens:
            raise InvalidRequest(f"the prompt has {size} tokens; the stage takes {self._stage.max_prompt_tokens}")
        count = (request.params or {}).get("max_tokens", self._stage.tokens)
        return tokens(count, first=size, each=self._stage.token_time, prefill=self._stage.prefill_time)

    async def _run(self, request_id: str, work: _Work) -> None:
        with work.scope:
            async with self._slots:
                work.running = True
                try:
                    await self._play_all(request_id, work)
                finally:
                    work.running = False
        if work.over:
            self._work.pop(request_id, None)
            self._note_change()

    async def _play_all(self, request_id: str, work: _Work) -> None:
        while True:
            while not work.scripts:
                work.more = trio.Event()
                await work.more.wait()
            script, request = work.scripts.popleft()
            await self._play(request_id, work, script, request)
            if work.over:
                return
            if request.last:
                await trio.sleep_forever()

    async def _play(self, request_id: str, work: _Work, script: Script, request: StageRequest) -> None:
        last = request.last
        for verb in script:
            while self._paused == "keep":
                await self._changed.wait()
            if isinstance(verb, Wait):
                await trio.sleep(verb.seconds)
            elif isinstance(verb, Chunk):
                await trio.lowlevel.checkpoint()
                self._put(_chunk(request_id, verb))
            elif isinstance(verb, KvReady | Step):
                await trio.lowlevel.checkpoint()
                self._put(_notice(request_id, verb))
            elif not last and (isinstance(verb, Finish) or (isinstance(verb, FinishSilently) and request.segment_end)):
                # The piece is done, the request is not: its tokens come, its end waits for the last piece.
                await trio.lowlevel.checkpoint()
                token_ids = verb.token_ids if isinstance(verb, Finish) else ()
                if token_ids or request.segment_end:
                    self._put(_chunk(request_id, Chunk(token_ids), segment_end=request.segment_end))
                return
            elif isinstance(verb, Finish | FinishSilently | Error):
                await trio.lowlevel.checkpoint()
                work.over = True
                self._put(_last(request_id, verb))
                return
            elif isinstance(verb, Duplicate):
                await trio.lowlevel.checkpoint()
                if self._last_said is not None:
                    self._put(self._last_said)
            elif isinstance(verb, Die):
                await trio.lowlevel.checkpoint()
                self.die(verb)
            elif isinstance(verb, LateChunk):
                work.late = verb.token_ids
            else:
                await trio.sleep_forever()

    def die(self, verb: Die | DieOnSubmit) -> None:
        """The replica dies, now."""
        if self._death is not None:
            return
        self.tell("dies", text=verb.message)
        stage = self._context.stage.name
        self._death = EngineDied(
            verb.message,
            stage=stage,
            stage_id=self._context.stage_id,
            replica_id=self._context.replica_id,
            exit_code=verb.exit_code,
        )
        self._outputs.clear()
        self._end_calls()
        self._news.set()
        for work in self._work.values():
            work.scope.cancel("the simulated replica died")
        self._work.clear()

    def _put(self, output: StageOutput) -> None:
        self._outputs.append(output)
        self._last_said = output
        self._news.set()

    def tell(self, what: str, request_id: str = "", **facts: Any) -> None:
        if self._stage.watch is not None:
            self._stage.watch(what, self._context, request_id, **facts)

    def _tell_input(self, what: str, request: StageRequest, **facts: Any) -> None:
        if self._stage.watch is not None:
            tokens = tuple(request.input.token_ids or ())
            self.tell(what, request.request_id, tokens=tokens, last=request.last, **facts)

    def _tell_output(self, output: StageOutput) -> None:
        ready = output.kv_transfer_params is not None and output.kv_ready
        self.tell(
            "says",
            output.request_id,
            tokens=tuple(output.token_ids),
            last=output.finished,
            detail="error" if output.error is not None else output.finish_reason or ("kv ready" if ready else ""),
            text=output.error or "",
        )

    def _check_alive(self) -> None:
        if self._death is not None:
            raise self._death

    def _note(self, what: str, *details: Any) -> None:
        if self._stage.log is not None:
            self._stage.log.append((what, self._context.stage.name, self._context.replica_id, *details))


_METHODS: Mapping[str, Callable[..., Awaitable[Any]]] = {
    method.__name__: method
    for method in (
        _SimClient.echo,
        _SimClient.wait,
        _SimClient.pause_scheduler,
        _SimClient.resume_scheduler,
        _SimClient.is_scheduler_paused,
        _SimClient.sleep,
        _SimClient.wake_up,
        _SimClient.is_sleeping,
    )
}
"""What can be called in a simulated engine: what a vLLM engine has by these names, and two more."""


def _words(token_ids: Sequence[int]) -> str:
    return "".join(f"w{token} " for token in token_ids)


def _chunk(request_id: str, verb: Chunk, *, segment_end: bool = False) -> StageOutput:
    text = _words(verb.token_ids) if verb.text is None else verb.text
    return StageOutput(
        request_id=request_id, token_ids=verb.token_ids, text=text, data=verb.data, segment_end=segment_end
    )


def _notice(request_id: str, verb: KvReady | Step) -> StageOutput:
    if isinstance(verb, Step):
        return StageOutput(request_id=request_id, progress=(verb.step, verb.total))
    return StageOutput(request_id=request_id, kv_transfer_params={"kv_ready": True})


def _last(request_id: str, verb: Finish | FinishSilently | Error) -> StageOutput:
    if isinstance(verb, Error):
        return StageOutput(request_id=request_id, error=verb.message)
    if isinstance(verb, FinishSilently):
        return StageOutput(request_id=request_id, finish_reason=verb.reason)
    return StageOutput(
        request_id=request_id,
        token_ids=verb.token_ids,
        text=_words(verb.token_ids),
        finish_reason=verb.reason,
        kv_transfer_params=verb.kv,
    )


def _kv_of(request: StageRequest) -> Mapping[str, Any]:
    return {"do_remote_prefill": True, "do_remote_decode": False, "remote_request_id": request.request_id}
