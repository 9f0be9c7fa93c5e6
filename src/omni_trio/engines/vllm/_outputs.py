"""What vLLM puts out becomes `StageOutput`."""

from __future__ import annotations

from typing import Any

import numpy as np

from omni_trio.messages import StageOutput

from ._legs import Leg

__all__ = ["ENGINE_ERROR", "failed", "from_core_output", "from_pooling_output", "from_request_output"]

ENGINE_ERROR = "the engine gave up on the request because of an internal error; its log says more"

_DATA_KEYS = {"embed": "embedding"}


def failed(request_id: str, error: str) -> StageOutput:
    """Make the last output of a request that went wrong."""
    return StageOutput(request_id=request_id, finish_reason="error", error=error)


def from_core_output(output: Any, leg: Leg) -> StageOutput:
    """Convert an EngineCoreOutput as it is: tokens without text."""
    prompt_tokens, cached_tokens = leg.tell_prompt(_cached_tokens(output)) if leg.prompt_tokens else (0, 0)
    if output.finish_reason is None:
        return StageOutput(
            request_id=leg.request_id,
            index=leg.index(output.request_id),
            token_ids=output.new_token_ids,
            prompt_tokens=prompt_tokens,
            cached_tokens=cached_tokens,
            kv_transfer_params=output.kv_transfer_params,
        )
    reason = str(output.finish_reason)
    index = leg.index(output.request_id)
    finish_reason, completion_finish_reason, segment_end = leg.ending(output.request_id, reason)
    return StageOutput(
        request_id=leg.request_id,
        index=index,
        token_ids=output.new_token_ids,
        finish_reason=finish_reason,
        completion_finish_reason=completion_finish_reason,
        segment_end=segment_end,
        stop_reason=output.stop_reason,
        error=_error_of(output, leg) if reason == "error" else None,
        prompt_tokens=prompt_tokens,
        cached_tokens=cached_tokens,
        kv_transfer_params=output.kv_transfer_params,
    )


def from_request_output(output: Any, leg: Leg, core_output: Any) -> StageOutput:
    """Convert a RequestOutput in delta mode with one completion."""
    (completion,) = output.outputs
    reason = completion.finish_reason
    prompt_tokens, cached_tokens = leg.tell_prompt(output.num_cached_tokens or 0)
    index = leg.index(core_output.request_id)
    finish_reason, completion_finish_reason, segment_end = leg.ending(core_output.request_id, reason)
    # All completions have the same prompt; and once told, there is an empty list of it.
    about_prompt = output.prompt_logprobs if index == 0 else None
    return StageOutput(
        request_id=leg.request_id,
        index=index,
        token_ids=completion.token_ids,
        text=completion.text,
        data={"prompt_logprobs": about_prompt} if about_prompt else None,
        finish_reason=finish_reason,
        completion_finish_reason=completion_finish_reason,
        segment_end=segment_end,
        stop_reason=completion.stop_reason,
        error=_error_of(core_output, leg) if reason == "error" else None,
        prompt_tokens=prompt_tokens,
        cached_tokens=cached_tokens,
        kv_transfer_params=output.kv_transfer_params,
        logprobs=completion.logprobs,
    )


def from_pooling_output(output: Any, leg: Leg, core_output: Any) -> StageOutput:
    """Convert a PoolingRequestOutput; tensors become arrays of 32-bit floats."""
    reason = str(core_output.finish_reason)
    leg.ending(core_output.request_id, reason)
    if reason == "error":
        return failed(leg.request_id, _error_of(core_output, leg))
    if reason == "abort":
        return StageOutput(request_id=leg.request_id, finish_reason=reason)
    key = _DATA_KEYS.get(leg.task or "", leg.task or "data")
    prompt_tokens, cached_tokens = leg.tell_prompt(output.num_cached_tokens or 0)
    return StageOutput(
        request_id=leg.request_id,
        data={key: np.ascontiguousarray(output.outputs.data.float().numpy(), dtype=np.float32)},
        finish_reason="stop",
        prompt_tokens=prompt_tokens,
        cached_tokens=cached_tokens,
    )


def _cached_tokens(output: Any) -> int:
    if (stats := getattr(output, "prefill_stats", None)) is not None:
        return int(stats.num_cached_tokens)
    return int(getattr(output, "num_cached_tokens", 0) or 0)


def _error_of(output: Any, leg: Leg) -> str:
    # Newer versions say what it was.
    if (error := getattr(output, "error", None)) is not None:
        return str(getattr(error, "message", None) or error)
    if getattr(output, "mm_cache_miss_hashes", None):
        return "the engine no longer has an image, sound or video that was sent earlier; send the request again"
    if leg.source is not None:
        return f"its KV cache could not be had from {leg.source}, or the engine failed by itself; its log says more"
    return ENGINE_ERROR
