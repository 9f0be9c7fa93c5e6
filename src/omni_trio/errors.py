"""Every error that a user of omni_trio can meet.

One small tree, by whose fault it is:

* the caller's: `ConfigError`, `InvalidRequest`;
* the load's: `Overloaded`, `NoReplicaAvailable`, `DeadlineExceeded`;
* the operator's: `Paused`, `OperationFailed`;
* a stage's: `StageFailed`, `BridgeFailed`, `StartupFailed`, `EngineDied`, `ReplicaLost`;
* the end of something: `RequestAborted`, `SessionClosed`, `ShutDown`.

Every error about a request says which request, stage and replica it is about, carries its cause as
``__cause__`` and says in its text what to do. Unless a class says otherwise, the runtime and all other
requests go on after it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, final

__all__ = [
    "BridgeFailed",
    "ConfigError",
    "DeadlineExceeded",
    "EngineDied",
    "InvalidRequest",
    "NoReplicaAvailable",
    "OmniTrioError",
    "OperationFailed",
    "Overloaded",
    "Paused",
    "ReplicaLost",
    "RequestAborted",
    "RequestError",
    "SessionClosed",
    "ShutDown",
    "StageFailed",
    "StartupFailed",
]


class OmniTrioError(Exception):
    """The root of all errors that this package raises on purpose."""


@final
class ConfigError(OmniTrioError):
    """A pipeline description is wrong; nothing was started.

    Attributes:
        file: path of the file as it was given, or None for a pipeline built in Python.
        line: 1-based line in that file, or None where it is not known.
        key: dotted path of the offending key, such as ``stages.talker.replicas``.
    """

    def __init__(
        self, message: str, *, file: str | None = None, line: int | None = None, key: str | None = None
    ) -> None:
        self.message = message
        self.file = file
        self.line = line
        self.key = key
        place = ":".join(str(part) for part in (file, line) if part is not None)
        where = ": ".join(part for part in (place, key) if part)
        super().__init__(f"{where}: {message}" if where else message)


class RequestError(OmniTrioError):
    """A request did not end well. Base class; the runtime raises one of its subclasses.

    Attributes:
        request_id: the id under which the caller knows the request, or None before it got one.
        stage: name of the stage concerned, or None where no single stage is.
        stage_id: index of that stage in the pipeline.
        replica_id: index of the replica concerned within its stage.
    """

    def __init__(
        self,
        message: str,
        *,
        request_id: str | None = None,
        stage: str | None = None,
        stage_id: int | None = None,
        replica_id: int | None = None,
    ) -> None:
        self.message = message
        self.request_id = request_id
        self.stage = stage
        self.stage_id = stage_id
        self.replica_id = replica_id
        super().__init__(message)

    def __str__(self) -> str:
        where = []
        if self.request_id is not None:
            where.append(f"request {self.request_id!r}")
        if self.stage is not None:
            replica = "" if self.replica_id is None else f", replica {self.replica_id}"
            where.append(f"stage {self.stage!r}{replica}")
        return f"{', '.join(where)}: {self.message}" if where else self.message


@final
class InvalidRequest(RequestError):
    """The request can not be served as it was given; no later stage has seen it. Change it and ask again."""


@final
class Overloaded(RequestError):
    """The runtime has as many requests in flight as it may. Ask again later.

    Attributes:
        retry_after: seconds after which asking again makes sense, or None where nothing is known.
    """

    def __init__(self, message: str, *, retry_after: float | None = None, request_id: str | None = None) -> None:
        self.retry_after = retry_after
        super().__init__(message, request_id=request_id)


@final
class Paused(RequestError):
    """The runtime is paused and refuses what comes meanwhile. Ask again later.

    Attributes:
        retry_after: seconds after which asking again makes sense, as whoever paused it said, or None.
    """

    def __init__(self, message: str, *, retry_after: float | None = None, request_id: str | None = None) -> None:
        self.retry_after = retry_after
        super().__init__(message, request_id=request_id)


@final
class NoReplicaAvailable(RequestError):
    """No replica of a stage can take the request."""


@final
class SessionClosed(RequestError):
    """More input was sent to a session that takes none any more: it was closed, or has ended. Open a new one."""


@final
class StageFailed(RequestError):
    """A stage reported that it can not go on with this request."""


@final
class BridgeFailed(RequestError):
    """The function that turns one stage's output into the next one's input raised, or returned nothing."""


@final
class DeadlineExceeded(RequestError):
    """The request's deadline passed, or it waited too long for a chunk or a companion. Every stage has been told."""


