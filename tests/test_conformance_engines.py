"""Every client that comes with the package keeps the contract that users' own clients are checked against."""

from __future__ import annotations

import asyncio
import os
import signal
from contextlib import asynccontextmanager
from types import SimpleNamespace

import pytest
import trio

from omni_trio.engines._open import open_clients
from omni_trio.engines.asyncio_bridge import asyncio_client_factory
from omni_trio.engines.process import open_launcher
from omni_trio.engines.vllm import vllm_client_factory
from omni_trio.messages import StageInput, StageOutput
from omni_trio.pipeline import Pipeline
from omni_trio.testing import SimStage
from omni_trio.testing.conformance import check_stage_client
from support import run
from vllm_support import Engines
from worker_stage import spec


def on_a_real_clock(main):
    async def bounded():
        with trio.fail_after(120):
            return await main()

    return trio.run(bounded)


def numbers_of(summary):
    return [rule.number for rule in summary.not_checked]


# ---- simulated


@asynccontextmanager
async def mortal_sim(context):
    async with SimStage(token_time=0.01, log=None)(context) as client:
        yield client, lambda: client.die(SimpleNamespace(message="killed", exit_code=-9))


@asynccontextmanager
async def full_sim(context):
    async with SimStage(token_time=0.01, capacity=1, log=None)(context) as client:
        client._slots.acquire_on_behalf_of_nowait("somebody")
        yield client


@pytest.mark.parametrize("capacity", [1, 3, 1000])
def test_the_simulated_stage(capacity):
    summary = run(
        lambda: check_stage_client(
            SimStage(token_time=0.01, prefill_time=0.02, capacity=capacity, max_prompt_tokens=50, log=None),
            make_full=full_sim,
            make_dead=mortal_sim,
            long_params={"max_tokens": 1000},
            session=lambda request, piece: StageInput(token_ids=(request + 1, piece + 1)),
            bad_params=[{"max_tokens": 0}, {"temprature": 1}, "hot"],
            bad_inputs=[StageInput(token_ids=tuple(range(51)))],
            method=("echo", (1, 2)),
            slow_method=("wait", (1000,)),
        )
    )
    assert numbers_of(summary) == []


# ---- worker processes

TOKENS = {"target": "conformance_targets:Tokens", "kind": "worker"}


@asynccontextmanager
async def workers(zygote):
    """Give a factory of worker clients."""
    spec_ = spec(**TOKENS)
    async with open_clients(Pipeline([spec_]), given={}, zygote=zygote) as factories:
        yield spec_, factories[spec_.name]


def killed_by_its_pid(factory):
    @asynccontextmanager
    async def opened(context):
        async with factory(context) as client:
            yield client, lambda: os.kill(client.statistics().pid, signal.SIGKILL)

    return opened


def test_the_worker_client(zygote):
    async def main():
        async with workers(zygote) as (stage_, factory):
            return await check_stage_client(
                factory,
                make_dead=killed_by_its_pid(factory),
                stage=stage_,
                long_params={"slow": True},
                session=lambda request, piece: StageInput(token_ids=(request + 1, piece + 1)),
                bad_params=["fast"],
                bad_inputs=[StageInput(text="no tokens"), StageInput(data={"object": object()})],
                method=("add", (1, 2)),
                slow_method=("nap", (60,)),
                expect=lambda index: tuple(range(10 * index + 1, 10 * index + 4 + index)),
                programs=20,
            )

    assert numbers_of(on_a_real_clock(main)) == []


# ---- clients written for asyncio


