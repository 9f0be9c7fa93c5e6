"""Parameters of the two halves of a prefill/decode pair, and what such a pair can not do."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from omni_trio.messages import KvTransfer

__all__ = ["decode_params", "describe_source", "prefill_params", "remote_cached_tokens", "unpaired"]

_ASKED_OF_PREFILL: Final = {
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
"""What the connector fills in; NIXL's wants the keys to be there."""

_NEUTRAL: Final[Mapping[str, Any]] = {
    "max_tokens": 1,
    "min_tokens": 1,
    "ignore_eos": True,
    # What could end the request before its length does, and so have the connector drop its KV cache ...
    "stop": [],
    "stop_token_ids": [],
    "structured_outputs": None,
    "repetition_detection": None,
    # ... and what only matters for the one token, which nobody reads.
    "allowed_token_ids": None,
    "bad_words": [],
    "logit_bias": None,
    "logprobs": None,
    "logprob_token_ids": None,
}

_NIXL_NEEDS: Final = ("remote_engine_id", "remote_request_id", "remote_block_ids", "remote_host", "remote_port")
"""What the decode side of NIXL's connector asserts, and would die without."""


def prefill_params(params: Any, transfer: KvTransfer) -> Any:
    """Return parameters that have the engine prefill, and keep the KV cache for another engine to fetch.

    Args:
        params: SamplingParams; they are not changed.
        transfer: the pair's.
    """
    mine = _copy(params, _NEUTRAL)
    mine.extra_args = _with_transfer(
        params,
        {
            **_ASKED_OF_PREFILL,
            "do_remote_decode": True,
            "do_remote_prefill": False,
            "transfer_id": transfer.transfer_id,
        },
    )
    return mine


def decode_params(params: Any, transfer: KvTransfer, connector: str | None) -> Any:
    """Return parameters that have the engine fetch the KV cache instead of prefilling.

    Args:
        params: SamplingParams; they are not changed.
        transfer: the pair's; without `KvTransfer.params` there is nothing to say, and `params` come back.
        connector: the name of the engine's connector.

    Raises:
        ValueError: the prefill has not said what this connector has to know.
    """
    if transfer.params is None:
        return params
    told = {key: value for key, value in transfer.params.items() if key != "transfer_id" or value}
    if connector == "NixlConnector" and (missing := [key for key in _NIXL_NEEDS if not told.get(key)]):
        raise ValueError(f"the prefill's kv_transfer_params lack {', '.join(missing)}")
    mine = _copy(params, {})
    mine.extra_args = _with_transfer(
        params,
        {"transfer_id": transfer.transfer_id, **told, "do_remote_prefill": True, "do_remote_decode": False},
    )
    return mine


def describe_source(transfer: KvTransfer) -> str:
    """Say where a KV cache comes from, for an error."""
    params = transfer.params or {}
    engine, host, port = (params.get(f"remote_{key}") for key in ("engine_id", "host", "port"))
    where = f" {engine}" if engine else ""
    return f"the prefill engine{where}{f' at {host}:{port}' if host else ''} (transfer {transfer.transfer_id})"


def remote_cached_tokens(transfer: KvTransfer) -> int | None:
    """Return how much of the prompt the prefill had in its cache, if it has told."""
    tokens = (transfer.params or {}).get("remote_prefill_cached_tokens")
    return tokens if isinstance(tokens, int) else None


def unpaired(params: Any) -> str | None:
    """Say why a prefill/decode pair can not do what SamplingParams ask for; None where it can.

    The decode engine samples all tokens itself, the first one too, so whatever concerns answers works as ever. The
    prompt it never sees computed; and what it fetches, it fetches for one request.
    """
    if params.n != 1:
        return (
            f"n must be 1, not {params.n}, where prefill and decode are apart: a KV cache is handed over once, to one "
            f"request; make {params.n} requests"
        )
    for name in ("prompt_logprobs", "prompt_logprob_token_ids"):
        if getattr(params, name, None) is not None:
            return (
                f"{name} can not be had where prefill and decode are apart: the engine that answers has not computed "
                "the prompt"
            )
    return None


def _copy(params: Any, changes: Mapping[str, Any]) -> Any:
    # A flat copy (see `_compat.normalised`): fields are replaced in it, never changed in place.
    mine = params.clone()
    for name, value in changes.items():
        # Not every version has all of them.
        if hasattr(mine, name):
            setattr(mine, name, value)
    return mine


def _with_transfer(params: Any, transfer: Mapping[str, Any]) -> dict[str, Any]:
    extra = dict(params.extra_args or {})
    extra["kv_transfer_params"] = {**(extra.get("kv_transfer_params") or {}), **transfer}
    return extra
