"""Whole pipelines of real engine and worker processes: what is promised, tried with real kills and real clocks."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pytest
import trio
import trio.testing

import omni_trio
from omni_trio import (
    BridgeFailed,
    EngineDied,
    InvalidRequest,
    Output,
    Pipeline,
    StageInput,
    StageSpec,
    StartupFailed,
    bridge,
)
from omni_trio.engines.process import Zygote, open_launcher
from omni_trio.testing.tiny_model import make_tiny_model

pytestmark = pytest.mark.engine

HERE = Path(__file__).parent
ENGINE = {
    "dtype": "bfloat16",
    "max_model_len": 1024,
    "kv_cache_memory_bytes": 32 << 20,
    "enforce_eager": True,
    "max_num_seqs": 128,
}


@pytest.fixture(scope="session")
def models(tmp_path_factory) -> tuple[str, str]:
    folder = tmp_path_factory.mktemp("models")
    thinker = make_tiny_model(folder / "thinker", seed=1)
    talker = make_tiny_model(folder / "talker", seed=2)
    return str(thinker), str(talker)


def llm(name: str, model: str, **fields) -> StageSpec:
    sampling = {"temperature": 0.0, "ignore_eos": True} | fields.pop("sampling", {})
    return StageSpec(name=name, model=model, engine_args=ENGINE, sampling=sampling, **fields)


def three_stages(models: tuple[str, str], *, thinker_tokens: int = 16, talker_tokens: int = 24) -> Pipeline:
    return Pipeline(
        [
            llm("thinker", models[0], sampling={"max_tokens": thinker_tokens}, final_output=True),
            llm("talker", models[1], sampling={"max_tokens": talker_tokens}, modality="tokens", final_output=True),
            StageSpec(
                name="vocoder",
                kind="worker",
                target="worker_targets:tone",
                modality="audio",
                path=(str(HERE),),
            ),
        ]
    )


def run(main, seconds: float = 120):
    async def bounded():
        with trio.fail_after(seconds):
            return await main()

    return trio.run(bounded)


@pytest.fixture
def leftovers(vllm_zygote: Zygote, monkeypatch):
    """Checks at the end that nothing is left: processes of ours, shared memory, temporary files."""
    trio.run(one_child_of, vllm_zygote)  # so that all processes of the zygote itself are there
    with tempfile.TemporaryDirectory(prefix="t-") as folder:
        monkeypatch.setattr(tempfile, "tempdir", folder)
        before = our_processes(), set(os.listdir("/dev/shm"))
        yield Path(folder)
        assert not our_processes() - before[0]
        assert not set(os.listdir("/dev/shm")) - before[1]
        assert not os.listdir(folder)


async def one_child_of(zygote: Zygote) -> None:
    async with open_launcher(zygote=zygote) as launcher, launcher.open_child("first", "os:getpid", {}) as child:
        await child.wait()


def our_processes() -> set[int]:
    return {child.pid for child in psutil.Process().children(recursive=True)}


def test_100_requests_through_two_engines_equal_vllms_own_offline_llm(models, vllm_zygote: Zygote):
    prompts = [[(7 * index + position) % 256 for position in range(5 + index % 40)] for index in range(100)]
    task = {"models": models, "max_tokens": [16, 24], "prompts": prompts}
    process = subprocess.run(
        [sys.executable, HERE / "offline_reference.py"],
        input=json.dumps(task),
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert process.returncode == 0, process.stderr
    (thought, thoughts), (said, _) = json.loads(process.stdout.splitlines()[-1])

    async def main():
        results, streamed = {}, {}

        async def one(runtime, index):
            async with runtime.request(prompts[index]) as request:
                deltas: dict[str, list[Output]] = {"thinker": [], "talker": [], "vocoder": []}
                async for event in request:
                    deltas[event.stage].append(event)
            streamed[index] = deltas
            results[index] = {name: [t for d in parts for t in d.token_ids] for name, parts in deltas.items()}

        async with omni_trio.open_runtime(three_stages(models), zygote=vllm_zygote) as runtime:
            async with trio.open_nursery() as nursery:
                for index in range(len(prompts)):
                    nursery.start_soon(one, runtime, index)
            assert runtime.stats().finished == 100
        for index in range(len(prompts)):
            assert results[index]["thinker"] == thought[index]
            assert results[index]["talker"] == said[index]
            pieces = [d.delta for d in streamed[index]["vocoder"] if d.delta is not None]
            audio = [sample for piece in pieces for sample in piece.tolist()]
            assert audio == [float(token) for token in said[index]]
            text = "".join(d.text for d in streamed[index]["thinker"])
            assert text == thoughts[index]
            last = streamed[index]["thinker"][-1]
            assert last.finish_reason == "length"
            assert last.metrics.num_tokens_in == len(prompts[index])
            assert last.metrics.num_tokens_out == 16

    run(main)


@pytest.mark.parametrize("victim", ["thinker", "talker", "vocoder"])
def test_killing_a_replica_fails_every_request_once_and_leaves_nothing(models, vllm_zygote: Zygote, leftovers, victim):
    async def main():
        ends: dict[int, list[Exception]] = {index: [] for index in range(16)}
        told: list[float] = []
        pipeline = three_stages(models, thinker_tokens=900, talker_tokens=900)
        with pytest.raises(EngineDied) as caught:
            async with omni_trio.open_runtime(pipeline, zygote=vllm_zygote) as runtime:
                begun = trio.Event()

                async def one(index):
                    try:
                        async with runtime.request(f"number {index}") as request:
                            async for _ in request:
                                begun.set()
                    except EngineDied as error:
                        ends[index].append(error)
                        told.append(trio.current_time())

                async with trio.open_nursery() as nursery:
                    for index in ends:
                        nursery.start_soon(one, index)
                    await begun.wait()
                    (replica,) = next(s for s in runtime.stats().stages if s.stage == victim).replicas
                    killed = trio.current_time()
                    os.kill(replica.client.pid, signal.SIGKILL)
        assert caught.value.stage == victim
        assert caught.value.exit_code == -signal.SIGKILL
        assert "SIGKILL" in str(caught.value)
        for index, errors in ends.items():
            (error,) = errors
            assert (error.stage, error.replica_id, error.exit_code) == (victim, 0, -signal.SIGKILL)
            assert error.request_id is not None, index
        assert max(told) - killed < 1

    run(main)


def test_killing_the_head_takes_engine_and_worker_with_it(models, tmp_path):
    (tmp_path / "tmp").mkdir()
    shared_memory = set(os.listdir("/dev/shm"))
    head = subprocess.Popen(
        [sys.executable, HERE / "engines_head.py", models[0]],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"TMPDIR": str(tmp_path / "tmp"), "PYTHONPATH": str(HERE)},
    )
    try:
        line = head.stdout.readline()
        pids = json.loads(line)
        family = [psutil.Process(pid) for pid in pids] + psutil.Process(head.pid).children(recursive=True)
        assert len(pids) == 2
    finally:
        head.send_signal(signal.SIGKILL)
        head.wait()
        head.stdout.close()
    _, alive = psutil.wait_procs(family, timeout=5)
    assert not alive
    deadline = time.monotonic() + 5
    while os.listdir(tmp_path / "tmp") or set(os.listdir("/dev/shm")) - shared_memory:
        assert time.monotonic() < deadline, (os.listdir(tmp_path / "tmp"), os.listdir("/dev/shm"))


def test_leaving_a_request_frees_it_in_the_engine_before_the_block_returns(models, vllm_zygote: Zygote):
    async def main():
        pipeline = Pipeline([llm("thinker", models[0], sampling={"max_tokens": 1000})])
        async with omni_trio.open_runtime(pipeline, zygote=vllm_zygote) as runtime:

            def engine() -> dict:
                (replica,) = runtime.stats().stages[0].replicas
                return replica.client.extra

            async with runtime.request("the one that stays") as stays:
                async with trio.open_nursery() as nursery:
                    for index in range(3):
                        nursery.start_soon(leave_after_one_output, runtime, index)
                # All three are gone for the engine itself: what it says next counts one request.
                left = runtime.stats().stages[0].replicas[0]
                assert left.requests == 1
                await anext(stays)
                await anext(stays)
                assert (engine()["engine_running"], engine()["engine_waiting"]) == (1, 0)
            assert runtime.stats().stages[0].replicas[0].client.running == 0

    async def leave_after_one_output(runtime, index):
        async with runtime.request(f"leaving {index}") as request:
            async for _ in request:
                break

    run(main)


def test_200_aborts_in_a_row_and_then_a_request_completes(models, vllm_zygote: Zygote):
    async def main():
        pipeline = Pipeline([llm("thinker", models[0], sampling={"max_tokens": 1000})])
        async with omni_trio.open_runtime(pipeline, zygote=vllm_zygote) as runtime:
            for index in range(200):
                async with runtime.request(f"number {index}") as request:
                    async for _ in request:
                        break
            result = await runtime.generate("the last", sampling_params={"max_tokens": 50})
            assert len(result["thinker"].token_ids) == 50
            stats = runtime.stats()
            assert (stats.in_flight, stats.aborted, stats.finished) == (0, 200, 1)
            assert stats.stages[0].replicas[0].client.running == 0

    run(main)


def test_two_engines_are_ready_soon_and_their_folder_is_private_and_goes(models, vllm_zygote: Zygote, leftovers):
    async def main():
        start = trio.current_time()
        async with omni_trio.open_runtime(three_stages(models), zygote=vllm_zygote):
            took = trio.current_time() - start
            (folder,) = leftovers.iterdir()
            assert folder.stat().st_mode & 0o777 == 0o700
            sockets = [path for path in folder.rglob("*") if path.is_socket()]
            assert sockets
        assert took < 10
        assert not folder.exists()

    run(main)


@pytest.mark.parametrize("after", [0.0, 0.1, 0.3])
def test_start_up_can_be_cancelled(models, vllm_zygote: Zygote, leftovers, after):
    async def main():
        with trio.move_on_after(after) as scope:
            async with omni_trio.open_runtime(three_stages(models), zygote=vllm_zygote):
                await trio.sleep_forever()
        assert scope.cancelled_caught
        assert trio.current_time() - scope.deadline < 0.5

    run(main)


def test_a_cold_start_can_be_cancelled_while_vllm_is_being_imported(models, leftovers):
    program = (
        "import sys, time, trio, omni_trio\n"
        "from omni_trio import Pipeline, StageSpec\n"
        "async def main():\n"
        "    with trio.move_on_after(1.5) as scope:\n"
        "        async with omni_trio.open_runtime(Pipeline([StageSpec(name='a', model=sys.argv[1])])):\n"
        "            await trio.sleep_forever()\n"
        "    print(trio.current_time() - scope.deadline)\n"
        "trio.run(main)\n"
    )
    process = subprocess.run(
        [sys.executable, "-c", program, models[0]],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env=os.environ | {"TMPDIR": str(leftovers)},
    )
    assert process.returncode == 0, process.stderr
    assert float(process.stdout) < 0.5


def test_a_model_that_is_not_there(models, vllm_zygote: Zygote, leftovers):
    async def main():
        pipeline = Pipeline([llm("thinker", models[0]), llm("talker", "/nowhere/at/all")])
        with pytest.raises(StartupFailed, match="/nowhere/at/all") as caught:
            async with omni_trio.open_runtime(pipeline, zygote=vllm_zygote):
                pytest.fail("it must not open")
        assert (caught.value.stage, caught.value.replica_id) == ("talker", 0)
        assert caught.value.phase

    run(main)


@bridge(reads=["text"])
def picky(context) -> StageInput | None:
    if context.prompt.text == "raise":
        raise ValueError("no")
    return None if context.prompt.text == "nothing" else StageInput(text=context.text[:20])


def test_bad_requests_hurt_nobody(models, vllm_zygote: Zygote):
    async def main():
        pipeline = Pipeline(
            [
                llm("thinker", models[0], sampling={"max_tokens": 8}),
                StageSpec(
                    name="embedder",
                    kind="pooling",
                    model=models[1],
                    engine_args=ENGINE | {"convert": "embed"},
                    bridge=picky,
                ),
            ]
        )
        bad = [
            ("", {}, InvalidRequest, "empty"),
            (list(range(256)) * 5, {}, InvalidRequest, "1024"),
            ([100_000], {}, InvalidRequest, "100000"),
            ("x", {"request_id": ""}, InvalidRequest, "empty"),
            ("x", {"request_id": "stays"}, InvalidRequest, "in flight"),
            ("x", {"sampling_params": {"temprature": 1.0}}, InvalidRequest, "temperature"),
            ("x", {"sampling_params": {"temperature": -1.0}}, InvalidRequest, "temperature"),
            ("x", {"sampling_params": {"embedder": {"temperature": 1.0}}}, InvalidRequest, "pooling"),
            ("x", {"sampling_params": {"n": 2}}, InvalidRequest, "n"),
            ("raise", {}, BridgeFailed, "ValueError: no"),
            ("nothing", {}, BridgeFailed, "returned nothing"),
        ]
        async with omni_trio.open_runtime(pipeline, zygote=vllm_zygote) as runtime:
            async with runtime.request("hello", request_id="stays", sampling_params={"max_tokens": 900}) as stays:
                for prompt, options, kind, words in bad:
                    with pytest.raises(kind, match=words):
                        await runtime.generate(prompt, **options)
                result = await runtime.generate("fine")
                assert result["embedder"].value.shape == (128,)
                assert runtime.stats().in_flight == 1
                assert (await stays.result())["embedder"].value.shape == (128,)
            assert runtime.health().status == "ok"

    run(main)


class CountSteps(trio.abc.Instrument):
    def __init__(self) -> None:
        self.steps = 0

    def before_task_step(self, task) -> None:
        self.steps += 1


def test_a_real_idle_runtime_sleeps(models, vllm_zygote: Zygote):
    async def main():
        async with omni_trio.open_runtime(three_stages(models), zygote=vllm_zygote) as runtime:
            await runtime.generate("warm up")
            await trio.testing.wait_all_tasks_blocked(0.05)
            counter = CountSteps()
            trio.lowlevel.add_instrument(counter)
            cpu = time.process_time()
            await trio.sleep(3)
            cpu = time.process_time() - cpu
            trio.lowlevel.remove_instrument(counter)
            assert counter.steps <= 1
            assert cpu < 3 * 0.005

    run(main)
