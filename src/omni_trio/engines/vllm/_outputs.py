"""What vLLM puts out becomes `StageOutput`."""

from __future__ import annotations

from typing import Any

import numpy as np

from omni_trio.messages import StageOutput

__all__ = ["ENGINE_ERROR", "Leg", "failed", "from_core_output", "from_pooling_output", "from_request_output"]

ENGINE_ERROR = "the engine gave up on the request because of an internal error; its log says more"

_DATA_KEYS = {"embed": "embedding"}


class Leg:
    """What has to be known of a request while the engine works on it."""

    __slots__ = ("prompt_tokens", "raw", "task")

    def __init__(self, *, raw: bool, task: str | None, prompt_tokens: int) -> None:
        self.raw = raw
        """Whether outputs go out as the engine makes them, past vLLM's output processor."""
        self.task = task
        """The pooling task; None for a request that generates."""
        self.prompt_tokens = prompt_tokens
        """Length of the prompt until it has been told, 0 afterwards."""

    def tell_prompt_tokens(self) -> int:
        """Return the length of the prompt the first time, 0 afterwards."""
        tokens, self.prompt_tokens = self.prompt_tokens, 0
        return tokens


def failed(request_id: str, error: str) -> StageOutput:
    """Make the last output of a request that went wrong."""
    return StageOutput(request_id=request_id, finish_reason="error", error=error)


def from_core_output(output: Any, leg: Leg) -> StageOutput:
    """Convert an EngineCoreOutput as it is: tokens without text."""
    finish_reason = None if output.finish_reason is None else str(output.finish_reason)
    if leg.prompt_tokens:
        prompt_tokens, cached_tokens = leg.tell_prompt_tokens(), _cached_tokens(output)
    else:
        prompt_tokens = cached_tokens = 0
    return StageOutput(
        request_id=output.request_id,
        token_ids=output.new_token_ids,
        finish_reason=finish_reason,
        stop_reason=output.stop_reason,
        error=_error_of(output) if finish_reason == "error" else None,
        prompt_tokens=prompt_tokens,
        cached_tokens=cached_tokens,
        kv_transfer_params=output.kv_transfer_params,
    )


def from_request_output(output: Any, leg: Leg, core_output: Any) -> StageOutput:
    """Convert a RequestOutput in delta mode with one completion."""
    (completion,) = output.outputs
    first = leg.prompt_tokens > 0
    return StageOutput(
        request_id=output.request_id,
        token_ids=completion.token_ids,
        text=completion.text,
        data=None if output.prompt_logprobs is None else {"prompt_logprobs": output.prompt_logprobs},
        finish_reason=completion.finish_reason,
        stop_reason=completion.stop_reason,
        error=_error_of(core_output) if completion.finish_reason == "error" else None,
        prompt_tokens=leg.tell_prompt_tokens(),
        cached_tokens=(output.num_cached_tokens or 0) if first else 0,
        kv_transfer_params=output.kv_transfer_params,
        logprobs=completion.logprobs,
    )


def from_pooling_output(output: Any, leg: Leg, core_output: Any) -> StageOutput:
    """Convert a PoolingRequestOutput; tensors become arrays of 32-bit floats."""
    reason = str(core_output.finish_reason)
    if reason in ("error", "abort"):
        return (
            failed(output.request_id, _error_of(core_output))
            if reason == "error"
            else StageOutput(request_id=output.request_id, finish_reason=reason)
        )
    key = _DATA_KEYS.get(leg.task or "", leg.task or "data")
    return StageOutput(
        request_id=output.request_id,
        data={key: np.ascontiguousarray(output.outputs.data.float().numpy(), dtype=np.float32)},
        finish_reason="stop",
        prompt_tokens=leg.tell_prompt_tokens(),
        cached_tokens=output.num_cached_tokens or 0,
    )


def _cached_tokens(output: Any) -> int:
    if (stats := getattr(output, "prefill_stats", None)) is not None:
        return int(stats.num_cached_tokens)
    return int(getattr(output, "num_cached_tokens", 0) or 0)


def _error_of(output: Any) -> str:
    # Newer versions say what it was.
    if (error := getattr(output, "error", None)) is not None:
        return str(getattr(error, "message", None) or error)
    if getattr(output, "mm_cache_miss_hashes", None):
        return "the engine no longer has an image, sound or video that was sent earlier; send the request again"
    return ENGINE_ERROR
