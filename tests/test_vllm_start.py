"""How real vLLM engines start, fail to, and end."""

from __future__ import annotations

import os
import re
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing

from omni_trio.engines.process import Zygote, open_launcher
from omni_trio.engines.vllm import vllm_client_factory
from omni_trio.errors import ConfigError, EngineDied, StartupFailed
from vllm_support import (
    PROMPTS,
    Engines,
    collect,
    context,
    greedy,
    submit,
    with_limit,
)

pytestmark = [
    pytest.mark.engine,
    # vLLM and what it imports have warnings of their own.
    pytest.mark.filterwarnings("default"),
]


@pytest.fixture
def engines(vllm_zygote: Zygote, tiny_model: Path) -> Engines:
    return Engines(vllm_zygote, tiny_model)


def test_two_engines_start_side_by_side_and_share_a_frontend(engines):
    stage = engines.stage(replicas=2)
    phases: list[tuple[int, str]] = []

    async def main() -> None:
        async with open_launcher(zygote=engines.zygote) as launcher:
            factory = vllm_client_factory(launcher)
            clients: dict[int, Any] = {}
            up = trio.Event()

            async def open_one(replica_id: int) -> None:
                report = lambda phase: phases.append((replica_id, phase))  # noqa: E731
                async with factory(context(stage, replica_id, report)) as client:
                    clients[replica_id] = client
                    if len(clients) == 2:
                        up.set()
                    await up.wait()
                    await submit(client, f"of {replica_id}", PROMPTS[replica_id], greedy(client))
                    outputs = await collect(client, f"of {replica_id}")
                    assert list(outputs) == [f"of {replica_id}"]

            begun = time.perf_counter()
            with trio.fail_after(60):
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(open_one, 0)
                    nursery.start_soon(open_one, 1)
                    await up.wait()
                    print(f"two engines ready after {time.perf_counter() - begun:.2f} s")
            assert clients[0]._frontend is clients[1]._frontend

    trio.run(main)
    for replica_id in (0, 1):
        assert [phase for r, phase in phases if r == replica_id] == ["spawn", "handshake", "load", "ready"]


@pytest.mark.parametrize("phase", ["spawn", "handshake", "load"])
def test_a_start_is_cancelled_at_once_in_every_phase(engines, phase):
    async def main() -> None:
        async with open_launcher(zygote=engines.zygote) as launcher:
            factory = vllm_client_factory(launcher)
            with trio.CancelScope() as scope:

                def report(name: str) -> None:
                    if name == phase:
                        scope.cancel()

                async with factory(context(engines.stage(), report=report)):
                    pytest.fail("it started")
            assert scope.cancelled_caught
            assert list(launcher.directory.iterdir()) == []

    with_limit(main, 5)


def test_a_start_that_takes_too_long_fails(engines):
    error = engines.fails_to_start(start_timeout=0.05)
    assert "start_timeout = 0.05" in str(error)
    assert error.phase in ("spawn", "handshake", "load")


def test_a_missing_model_is_named(engines):
    error = engines.fails_to_start(model="/no/such/model")
    assert (error.stage, error.stage_id, error.replica_id) == ("thinker", 3, 0)
    assert "/no/such/model" in error.message
    assert error.phase == "config"
    assert isinstance(error.__cause__, ConfigError)


def test_an_unknown_engine_argument_is_named_with_the_nearest(engines):
    error = engines.fails_to_start(engine_args={"max_modl_len": 10})
    assert "no engine argument 'max_modl_len'; did you mean 'max_model_len'?" in error.message
    assert isinstance(error.__cause__, ConfigError)
    assert error.__cause__.key == "stages.thinker.engine_args.max_modl_len"


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"dtype": "float17"}, "float17"),
        ({"max_model_len": 1_000_000}, "1000000|4096"),
        ({"data_parallel_size": 2}, "replicas"),
        ({"runner": "pooling"}, "runner: 'pooling' is not for stages of kind 'llm'"),
        ({"hf_overrides": {1: object()}}, "hf_overrides"),
    ],
)
def test_a_bad_value_is_named(engines, args, message):
    error = engines.fails_to_start(engine_args=args)
    assert error.phase == "config"
    assert re.search(message, error.message), error.message


def test_a_stages_own_bad_parameters_fail_its_start(engines):
    error = engines.fails_to_start(sampling={"temprature": 0})
    assert error.message.startswith("stages.thinker.sampling: ")
    assert "did you mean 'temperature'" in error.message
    assert error.log_tail == "", "the engine has nothing to say about it"


def test_weights_that_do_not_fit_fail_the_load_with_their_error_and_log(engines, tmp_path):
    broken_model = tmp_path / "broken"
    shutil.copytree(engines.model, broken_model)
    (broken_model / "model.safetensors").write_bytes(b"\x08\0\0\0\0\0\0\0nonsense")
    error = engines.fails_to_start(model=str(broken_model))
    assert error.phase == "load"
    assert "safetensor" in error.message.lower() or "header" in error.message.lower()
    assert "SafetensorError" in error.log_tail


def test_an_engine_that_is_killed_while_it_loads_fails_the_start(engines):
    stage = engines.stage()

    async def main() -> None:
        async with open_launcher(zygote=engines.zygote) as launcher:

            def report(phase: str) -> None:
                if phase == "load":
                    (child,) = launcher._children.values()
                    child.signal(signal.SIGKILL)

            async with vllm_client_factory(launcher)(context(stage, report=report)):
                pytest.fail("it started")

    with pytest.raises(StartupFailed, match="SIGKILL") as caught:
        with_limit(main, 20)
    assert caught.value.phase == "load"


def test_the_bodys_own_error_comes_out_as_it_is_and_nothing_is_left_behind(engines):
    before = set(os.listdir("/dev/shm"))
    seen: list[int] = []
    directories: list[Path] = []

    async def main() -> None:
        async with open_launcher(zygote=engines.zygote) as launcher:
            directories.append(launcher.directory)
            async with vllm_client_factory(launcher)(context(engines.stage())) as client:
                seen.append(client.statistics().pid)
                await submit(client, "a", PROMPTS[0], greedy(client, 900))
                raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        with_limit(main, 20)
    assert not Path(f"/proc/{seen[0]}").exists()
    assert not directories[0].exists()
    assert set(os.listdir("/dev/shm")) <= before


def test_a_closed_client_says_so(engines):
    kept: list[Any] = []

    async def body(client):
        kept.append(client)

    engines.run(body)

    async def main() -> None:
        with pytest.raises(EngineDied, match="closed"):
            await kept[0].receive()

    trio.run(main)
