"""What tests of bridges share: the public checks, with what omni engines can exchange as what can be sent."""

from __future__ import annotations

from collections.abc import Sequence

from omni_trio.bridges import Bridge, BridgeContext
from omni_trio.engines.additional_information import serialize
from omni_trio.messages import StageInput
from omni_trio.testing import conformance
from omni_trio.testing.conformance import bridge_context as context
from omni_trio.testing.conformance import check_expand
from omni_trio.testing.conformance._values import snapshot

__all__ = ["check_bridge", "check_expand", "context", "snapshot"]


def check_bridge(
    bridge: Bridge | str, contexts: Sequence[BridgeContext], *, travels: bool = True
) -> list[StageInput | None]:
    """As the public one. With `travels`, ``additional_information`` must be what omni engines can exchange."""

    def sends(made: StageInput) -> None:
        serialize(made.data.get("additional_information"))

    return conformance.check_bridge(bridge, contexts, sends=sends if travels else None)
