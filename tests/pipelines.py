"""Stages and pipelines, in few words."""

from __future__ import annotations

import pytest

from omni_trio.errors import ConfigError
from omni_trio.pipeline import Pipeline, StageSpec


def sim(name: str, **fields) -> StageSpec:
    return StageSpec(name=name, kind="simulated", **fields)


def llm(name: str, **fields) -> StageSpec:
    return StageSpec(name=name, model="m", **fields)


def worker(name: str, **fields) -> StageSpec:
    return StageSpec(name=name, kind="worker", target="package.module:Thing", **fields)


def diffusion(name: str, **fields) -> StageSpec:
    return StageSpec(name=name, kind="diffusion", target="package.module:Thing", **fields)


def pooling(name: str, **fields) -> StageSpec:
    return StageSpec(name=name, kind="pooling", model="m", **fields)


MAKERS = {"llm": llm, "pooling": pooling, "worker": worker, "diffusion": diffusion, "simulated": sim}


def no_companions(context):
    return ()


def length(prompt):
    return 7


def kv(role: str, connector: str = "NixlConnector", **settings) -> dict:
    return {"kv_transfer_config": {"kv_connector": connector, "kv_role": role, **settings}}


def prefill(name: str = "p", role: str = "kv_producer", **fields) -> StageSpec:
    return llm(name, **{"role": "prefill", "engine_args": kv(role), **fields})


def decode(name: str = "d", role: str = "kv_consumer", **fields) -> StageSpec:
    return llm(name, **{"role": "decode", "engine_args": kv(role), **fields})


def refusal(stages, **fields) -> tuple[str | None, str]:
    with pytest.raises(ConfigError) as caught:
        Pipeline(stages, **fields)
    assert str(caught.value) == f"{caught.value.key}: {caught.value.message}"
    return caught.value.key, caught.value.message
