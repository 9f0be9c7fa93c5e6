"""What the stages of omni models put out, made up, and short ways to look at what bridges make of it."""

from __future__ import annotations

import numpy as np

from support_bridges import check_bridge, context

START, SYSTEM, USER, ASSISTANT = 151644, 8948, 872, 77091
PROMPT = [START, USER, 5, 6, START, ASSISTANT]  # 4 of the user's, 9 for the assistant
FAMILIES = "omni_trio.bridges.families"


def rows(start, stop, *, width=3, dtype="float32"):
    """Rows that tell which they are."""
    return (np.arange(start, stop).reshape(-1, 1) + np.zeros((1, width))).astype(dtype)


def thought(prompt, first, last, **more):
    """The data of a thinker of Qwen3-Omni whose rows from `first` to `last` are there."""
    return {
        "ids.prompt": list(prompt),
        "hidden_states.layer_0": rows(first, last),
        "hidden_states.layer_24": rows(first + 100, last + 100),
        **more,
    }


def info(made):
    """What goes to the next stage as additional information."""
    return made.data["additional_information"]


def one(bridge, **fields):
    """What a bridge makes of one context, which is checked."""
    (made,) = check_bridge(bridge, [context(**fields)])
    return made


def frames(*firsts, size=16):
    return np.array([[first, *range(1, size)] for first in firsts]).reshape(-1, size)


def spoken(made, size=16):
    """The new frames, and those before them."""
    table = np.array(made.token_ids).reshape(size, -1).T.tolist()
    before = info(made)["meta"]["left_context_size"]
    return [frame[0] for frame in table[before:]], [frame[0] for frame in table[:before]]
