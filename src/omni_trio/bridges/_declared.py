"""Two more functions that a pipeline names: one that makes companions, one that sizes placeholders."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeAlias

import attrs
import msgspec

from omni_trio.errors import ConfigError
from omni_trio.messages import StageInput

from ._contract import import_callable

__all__ = [
    "Companion",
    "Expand",
    "ExpandContext",
    "ExpandSpec",
    "Placeholder",
    "resolve_expand",
    "resolve_placeholder",
]


class ExpandContext(msgspec.Struct, frozen=True, kw_only=True):
    """What an `Expand` function may look at."""

    request_id: str
    """The id under which the caller knows the request."""
    prompt: StageInput
    """What the user asked for."""
    params: Any
    """The request's parameters at the first stage, as its client resolved them. Not to be changed."""


class Companion(msgspec.Struct, frozen=True, kw_only=True):
    """One more request at the first stage, for the sake of the request that it accompanies (guidance, mostly)."""

    role: str
    """What it is to the request, such as ``cfg_text``: unique among its companions."""
    input: StageInput
    sampling: Mapping[str, Any] = {}
    """Parameters that differ from the request's own at the first stage."""


Expand: TypeAlias = Callable[[ExpandContext], Iterable[Companion]]
"""Makes the companions of a request; none is a valid answer. Runs on the trio thread, so it must be quick. If it
raises, the request is refused and no stage has seen it."""

Placeholder: TypeAlias = Callable[[StageInput], int]
"""Returns how many tokens the placeholder prompt of a stage with ``feed = "connector"`` has, given the user's prompt.
At least 1."""


@attrs.frozen
class ExpandSpec:
    """An `Expand` function with its name."""

    name: str
    function: Expand


def resolve_expand(reference: Expand | str, *, key: str | None = None) -> ExpandSpec:
    """Turn a ``package.module:function`` or a callable into an `ExpandSpec`.

    Raises:
        ConfigError: there is no such function.
    """
    function: Any = reference
    if isinstance(reference, str):
        function = import_callable(reference, what="expand function", key=key)
    if not callable(function):
        raise ConfigError(f"expected a callable, or 'package.module:function', not {reference!r}", key=key)
    name = reference if isinstance(reference, str) else getattr(function, "__qualname__", repr(function))
    return ExpandSpec(name, function)


def resolve_placeholder(reference: Placeholder | str, *, key: str | None = None) -> Placeholder:
    """Turn a ``package.module:function`` or a callable into a `Placeholder`.

    Raises:
        ConfigError: there is no such function.
    """
    function: Any = reference
    if isinstance(reference, str):
        function = import_callable(reference, what="placeholder function", key=key)
    if not callable(function):
        raise ConfigError(f"expected a callable, or 'package.module:function', not {reference!r}", key=key)
    placeholder: Placeholder = function
    return placeholder
