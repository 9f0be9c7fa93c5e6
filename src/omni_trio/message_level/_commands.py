"""What is sent to an orchestrator. Field names are those of vLLM-Omni's messages; what we add comes after them.

Every command has a literal `type`, by which `msgspec` also tells them apart in an encoded form.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal, TypeAlias, TypeVar

import msgspec

from omni_trio.errors import InvalidRequest

__all__ = [
    "Abort",
    "AddCompanionRequest",
    "AddRequest",
    "CollectiveRpc",
    "Command",
    "RegisterRemoteReplica",
    "Shutdown",
    "StreamingUpdate",
    "UnregisterRemoteReplica",
    "checked",
    "id_of",
    "is_command",
]


class _Command(msgspec.Struct, frozen=True, kw_only=True, tag_field="type"):
    pass


class _Submission(_Command, frozen=True, kw_only=True):
    request_id: str
    """How events call the request; unique among those in flight."""
    prompt: Any = None
    """A `StageInput`; words; token ids; a mapping with one of ``prompt_embeds``, ``prompt_token_ids``, ``prompt`` and
    ``messages`` (the first of these that is there counts), whose other keys become `StageInput.data`; an object that
    has ``prompt_token_ids``; or, in front of a diffusion stage, a list of these."""
    original_prompt: Any = None
    """Stands in where `prompt` is None; else it lends its data (``multi_modal_data`` and the like), where `prompt` has
    none by that name. Bridges read both as one: `BridgeContext.prompt`."""
    output_prompt_text: Any = None
    """Has no effect: outputs do not repeat the prompt."""
    sampling_params_list: Sequence[Any] | None = None
    """One entry per stage; None, for an entry or for all of it: the stage's defaults."""
    final_stage_id: int | None = None
    """The stage at which the request ends; None: see `final_output_stage_ids`. Has no effect in an update."""
    final_output_stage_ids: Sequence[int] | None = None
    """The stages whose outputs are wanted; None: all whose outputs are final. Where `final_stage_id` is None the
    request ends at the highest of them; where both are None it passes the whole pipeline. Has no effect in an
    update."""
    resumable: bool | None = None
    """Whether more input will follow as updates. None: what the prompt itself says by that name; if it says nothing,
    False for a new request and True for an update."""
    preprocess_ms: float = 0.0
    """Has no effect: `StageMetrics.preprocess_ms` is measured."""
    enqueue_ts: float = 0.0
    """Has no effect: `StageMetrics.queue_wait_ms` is measured."""
    request_timestamp: float = 0.0
    """Has no effect: nothing here is measured by wall clock."""


class AddCompanionRequest(_Command, frozen=True, kw_only=True, tag="add_companion_request"):
    """One more request at the first stage for the sake of `parent_id`, which has announced it."""

    type: ClassVar[Literal["add_companion_request"]] = "add_companion_request"

    companion_id: str
    """Names it in commands; no event ever carries it."""
    parent_id: str
    role: str
    prompt: Any
    """As for `AddRequest`; no list."""
    companion_prompt_text: Any = None
    """Has no effect."""
    sampling_params_list: Sequence[Any] | None = None
    """The first entry, a mapping, says what differs from the parent's parameters at the first stage."""


class AddRequest(_Submission, frozen=True, kw_only=True, tag="add_request"):
    """Serve a request; answered by its events, the last of which is an output with `finished`, or an error."""

    type: ClassVar[Literal["add_request"]] = "add_request"

    companions: Sequence[AddCompanionRequest] = ()
    """Companions that come with it."""
    companion_ids: Sequence[str] = ()
    """Companions that will come in messages of their own. No stage sees the request before all of them have come."""
    priority: int = 0
    """Lower is sooner, as in vLLM."""
    deadline: float = math.inf
    """Seconds from when the command is taken until the request is given up, everywhere."""


class StreamingUpdate(_Submission, frozen=True, kw_only=True, tag="streaming_update"):
    """More input for a session, which a resumable `AddRequest` has begun.

    One that is not resumable closes the session and adds nothing, whatever its prompt is.
    """

    type: ClassVar[Literal["streaming_update"]] = "streaming_update"


class Abort(_Command, frozen=True, kw_only=True, tag="abort"):
    """End requests at every stage. The last event of each is an output whose finish reason is ``abort``."""

    type: ClassVar[Literal["abort"]] = "abort"

    request_ids: Sequence[str]
    """Those that are not in flight are ignored; a companion's id stands for its parent's."""
    rpc_id: str | None = None
    """Asks for an `AbortResult`, once no stage holds any of them."""


class CollectiveRpc(_Command, frozen=True, kw_only=True, tag="collective_rpc"):
    """Call a method of every replica of some stages; answered by a `CollectiveRpcResult`."""

    type: ClassVar[Literal["collective_rpc"]] = "collective_rpc"

    rpc_id: str
    method: str
    timeout: float | None = None
    """Seconds that each replica has to answer; None: as many as `Runtime.collective_rpc` gives it."""
    args: Sequence[Any] = ()
    kwargs: Mapping[str, Any] = {}
    stage_ids: Sequence[int] | None = None
    """None: all stages."""


class Shutdown(_Command, frozen=True, kw_only=True, tag="shutdown"):
    """End everything: each request gets its last event, each call its answer, then the events end."""

    type: ClassVar[Literal["shutdown"]] = "shutdown"


class RegisterRemoteReplica(_Command, frozen=True, kw_only=True, tag="register_remote_replica"):
    """Not supported yet; refused with an error event."""

    type: ClassVar[Literal["register_remote_replica"]] = "register_remote_replica"

    stage_id: int
    replica_id: int


class UnregisterRemoteReplica(_Command, frozen=True, kw_only=True, tag="unregister_remote_replica"):
    """Not supported yet; refused with an error event."""

    type: ClassVar[Literal["unregister_remote_replica"]] = "unregister_remote_replica"

    stage_id: int
    input_addr: str


Command: TypeAlias = (
    AddRequest
    | StreamingUpdate
    | AddCompanionRequest
    | Abort
    | CollectiveRpc
    | Shutdown
    | RegisterRemoteReplica
    | UnregisterRemoteReplica
)

_C = TypeVar("_C", bound=Command)


def checked(command: _C) -> _C:
    """Return a command whose fields have the types that they should; making one does not check them.

    Raises:
        InvalidRequest: a field has not.
    """
    if not isinstance(command, _Command):
        raise InvalidRequest(f"{type(command).__name__} is no command; see omni_trio.message_level.Command")
    try:
        made = msgspec.convert(msgspec.structs.asdict(command), type(command))
    except msgspec.ValidationError as error:
        raise InvalidRequest(f"a field of {command.type!r} is wrong: {error}") from error
    if isinstance(made, AddRequest):
        for companion in made.companions:
            checked(companion)
            if companion.parent_id != made.request_id:
                raise InvalidRequest(
                    f"companion {companion.companion_id!r} is of {companion.parent_id!r}, not of this request"
                )
    return made


def is_command(given: object) -> bool:
    """Whether it is one."""
    return isinstance(given, _Command)


def id_of(command: object) -> str | None:
    """Return what a command calls the thing that it is about."""
    if not isinstance(command, _Command):
        return None
    for name in ("request_id", "companion_id", "rpc_id"):
        value: object = getattr(command, name, None)
        if value is not None:
            return value if isinstance(value, str) else repr(value)
    if isinstance(command, RegisterRemoteReplica):
        return f"{command.stage_id}/{command.replica_id}"
    if isinstance(command, UnregisterRemoteReplica):
        return command.input_addr
    return None
