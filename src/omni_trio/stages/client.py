"""The interface between the runtime and one replica: what a user writes to bring an own engine."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol, TypeAlias, runtime_checkable

import attrs
import msgspec

from omni_trio.messages import StageOutput, StageRequest
from omni_trio.pipeline import StageSpec

__all__ = ["ClientFactory", "ClientStatistics", "Operable", "ReleasesKv", "ReplicaContext", "SendsKv", "StageClient"]


class ClientStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """What a replica says of itself. -1 where it does not tell."""

    running: int = -1
    """Requests that it computes on."""
    waiting: int = -1
    """Requests that it has accepted and not begun."""
    pid: int = -1
    """The replica's process."""
    extra: Mapping[str, Any] = {}


@attrs.frozen(kw_only=True)
class ReplicaContext:
    """What a client factory is told about the replica that it shall open."""

    stage: StageSpec
    stage_id: int
    replica_id: int
    want_text: bool
    """Whether anybody reads this stage's text."""
    report: Callable[[str], None]
    """Call it with the name of each phase of start-up (``spawn``, ``load``, ``ready``); must be on the trio thread."""
    close_timeout: float
    """Seconds that closing may take in all; the polite part has to be over well before."""


@runtime_checkable
class StageClient(Protocol):
    """One open replica. All methods are called from one trio run; `receive` from one task only.

    Opened by a `ClientFactory`'s context manager, whose exit lets go of everything within
    `ReplicaContext.close_timeout`, even when cancelled.
    """

    def resolve_params(self, params: Any) -> Any:
        """Check a caller's parameters for this stage and merge them with the stage's defaults.

        Synchronous and cheap: it is called at admission, for every stage, before any stage is touched.

        Args:
            params: what the caller gave for this stage (a mapping, or an object of the engine's own class),
                or None for the defaults.

        Returns:
            What `StageRequest.params` will carry. It is shared between requests and never changed.

        Raises:
            InvalidRequest: a parameter is unknown, of the wrong type or of another kind of stage.
        """
        ...

    async def submit(self, request: StageRequest) -> None:
        """Hand over a new request. When it returns, the replica has it or will fail it through `receive`.

        When it raises or is cancelled, the replica does not have the request.

        Raises:
            InvalidRequest: the input can not be used (too long, empty, of the wrong form).
            EngineDied: the replica is dead.
        """
        ...

    async def update(self, request: StageRequest) -> None:
        """Hand over more input of a request that was submitted with ``last=False``.

        The closing update of a session has ``last=True`` and an empty input: what is not worked off yet becomes the
        end, and a stage that has worked off everything ends the request with an output that carries nothing else.

        Ignored for a request that the replica does not know: a stage may end a request before it has all of its
        input, and this may cross with its last output.

        Raises:
            InvalidRequest: as for `submit`, or the stage takes no updates.
            EngineDied: the replica is dead.
        """
        ...

    async def abort(self, request_ids: Sequence[str]) -> None:
        """Make the replica let go of requests. Ids that it does not know are ignored.

        When it returns, the replica no longer works on them and no output of theirs will come out of `receive`.

        Raises:
            EngineDied: the replica is dead (and so holds nothing).
        """
        ...

    async def receive(self) -> Sequence[StageOutput]:
        """Wait for the next step's outputs: at least one, each request's in the order they were made.

        Being cancelled loses nothing: what was not returned comes out of the next call.

        Raises:
            EngineDied: the replica is dead; it says why. Every later call raises it too.
        """
        ...

    async def call(self, method: str, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        """Call a method of the engine or worker itself (collective RPC) and return its result.

        Raises:
            StageFailed: the method raised, or there is none.
            EngineDied: the replica is dead, or died before it answered.
        """
        ...

    def statistics(self) -> ClientStatistics:
        """Return what the replica last said of itself."""
        ...


@runtime_checkable
class Operable(Protocol):
    """A `StageClient` that says which methods for operators its engine has."""

    @property
    def methods(self) -> Collection[str]:
        """Names that `call` knows and that mean what they do for a vLLM engine: ``sleep``, ``pause_scheduler``, ...

        A client that has ``pause_scheduler`` answers it, for ``mode="wait"``, once its engine has nothing at work.
        """
        ...


@runtime_checkable
class ReleasesKv(Protocol):
    """A `StageClient` whose engine can decode what another one has prefilled."""

    async def release_kv(self, request: StageRequest) -> None:
        """Make the prefill engine let go of a KV cache that it holds for this stage, without decoding.

        Called in place of `submit`, at most once per request, where the request ends in between.

        Args:
            request: as `submit` would have got it; its `kv_transfer` says what is held.

        Raises:
            EngineDied: the replica is dead.
        """
        ...


@runtime_checkable
class SendsKv(Protocol):
    """A `StageClient` whose engine offers KV caches to later stages."""

    def kv_sender_info(self) -> Mapping[str, Any] | None:
        """Return where a later stage can get at a KV cache (``host``, ``zmq_port``), or None where there is none."""
        ...


ClientFactory: TypeAlias = Callable[[ReplicaContext], AbstractAsyncContextManager[StageClient]]
"""Opens one replica. Entering is its start-up: cancellable, and it raises `StartupFailed` with the phase."""
