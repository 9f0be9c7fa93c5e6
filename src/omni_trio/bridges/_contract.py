"""The contract of a bridge, how one is marked, and how a name becomes one."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, TypeAlias, get_args, overload

import attrs
import msgspec

from omni_trio.errors import ConfigError
from omni_trio.messages import FinishReason, StageInput

__all__ = [
    "Bridge",
    "BridgeContext",
    "BridgeSpec",
    "CompanionOutput",
    "Reads",
    "RunIn",
    "bridge",
    "import_callable",
    "resolve_bridge",
]

Reads: TypeAlias = Literal["tokens", "text", "data"]
RunIn: TypeAlias = Literal["inline", "thread"]


class CompanionOutput(msgspec.Struct, frozen=True, kw_only=True):
    """What the first stage made for one companion of a request."""

    request_id: str
    """The companion's id at the engines, as KV connectors know it."""
    token_ids: Sequence[int]
    text: str
    data: Mapping[str, Any]
    finish_reason: FinishReason | None


class BridgeContext(msgspec.Struct, frozen=True, kw_only=True):
    """What a bridge may look at. It must not change anything in it but `state`."""

    request_id: str
    """The id under which the caller knows the request."""
    prompt: StageInput
    """What the user asked for, as it was given."""
    source: str
    """Name of the stage whose output this is."""
    stage: str
    """Name of the stage that will receive the result."""
    token_ids: Sequence[int]
    """All tokens of the source so far."""
    text: str
    """All text of the source so far; empty where the bridge does not read text."""
    data: Mapping[str, Any]
    """All data of the source so far, successive values added up by key."""
    prefill_data: Mapping[str, Any] = {}
    """Where the source is a decode stage: what its prefill stage made (multimodal embeddings, hidden states)."""
    finished: bool
    """Whether the source has ended. False at the pieces of a streaming edge, at the segments of a session, and where
    ``feed = "kv"`` and the KV cache was ready first."""
    finish_reason: FinishReason | None
    segment: int = 0
    """In a session: which segment of the turn this belongs to, from 0."""
    segment_end: bool = False
    """In a session: whether the source has worked off the segment."""
    companions: Mapping[str, CompanionOutput] = {}
    """By role, in the order in which `Expand` gave them: all of them, complete."""
    state: dict[str, Any] = {}
    """This bridge's own memory for this request (in a session: for this turn): empty at first, gone with it."""
    requires_multimodal_data: bool = False
    """As `StageSpec.requires_multimodal_data` of the receiving stage."""
    params: Any = None
    """The receiving stage's parameters for this request, as its client resolved them. Not to be changed."""

    def new(self) -> tuple[tuple[int, ...], str]:
        """Return the tokens and the text that came since this bridge last asked, for this request.

        Where the source is forwarded once, this is all of it.
        """
        tokens_sent, text_sent = self.state.get("sent", (0, 0))
        self.state["sent"] = (len(self.token_ids), len(self.text))
        return tuple(self.token_ids[tokens_sent:]), self.text[text_sent:]


Bridge: TypeAlias = Callable[[BridgeContext], StageInput | None]
"""Makes the next stage's input. None means "nothing to send yet": on a streaming edge the next output asks
again; at the source's end it closes the input, or fails the request with `BridgeFailed` where the stage was
never given any."""


@attrs.frozen
class BridgeSpec:
    """A bridge with what the runtime needs to know about it."""

    name: str
    function: Bridge
    reads: frozenset[Reads] = frozenset(("tokens", "text", "data"))
    run_in: RunIn = "inline"


@overload
def bridge(function: Bridge, /) -> Bridge: ...
@overload
def bridge(*, reads: Iterable[Reads] = ..., run_in: RunIn = ...) -> Callable[[Bridge], Bridge]: ...
def bridge(
    function: Bridge | None = None,
    /,
    *,
    reads: Iterable[Reads] = ("tokens", "text", "data"),
    run_in: RunIn = "inline",
) -> Bridge | Callable[[Bridge], Bridge]:
    """Mark a function as a bridge that reads only `reads` and runs where `run_in` says.

    Args:
        function: what to mark, where the decorator is used without arguments.
        reads: what of the source's output it looks at. A source whose text nobody reads is not detokenized.
        run_in: ``inline`` runs on the trio thread and must be quick; ``thread`` runs in a worker thread and
            delays nobody while it releases the GIL.

    Raises:
        TypeError: `reads` is a single string.
        ValueError: there is no such thing to read, or no such place to run in.
    """
    if isinstance(reads, str):
        raise TypeError(f"reads: expected a sequence such as ({reads!r},), not a string")
    wanted = frozenset(reads)
    for word in wanted:
        if word not in get_args(Reads):
            raise ValueError(f"reads: expected some of {', '.join(get_args(Reads))}, not {word!r}")
    if run_in not in get_args(RunIn):
        raise ValueError(f"run_in: expected one of {', '.join(get_args(RunIn))}, not {run_in!r}")

    def mark(function: Bridge) -> Bridge:
        spec = BridgeSpec(f"{function.__module__}:{function.__qualname__}", function, wanted, run_in)
        function.__omni_trio_bridge__ = spec  # type: ignore[attr-defined]
        return function

    return mark if function is None else mark(function)


def resolve_bridge(reference: Bridge | str, *, key: str | None = None) -> BridgeSpec:
    """Turn a built-in's name, a ``package.module:function`` or a callable into a `BridgeSpec`.

    Raises:
        ConfigError: there is no such bridge; names the nearest built-in, or what failed to import.
    """
    from ._builtin import BUILTIN  # noqa: PLC0415 - the built-ins use this module's classes

    if not isinstance(reference, str):
        return _spec_of(reference, key)
    if ":" not in reference:
        if reference in BUILTIN:
            return BUILTIN[reference]
        near = difflib.get_close_matches(reference, BUILTIN, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ConfigError(
            f"no built-in bridge is called {reference!r}{hint} (built-in: {', '.join(BUILTIN)}; "
            "own ones are named as 'package.module:function')",
            key=key,
        )
    return _spec_of(import_callable(reference, what="bridge", key=key), key)


def import_callable(reference: str, *, what: str, key: str | None) -> Any:
    """Return what a ``package.module:name`` stands for.

    Args:
        reference: the dotted path.
        what: what it is, for errors.
        key: where it was given, for errors.

    Raises:
        ConfigError: there is no such module or name in it; it says what failed, and names the nearest.
    """
    module_name, _, attribute = reference.partition(":")
    if not module_name or not attribute:
        raise ConfigError(f"{reference!r} is not of the form 'package.module:function'", key=key)
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise ConfigError(f"the {what} {reference!r} can not be imported: {error}", key=key) from error
    function = getattr(module, attribute, None)
    if function is None:
        near = difflib.get_close_matches(attribute, dir(module), n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ConfigError(f"module {module_name!r} has no {attribute!r}{hint}", key=key)
    return function


def _spec_of(function: Any, key: str | None) -> BridgeSpec:
    spec = getattr(function, "__omni_trio_bridge__", None)
    if isinstance(spec, BridgeSpec):
        return spec
    if not callable(function):
        raise ConfigError(f"expected a callable as bridge, not {function!r}", key=key)
    name = f"{getattr(function, '__module__', '?')}:{getattr(function, '__qualname__', repr(function))}"
    return BridgeSpec(name, function)
