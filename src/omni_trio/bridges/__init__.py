"""How one stage's output becomes the next stage's input.

A bridge is a plain function ``(BridgeContext) -> StageInput | None``. That is the whole contract: it is never
asked for its signature. `bridge` marks one with what it reads and where it runs; an unmarked function reads
everything and runs on the trio thread, so it must be quick.
"""

from __future__ import annotations

from ._builtin import BUILTIN
from ._contract import Bridge, BridgeContext, BridgeSpec, CompanionOutput, Reads, RunIn, bridge, resolve_bridge
from ._declared import (
    Companion,
    Expand,
    ExpandContext,
    ExpandSpec,
    Placeholder,
    resolve_expand,
    resolve_placeholder,
)

__all__ = [
    "BUILTIN",
    "Bridge",
    "BridgeContext",
    "BridgeSpec",
    "Companion",
    "CompanionOutput",
    "Expand",
    "ExpandContext",
    "ExpandSpec",
    "Placeholder",
    "Reads",
    "RunIn",
    "bridge",
    "resolve_bridge",
    "resolve_expand",
    "resolve_placeholder",
]
