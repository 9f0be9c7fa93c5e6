"""Worker stages: real processes, behind their client alone and behind the runtime."""

from __future__ import annotations

import math
import os
import signal
import time
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import psutil
import pytest
import trio
import trio.testing

from omni_trio._api import open_runtime
from omni_trio.errors import EngineDied, InvalidRequest, RequestError, StageFailed, StartupFailed
from omni_trio.messages import StageInput, StageRequest
from omni_trio.pipeline import Pipeline, StageSpec

HERE = str(Path(__file__).parent)


def worker(target: str, *, name: str = "worker", **fields) -> StageSpec:
    fields.setdefault("start_timeout", 30.0)
    return StageSpec(name=name, kind="worker", target=f"worker_targets:{target}", path=(HERE,), **fields)


@asynccontextmanager
async def running(zygote, target: str, **fields):
    """A runtime of one worker stage."""
    async with open_runtime(Pipeline([worker(target, **fields)]), zygote=zygote) as runtime:
        yield runtime


@asynccontextmanager
async def client_of(zygote, target: str, **fields):
    async with running(zygote, target, **fields) as runtime:
        # The runtime's reader takes this client's outputs, so only what it is asked directly is tried here.
        yield runtime._orchestrator.pools[0].replicas[0].client


def run(main, seconds: float = 60):
    async def bounded():
        with trio.fail_after(seconds):
            return await main()

    return trio.run(bounded)


def family() -> set[int]:
    return {child.pid for child in psutil.Process().children(recursive=True)}


# ---- what goes in and comes out


def test_a_plain_function(zygote):
    async def main():
        async with running(zygote, "shout", options={"mark": "?"}, modality="text") as runtime:
            assert (await runtime.generate("hello")).text == "HELLO?"

    run(main)


def test_many_requests_at_once_each_get_their_own(zygote):
    async def main():
        async with running(zygote, "shout", modality="text", replicas=2) as runtime:
            results = {}

            async def one(index):
                results[index] = (await runtime.generate(f"n{index}")).text

            async with trio.open_nursery() as nursery:
                for index in range(100):
                    nursery.start_soon(one, index)
            assert results == {index: f"N{index}!" for index in range(100)}
            replicas = runtime.stats().stages[0].replicas
            assert all(replica.finished > 10 for replica in replicas)

    run(main)


def test_pieces_stream_in_and_replies_stream_out(zygote):
    async def main():
        pipeline = Pipeline(
            [
                StageSpec(name="source", kind="simulated", options={"tokens": 5, "token_time": 0.01}),
                worker("Pieces", feed="output", modality="tokens"),
            ]
        )
        async with open_runtime(pipeline, zygote=zygote) as runtime:
            async with runtime.request([1, 2]) as request:
                events = [event async for event in request]
            outputs = [event for event in events if event.stage == "worker"]
            assert [token for output in outputs for token in output.token_ids] == [2, 3, 4, 5, 6]
            assert len(outputs) > 1
            # The state of a request goes from piece to piece.
            assert [o.data["count"] for o in outputs if o.data][-1] == 5
            assert outputs[-1].finish_reason == "stop"

    run(main)


def test_a_worker_may_end_a_request_before_its_input_is_complete(zygote):
    async def main():
        pipeline = Pipeline(
            [
                StageSpec(
                    name="source",
                    kind="simulated",
                    options={"tokens": 20, "token_time": 0.01},
                    final_output=True,
                ),
                worker("Pieces", feed="output", modality="tokens"),
            ]
        )
        async with open_runtime(pipeline, zygote=zygote) as runtime:
            result = await runtime.generate([0] * 10)
            assert result["worker"].token_ids == (10, 11, 12, 13)
            assert result["worker"].finish_reason == "unlucky"
            assert len(result["source"].token_ids) == 20

    run(main)


def test_arrays_travel_unchanged_however_large(zygote):
    async def main():
        rng = np.random.default_rng(0)
        data = {
            "large": rng.standard_normal((1250, 1000)),  # 10 MB
            "small": np.arange(5, dtype=np.int16),
            "scalar": 3.5,
        }
        async with running(zygote, "double") as runtime:
            result = await runtime.generate(StageInput(data=data))
        got = result["worker"].data
        assert np.array_equal(got["large"], data["large"] * 2)
        assert got["small"].dtype == np.int16
        assert got["small"].tolist() == [0, 2, 4, 6, 8]
        assert got["scalar"] == 7

    run(main)


def test_torch_module(zygote):
    async def main():
        options = {
            "module": "torch.nn:Embedding",
            "module_options": {"num_embeddings": 10, "embedding_dim": 3},
            "output": "latent",
            "extra": {"layer": 4},
        }
        spec = StageSpec(
            name="worker",
            kind="worker",
            target="omni_trio.worker:TorchModuleWorker",
            options=options,
            modality="latent",
        )
        async with open_runtime(Pipeline([spec]), zygote=zygote) as runtime:
            result = await runtime.generate([1, 2, 1])
        latent = result["worker"].value
        assert latent.shape == (3, 3)
        assert np.array_equal(latent[0], latent[2])
        assert not np.array_equal(latent[0], latent[1])
        assert result["worker"].data["layer"] == 4

    run(main)


