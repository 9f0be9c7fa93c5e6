"""All rules that the kits check, by number. Numbers stay: messages and `skip` arguments are written with them."""

from __future__ import annotations

from typing import Final

from ._violation import Rules, make_rules

__all__ = ["BALANCER_RULES", "BRIDGE_RULES", "CLIENT_RULES", "PIPELINE_RULES"]

_CLIENT = "omni_trio.stages.StageClient"

CLIENT_RULES: Final[Rules] = make_rules(
    (
        (1, "a request whose input is complete ends, with one output that says so", f"{_CLIENT}.submit"),
        (2, "nothing comes of a request after its last output", "omni_trio.messages.StageOutput.finish_reason"),
        (3, "receive returns at least one output, all of them of requests that it was given", f"{_CLIENT}.receive"),
        (4, "a request's outputs are complete and in the order in which they were made", f"{_CLIENT}.receive"),
        (5, "requests that are at work together get what each gets alone", f"{_CLIENT}.receive"),
        (6, "a receive that is cancelled loses nothing", f"{_CLIENT}.receive"),
        (7, "abort returns once the replica has let go of the requests", f"{_CLIENT}.abort"),
        (8, "when abort has returned, nothing more comes of the requests", f"{_CLIENT}.abort"),
        (9, "abort ignores ids that the replica does not know, or no longer", f"{_CLIENT}.abort"),
        (10, "an abort frees all that the request held, so that others are served", f"{_CLIENT}.abort"),
        (11, "update is ignored for a request that the replica does not know", f"{_CLIENT}.update"),
        (12, "a segment is answered once", "omni_trio.messages.StageRequest.segment_end"),
        (13, "the closing update ends the request", f"{_CLIENT}.update"),
        (14, "resolve_params is synchronous and changes nothing that it is given", f"{_CLIENT}.resolve_params"),
        (15, "parameters and inputs are shared between requests and never changed", f"{_CLIENT}.resolve_params"),
        (16, "resolve_params refuses what the stage can not use with InvalidRequest", f"{_CLIENT}.resolve_params"),
        (17, "submit refuses what the stage can not use with InvalidRequest, and keeps nothing", f"{_CLIENT}.submit"),
        (18, "when submit is cancelled, the replica does not have the request", f"{_CLIENT}.submit"),
        (19, "call raises StageFailed for a method that there is not, and the replica goes on", f"{_CLIENT}.call"),
        (20, "statistics can be had at any time, and are true", f"{_CLIENT}.statistics"),
        (21, "of a dead replica receive raises EngineDied, again and again", f"{_CLIENT}.receive"),
        (22, "of a dead replica submit, update, abort and call raise EngineDied", f"{_CLIENT}.submit"),
        (23, "what waits when the replica dies ends with EngineDied", f"{_CLIENT}.call"),
        (24, "closing ends within close_timeout, in any state and even when cancelled", _CLIENT),
        (25, "start-up can be cancelled", "omni_trio.stages.ClientFactory"),
        (26, "methods raise nothing but what they say", _CLIENT),
    )
)
"""What `check_stage_client` checks."""

_BRIDGE = "omni_trio.bridges.Bridge"
_CONTEXT = "omni_trio.bridges.BridgeContext"

BRIDGE_RULES: Final[Rules] = make_rules(
    (
        (1, "it raises nothing but InvalidRequest", "docs/how-to/write-a-bridge.md"),
        (2, "it returns a StageInput or None", _BRIDGE),
        (3, "it changes nothing that it is given, but its state", _CONTEXT),
        (4, "what it returns shares nothing that can change with what it was given or has returned", _CONTEXT),
        (5, "it does the same again for the same contexts", _BRIDGE),
        (6, "it needs nothing but what it says it reads", "omni_trio.bridges.bridge"),
        (7, "inline it is quick", "omni_trio.bridges.bridge"),
        (8, "in pieces it makes what it makes of the whole", "docs/how-to/write-a-bridge.md"),
        (9, "token ids are ints and text is str", "omni_trio.messages.StageInput"),
        (10, "companions have roles that differ", "omni_trio.bridges.Companion"),
        (11, "what it returns can be sent on", "omni_trio.messages.StageInput.data"),
    )
)
"""What `check_bridge` and `check_expand` check."""

PIPELINE_RULES: Final[Rules] = make_rules(
    (
        (1, "a request that meets no fault is served by every stage", "omni_trio.pipeline.Pipeline"),
        (2, "with any faults every request ends", "docs/explanation/guarantees.md, I2"),
        (3, "with any faults nothing is left behind", "docs/explanation/guarantees.md, I5"),
        (4, "a request fails only where something failed it: no bridge of the pipeline does", _BRIDGE),
        (5, "placeholders are whole numbers from 1 up", "omni_trio.bridges.Placeholder"),
        (6, "equal requests are fed the same into every stage", _BRIDGE),
    )
)
"""What `check_pipeline` checks."""

_BALANCER = "omni_trio.stages.Balancer.pick"

BALANCER_RULES: Final[Rules] = make_rules(
    (
        (1, "pick returns the index of one of the replicas that it is given", _BALANCER),
        (2, "pick is synchronous and raises nothing", _BALANCER),
        (3, "two balancers that were made alike and saw the same pick the same", _BALANCER),
        (4, "pick changes nothing that it is given", _BALANCER),
        (5, "no replica is passed over for ever while others are loaded", _BALANCER),
        (6, "pick is cheap", _BALANCER),
    )
)
"""What `check_balancer` checks."""
