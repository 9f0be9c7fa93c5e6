"""The contract of a bridge, how one is marked, and how a name becomes one."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, TypeAlias

import attrs
import msgspec

from omni_trio.errors import ConfigError
from omni_trio.messages import FinishReason, StageInput

__all__ = ["Bridge", "BridgeContext", "BridgeSpec", "Reads", "RunIn", "bridge", "resolve_bridge"]

Reads: TypeAlias = Literal["tokens", "text", "data"]
RunIn: TypeAlias = Literal["inline", "thread"]


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
    finished: bool
    """Whether the source has ended. Always True on an edge that does not stream."""
    finish_reason: FinishReason | None
    state: dict[str, Any]
    """This bridge's own memory for this request: empty at first, gone with the request."""
    requires_multimodal_data: bool = False
    """As `StageSpec.requires_multimodal_data` of the receiving stage."""


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


def bridge(
    *, reads: Iterable[Reads] = ("tokens", "text", "data"), run_in: RunIn = "inline"
) -> Callable[[Bridge], Bridge]:
    """Mark a function as a bridge that reads only `reads` and runs where `run_in` says.

    Args:
        reads: what of the source's output it looks at. A source whose text nobody reads is not detokenized.
        run_in: ``inline`` runs on the trio thread and must be quick; ``thread`` runs in a worker thread and
            delays nobody while it releases the GIL.
    """

    def mark(function: Bridge) -> Bridge:
        spec = BridgeSpec(f"{function.__module__}:{function.__qualname__}", function, frozenset(reads), run_in)
        function.__omni_trio_bridge__ = spec  # type: ignore[attr-defined]
        return function

    return mark


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
    module_name, _, attribute = reference.partition(":")
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise ConfigError(f"the bridge {reference!r} can not be imported: {error}", key=key) from error
    function = getattr(module, attribute, None)
    if function is None:
        near = difflib.get_close_matches(attribute, dir(module), n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ConfigError(f"module {module_name!r} has no {attribute!r}{hint}", key=key)
    return _spec_of(function, key)


def _spec_of(function: Any, key: str | None) -> BridgeSpec:
    spec = getattr(function, "__omni_trio_bridge__", None)
    if isinstance(spec, BridgeSpec):
        return spec
    if not callable(function):
        raise ConfigError(f"expected a callable as bridge, not {function!r}", key=key)
    name = f"{getattr(function, '__module__', '?')}:{getattr(function, '__qualname__', repr(function))}"
    return BridgeSpec(name, function)