def test_parameters_are_merged_over_the_defaults(zygote):
    async def main():
        async with running(zygote, "Acts", modality="text", sampling={"speed": 1, "pitch": 2}) as runtime:
            assert (await runtime.generate("say")).text == "say 1"
            assert (await runtime.generate("say", sampling_params={"speed": 3})).text == "say 3"
            for wrong in (7, {1: 2}):
                with pytest.raises(InvalidRequest, match=r"mapping|string"):
                    await runtime.generate("say", sampling_params=wrong)

    run(main)


def test_environment_and_devices(zygote):
    async def main():
        fields = {"env": {"SPEED": "11"}, "devices": ("4", "5"), "replicas": 2, "modality": "text"}
        async with running(zygote, "environment", **fields) as runtime:
            assert {(await runtime.generate("x")).text for _ in range(2)} == {"11 4", "11 5"}

    run(main)


# ---- errors of one request


@pytest.mark.parametrize(
    ("target", "what", "words"),
    [
        ("Acts", "unsendable", "object"),
        ("Acts", "wrong", "pairs of an item"),
        ("Acts", "fail", "no such voice"),
        ("nonsense", "x", "returned a int"),
    ],
)
def test_an_error_is_one_requests_and_the_worker_goes_on(zygote, target, what, words):
    async def main():
        async with running(zygote, target, modality="text") as runtime:
            with pytest.raises(StageFailed, match=words) as caught:
                await runtime.generate(what)
            assert (caught.value.stage, caught.value.replica_id) == ("worker", 0)
            if target == "Acts":
                assert (await runtime.generate("say")).text == "say None"
            assert runtime.health().status == "ok"

    run(main)


@pytest.mark.parametrize("late", [False, True])
def test_in_a_batch_only_the_guilty_fail_as_long_as_nothing_was_replied(zygote, late):
    async def main():
        async with running(zygote, "Batches", options={"late": late}) as runtime:
            ends = {}

            async def one(name):
                try:
                    ends[name] = (await runtime.generate(name))["worker"].data["size"]
                except StageFailed as error:
                    ends[name] = error

            async with trio.open_nursery() as nursery:
                for name in ("first", "a", "bad", "b"):
                    nursery.start_soon(one, name)
            assert "a bad item" in str(ends.pop("bad"))
            failed = [name for name, end in ends.items() if isinstance(end, Exception)]
            assert late or not failed

    run(main)


def test_requests_that_wait_are_worked_on_together(zygote):
    async def main():
        async with running(zygote, "Batches") as runtime:
            sizes = []

            async def one(index):
                sizes.append((await runtime.generate(f"{index}"))["worker"].data["size"])

            async with trio.open_nursery() as nursery:
                for index in range(17):
                    nursery.start_soon(one, index)
            assert max(sizes) == 8

    run(main)


def test_input_that_can_not_be_sent(zygote):
    async def main():
        async with running(zygote, "double") as runtime:
            with pytest.raises(InvalidRequest, match="can not be sent"):
                await runtime.generate(StageInput(data={"x": object()}))

    run(main)


# ---- abort


def test_an_abort_takes_effect_between_replies(zygote):
    async def main():
        async with running(zygote, "Endless", modality="tokens") as runtime:
            for _ in range(3):
                async with runtime.request("x") as request:
                    async for _ in request:
                        break
                client = runtime.stats().stages[0].replicas[0].client
                assert (client.running, client.waiting) == (0, 0)

    run(main)


def test_an_abort_of_a_request_that_waits(zygote):
    async def main():
        async with running(zygote, "Endless", modality="tokens") as runtime:
            async with runtime.request("works") as works:
                await anext(works)
                async with runtime.request("waits"):
                    pass
                assert runtime.stats().in_flight == 1
                await anext(works)

    run(main)


# ---- death


@pytest.mark.parametrize(
    ("what", "code", "words"),
    [("kill", -signal.SIGKILL, "SIGKILL"), ("exit", 7, "the last words of a worker")],
)
def test_death_is_told_with_its_cause(zygote, what, code, words):
    before = family()

    async def main():
        with pytest.raises(EngineDied, match=words) as caught:
            async with running(zygote, "Acts", modality="text") as runtime:
                with pytest.raises(EngineDied) as told:
                    await runtime.generate(what)
                assert told.value.exit_code == code
                await trio.sleep_forever()
        assert caught.value.exit_code == code

    run(main)
    assert family() == before


def test_death_while_idle_is_noticed(zygote):
    async def main():
        with pytest.raises(EngineDied, match="SIGKILL"):
            async with running(zygote, "Acts") as runtime:
                os.kill(runtime.stats().stages[0].replicas[0].client.pid, signal.SIGKILL)
                with trio.fail_after(1):
                    await trio.sleep_forever()

    run(main)


