"""The pure core told in few words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from omni_trio.pipeline import Pipeline
from omni_trio.routing import RequestFlow, RoutePlan
from routing_cases import no_companions
from support import stage

__all__ = ["KV", "NOTHING", "bridged", "ended", "flow", "guided", "pair", "said"]

KV: Mapping[str, Any] = {"remote_request_id": "p"}
NOTHING: list[Any] = []


def flow(pipeline: Pipeline, final_stage: int | None = None, **options) -> RequestFlow:
    return RequestFlow(RoutePlan(pipeline, final_stage), **options)


def ended(f: RequestFlow, stage_id: int, **facts) -> list:
    return list(f.output(stage_id, finished=True, **facts))


def said(f: RequestFlow, stage_id: int, **facts) -> list:
    return list(f.output(stage_id, finished=False, **facts))


def bridged(f: RequestFlow, stage_id: int, *, made: bool = True, last: bool = True, **facts) -> list:
    return list(f.bridged(stage_id, made_input=made, last=last, **facts))


def guided(*more, roles=("cond", "uncond"), feed="finish", **fields) -> RequestFlow:
    return flow(Pipeline([stage("ar", **fields), stage("dit", feed=feed), *more], expand=no_companions), roles=roles)


def pair(*more, handoff="params") -> Pipeline:
    return Pipeline([stage("p", role="prefill"), stage("d", role="decode", handoff=handoff), *more])
