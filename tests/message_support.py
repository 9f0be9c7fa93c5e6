"""What tests of the message level share: an orchestrator of simulated stages, and ways to look at its events."""

from __future__ import annotations

from contextlib import asynccontextmanager

import trio
import trio.testing

from omni_trio.bridges import BridgeContext
from omni_trio.errors import EngineDied
from omni_trio.message_level import (
    AddCompanionRequest,
    ErrorEvent,
    OutputEvent,
    companions_by_message,
    open_orchestrator,
)
from omni_trio.messages import StageInput
from omni_trio.pipeline import Pipeline
from omni_trio.stages import ClientStatistics
from omni_trio.testing import Chunk, Finish, SimStage, tokens
from support import stage


@asynccontextmanager
async def messages(pipeline, *stages, **options):
    """Open an orchestrator with one `SimStage` per stage; those not given are plain."""
    given = [*stages, *(SimStage() for _ in pipeline.stages[len(stages) :])]
    clients = {spec.name: sim for spec, sim in zip(pipeline.stages, given, strict=True)}
    async with open_orchestrator(pipeline, clients=clients, **options) as channels:
        yield channels


async def send(commands, *several):
    for command in several:
        await commands.send(command)


async def ask(pipeline, stages, *several, **options):
    """Send some commands and no more; return all events."""
    async with messages(pipeline, *stages, **options) as (commands, events):
        await send(commands, *several)
        await commands.aclose()
        return [event async for event in events]


def of(events, request_id):
    return [event for event in events if getattr(event, "request_id", None) == request_id]


def is_last(event):
    return event.finished if isinstance(event, OutputEvent) else isinstance(event, ErrorEvent)


def end_of(events, request_id):
    """The last event of a request, which must be its only terminal one."""
    mine = of(events, request_id)
    assert [is_last(event) for event in mine] == [False] * (len(mine) - 1) + [True]
    return mine[-1]


def tokens_of(events, stage_id):
    return [
        t for e in events if isinstance(e, OutputEvent) and e.stage_id == stage_id for t in e.engine_outputs.token_ids
    ]


def by_text(**scripts):
    """A script per prompt; a prompt without one gets two tokens."""
    return lambda request: scripts.get(request.input.text, tokens(2))


def echo(request):
    return (*(Chunk((token,)) for token in request.input.token_ids or ()), Finish())


ROLES = ("cfg_text", "cfg_img")


def gather(context: BridgeContext) -> StageInput:
    bundle = [tuple(context.token_ids), *(tuple(one.token_ids) for one in context.companions.values())]
    return StageInput(token_ids=tuple(t for ids in bundle for t in ids), data={"roles": list(context.companions)})


def guided(expand=companions_by_message, **options):
    return Pipeline([stage("ar"), stage("dit", bridge=gather)], expand=expand, **options)


def companion(role, token, parent="r", **fields):
    return AddCompanionRequest(companion_id=f"{parent}.{role}", parent_id=parent, role=role, prompt=[token], **fields)


class Calls:
    """A replica whose calls wait until it dies."""

    def __init__(self, *, dies_at: float) -> None:
        self.dies_at = dies_at
        self.dead = trio.Event()

    @asynccontextmanager
    async def __call__(self, context):
        yield self

    def statistics(self):
        return ClientStatistics()

    async def receive(self):
        await trio.sleep(self.dies_at)
        self.dead.set()
        raise EngineDied("gone")

    async def call(self, method, args=(), kwargs=None):
        await self.dead.wait()
        raise EngineDied("gone")