class AsyncioEngine:
    """Says the tokens of its input again, one per output; four requests at a time."""

    def __init__(self):
        self.outputs = asyncio.Queue()
        self.slots = asyncio.Semaphore(4)
        self.inputs = {}
        self.tasks = {}
        self.dead = asyncio.Event()

    async def add_request_async(self, request):
        if request.input.token_ids is None and not self.inputs.get(request.request_id):
            raise ValueError("expected token ids")
        if request.request_id not in self.tasks:
            self.inputs[request.request_id] = asyncio.Queue()
            self.tasks[request.request_id] = asyncio.ensure_future(self.work(request.request_id))
        self.inputs[request.request_id].put_nowait(request)

    async def work(self, request_id):
        async with self.slots:
            last = False
            while not last:
                request = await self.inputs[request_id].get()
                last = request.last
                for token in (request.input.token_ids or ()) * (1000 if request.params.get("slow") else 1):
                    await asyncio.sleep(0.001)
                    self.put(StageOutput(request_id=request_id, token_ids=(token,)))
                if request.segment_end and not last:
                    self.put(StageOutput(request_id=request_id, segment_end=True))
            self.put(StageOutput(request_id=request_id, finish_reason="stop"))
        del self.tasks[request_id], self.inputs[request_id]

    def put(self, output):
        self.outputs.put_nowait(SimpleNamespace(outputs=[output]))

    async def get_output_async(self):
        getting = asyncio.ensure_future(self.outputs.get())
        dying = asyncio.ensure_future(self.dead.wait())
        try:
            await asyncio.wait((getting, dying), return_when=asyncio.FIRST_COMPLETED)
            self.check_health()
            return getting.result()
        finally:
            getting.cancel()
            dying.cancel()

    async def abort_requests_async(self, request_ids):
        for request_id in request_ids:
            if task := self.tasks.pop(request_id, None):
                task.cancel()
                self.inputs.pop(request_id)
        await asyncio.sleep(0)

    async def collective_rpc_async(self, method, timeout=None, args=(), kwargs=None):
        if method == "wait":
            await asyncio.sleep(*args)
        elif method != "echo":
            raise AttributeError(method)
        return list(args)

    def check_health(self):
        if self.dead.is_set():
            raise RuntimeError("killed")

    def shutdown(self):
        pass


@pytest.mark.parametrize("takes_updates", [False, True])
def test_a_client_written_for_asyncio(takes_updates):
    engines = []

    async def make(context):
        engines.append(AsyncioEngine())
        return engines[-1]

    factory = asyncio_client_factory(make, convert_output=lambda raw: raw, takes_updates=takes_updates)

    @asynccontextmanager
    async def mortal(context):
        async with factory(context) as client:
            yield client, engines[-1].dead.set

    async def main():
        return await check_stage_client(
            factory,
            make_dead=mortal,
            long_params={"slow": True},
            session=(lambda request, piece: StageInput(token_ids=(request + 1, piece + 1))) if takes_updates else None,
            bad_inputs=[StageInput(text="no tokens")],
            method=("echo", (1,)),
            slow_method=("wait", (1000,)),
            expect=lambda index: tuple(range(10 * index + 1, 10 * index + 4 + index)),
            skip={16: "an object of the engine's own class is handed to the engine as it is"},
            programs=20,
        )

    assert numbers_of(on_a_real_clock(main)) == ([16] if takes_updates else [12, 13, 16])


# ---- vLLM


def test_the_vllm_client(vllm_zygote, tiny_model):
    engines = Engines(vllm_zygote, tiny_model)
    params = {"temperature": 0, "ignore_eos": True}

    async def main():
        async with open_launcher(zygote=vllm_zygote) as launcher:
            factory = vllm_client_factory(launcher)
            return await check_stage_client(
                factory,
                make_dead=killed_by_its_pid(factory),
                stage=engines.stage(engine_args={"max_num_seqs": 3}),
                params={**params, "max_tokens": 4},
                long_params={**params, "max_tokens": 900},
                session=lambda request, piece: StageInput(token_ids=(request + 1, piece + 1)),
                bad_params=[{"temprature": 1}, {"max_tokens": -1}, 5],
                bad_inputs=[StageInput(token_ids=()), StageInput(token_ids=(1,) * 2000)],
                method=("is_sleeping", ()),
                storm=8,
                timeout=20.0,
                programs=5,
                thorough=False,
            )

    assert numbers_of(on_a_real_clock(main)) == []