@final
class RequestAborted(RequestError):
    """Somebody aborted the request while its consumer was still reading.

    Attributes:
        partial: where the abort asked to keep it, the `omni_trio.Result` of what the final-output stages had made and
            the consumer had not taken yet; else None.
    """

    def __init__(self, message: str, *, request_id: str | None = None, partial: Any = None) -> None:
        self.partial = partial
        super().__init__(message, request_id=request_id)


@final
class ShutDown(RequestError):
    """The runtime is closing or closed: it takes no requests, and those in flight end with this."""


@final
class ReplicaLost(RequestError):
    """The replica that worked on the request is gone, while the runtime goes on."""


class _ReplicaError(RequestError):
    """An error about an engine or worker process: adds what the process left behind."""

    def __init__(
        self,
        message: str,
        *,
        request_id: str | None = None,
        stage: str | None = None,
        stage_id: int | None = None,
        replica_id: int | None = None,
        log_tail: str = "",
    ) -> None:
        self.log_tail = log_tail
        super().__init__(message, request_id=request_id, stage=stage, stage_id=stage_id, replica_id=replica_id)

    def __str__(self) -> str:
        text = super().__str__()
        if not self.log_tail:
            return text
        tail = "\n".join(f"  | {line}" for line in self.log_tail.splitlines())
        return f"{text}\nThe last lines of its log:\n{tail}"


@final
class StartupFailed(_ReplicaError):
    """A replica did not come up; what had been started was stopped again.

    Attributes:
        phase: what it was doing, such as ``spawn``, ``handshake``, ``load``.
        log_tail: the last lines that the process wrote.
    """

    def __init__(
        self,
        message: str,
        *,
        phase: str,
        stage: str | None = None,
        stage_id: int | None = None,
        replica_id: int | None = None,
        log_tail: str = "",
    ) -> None:
        self.phase = phase
        super().__init__(message, stage=stage, stage_id=stage_id, replica_id=replica_id, log_tail=log_tail)


@final
class EngineDied(_ReplicaError):
    """An engine or worker process died, or no longer answers.

    Under ``on_engine_death="fail_stop"`` the runtime ends with it, and every request in flight fails with an
    instance of its own that carries the request's id.

    Attributes:
        exit_code: as `subprocess.Popen.returncode` (negative: killed by that signal), or None where the
            process still runs or its end is not known.
        log_tail: the last lines that the process wrote.
    """

    def __init__(
        self,
        message: str,
        *,
        request_id: str | None = None,
        stage: str | None = None,
        stage_id: int | None = None,
        replica_id: int | None = None,
        exit_code: int | None = None,
        log_tail: str = "",
    ) -> None:
        self.exit_code = exit_code
        super().__init__(
            message,
            request_id=request_id,
            stage=stage,
            stage_id=stage_id,
            replica_id=replica_id,
            log_tail=log_tail,
        )

    def for_request(self, request_id: str) -> EngineDied:
        """Return a copy that tells one request of this death, with this error as its cause."""
        error = EngineDied(
            self.message,
            request_id=request_id,
            stage=self.stage,
            stage_id=self.stage_id,
            replica_id=self.replica_id,
            exit_code=self.exit_code,
            log_tail=self.log_tail,
        )
        error.__cause__ = self
        return error


@final
class OperationFailed(OmniTrioError):
    """Pausing, resuming, sleeping, waking or a call to several replicas did not succeed everywhere.

    What it did elsewhere stays done: `results` tells.

    Attributes:
        operation: what was asked for, such as ``pause``, ``sleep`` or ``add_lora``.
        failures: what went wrong, one error per replica, which it names; empty where no replica is to blame.
        results: the answers of all replicas that were asked (`omni_trio.runtime.RpcResult`), ordered by stage and
            replica.
        requests: the ids of the requests that it was still waiting for.
    """

    def __init__(
        self,
        message: str,
        *,
        operation: str,
        failures: Sequence[Exception] = (),
        results: Sequence[Any] = (),
        requests: Sequence[str] = (),
    ) -> None:
        self.message = message
        self.operation = operation
        self.failures = tuple(failures)
        self.results = tuple(results)
        self.requests = tuple(requests)
        super().__init__(message)

    def __str__(self) -> str:
        return "\n".join([f"{self.operation}: {self.message}", *(f"  - {error}" for error in self.failures)])