def test_a_worker_that_hangs_is_found_and_killed(zygote):
    async def main():
        with pytest.raises(EngineDied, match="no longer answers") as caught:
            async with running(zygote, "Acts", probe_interval=0.1, probe_timeout=0.3) as runtime:
                with pytest.raises(EngineDied):
                    await runtime.generate("hang")
                await trio.sleep_forever()
        assert caught.value.exit_code == -signal.SIGKILL

    run(main)


# ---- calls


def test_calls(zygote):
    async def main():
        async with running(zygote, "Acts") as runtime:

            async def call(method, *args, **kwargs):
                (answer,) = await runtime.collective_rpc(method, args, kwargs)
                return answer

            assert (await call("add", 1, b=2)).result == 3
            assert (await call("add", np.arange(3))).result.tolist() == [0, 1, 2]
            for method, words in (
                ("explode", "no fuse"),
                ("nothing", "no method"),
                ("_secret", "no method"),
                ("process", "no method"),
                ("close", "no method"),
            ):
                error = (await call(method)).error
                assert isinstance(error, StageFailed)
                assert words in str(error)
            assert "can not be sent" in str((await call("add", object())).error)

    run(main)


def test_a_call_that_waits_fails_when_the_worker_dies(zygote):
    async def main():
        with pytest.raises(EngineDied):
            async with running(zygote, "Endless", modality="tokens") as runtime:
                async with runtime.request("x") as request:
                    await anext(request)
                    pid = runtime.stats().stages[0].replicas[0].client.pid
                    async with trio.open_nursery() as nursery:

                        async def ask():
                            # A method is called between two batches, and this batch has no end.
                            client = runtime._orchestrator.pools[0].replicas[0].client
                            with pytest.raises(EngineDied):
                                await client.call("add", (1,))

                        nursery.start_soon(ask)
                        await trio.testing.wait_all_tasks_blocked()
                        os.kill(pid, signal.SIGKILL)

    run(main)


# ---- start and end


@pytest.mark.parametrize(
    ("target", "fields", "words"),
    [
        ("nowhere", {}, "nowhere"),
        ("Broken", {}, "there is no voice here"),
        ("Acts", {"options": {"unknown": 1}}, "unknown"),
        ("Slow", {"start_timeout": 1.0}, "start_timeout"),
    ],
)
def test_a_start_that_fails_says_why_and_leaves_nothing(zygote, target, fields, words):
    before = family()

    async def main():
        with pytest.raises(StartupFailed, match=words) as caught:
            async with running(zygote, target, **fields):
                pytest.fail("it must not open")
        assert (caught.value.stage, caught.value.replica_id, caught.value.phase) == ("worker", 0, "load")

    run(main)
    assert family() == before


def test_a_module_that_is_not_there(zygote):
    async def main():
        spec = StageSpec(name="worker", kind="worker", target="no_such_module:thing")
        with pytest.raises(StartupFailed, match="no_such_module"):
            async with open_runtime(Pipeline([spec]), zygote=zygote):
                pytest.fail("it must not open")

    run(main)


def test_a_module_in_one_of_the_stages_folders(zygote, tmp_path):
    (tmp_path / "only_here.py").write_text("def answer(item):\n    return 'found'\n", encoding="utf-8")

    async def main():
        spec = StageSpec(
            name="worker", kind="worker", target="only_here:answer", path=(str(tmp_path),), modality="text"
        )
        async with open_runtime(Pipeline([spec]), zygote=zygote) as runtime:
            assert (await runtime.generate("x")).text == "found"

    run(main)


def test_a_worker_that_will_not_end_is_made_to_within_the_budget(zygote):
    before = family()

    async def main():
        async with open_runtime(
            Pipeline([worker("Stubborn", modality="text")]), zygote=zygote, shutdown_deadline=1.0
        ) as runtime:
            await runtime.generate("say")
        # Both polite ways, 0.3 s each, and the kill.

    start = time.monotonic()
    run(main)
    assert time.monotonic() - start < 10
    assert family() == before


def test_updates_of_what_the_stage_does_not_know_are_ignored(zygote):
    async def main():
        async with client_of(zygote, "Pieces") as client:
            late = StageRequest(request_id="never", input=StageInput(token_ids=(1,)), deadline=math.inf)
            await client.update(late)
            assert client.statistics().waiting == 0
            await client.abort(["never"])

    run(main)


def test_after_the_end_every_call_says_so(zygote):
    async def main():
        async with client_of(zygote, "Pieces") as client:
            pass
        request = StageRequest(request_id="late", input=StageInput(token_ids=(1,)))
        for ask in (
            lambda: client.submit(request),
            lambda: client.update(request),
            lambda: client.abort(["late"]),
            lambda: client.receive(),
            lambda: client.call("add", (1,)),
        ):
            with pytest.raises(RequestError, match=r"closed|exited"):
                await ask()

    run(main)
