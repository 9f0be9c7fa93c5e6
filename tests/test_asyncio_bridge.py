"""Clients written for asyncio as stages: real asyncio inside, a real clock, and every way to misbehave."""

from __future__ import annotations

import asyncio
import enum
import gc
import sys
import threading
from contextlib import asynccontextmanager
from types import SimpleNamespace

import pytest
import trio
import trio.testing

from omni_trio.engines.asyncio_bridge import AsyncioStageClient, asyncio_client_factory, stage_output
from omni_trio.errors import EngineDied, InvalidRequest, OmniTrioError, StageFailed, StartupFailed
from omni_trio.messages import StageInput, StageOutput, StageRequest
from omni_trio.pipeline import Pipeline
from omni_trio.runtime import open_runtime
from omni_trio.stages import ReplicaContext, StageClient
from support import stage


class EngineDeadError(Exception):
    pass


class Fake:
    """An engine in asyncio: two tokens and the end per request, as soon as it is asked."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.batches: asyncio.Queue = asyncio.Queue()
        self.asked: list[tuple] = []
        self.waiting = 0
        self.auto = True
        self.add_gate: asyncio.Event | None = None
        self.down = threading.Event()
        self.dead = False

    def put(self, request_id, *token_ids, finish_reason=None, **fields):
        raw = SimpleNamespace(
            request_id=request_id, new_token_ids=list(token_ids), finish_reason=finish_reason, **fields
        )
        self.batches.put_nowait(SimpleNamespace(outputs=[raw]))

    def die(self):
        self.dead = True
        self.batches.put_nowait(EngineDeadError("it is gone"))

    async def add_request_async(self, request):
        assert asyncio.get_running_loop() is self.loop
        self.asked.append(("add", request.request_id))
        if self.add_gate is not None:
            await self.add_gate.wait()
        if request.input.text == "bad":
            raise ValueError("not like this")
        if request.input.text == "worse":
            raise OSError("no route")
        if self.auto:
            self.put(request.request_id, 1)
            self.put(request.request_id, 2, finish_reason="stop")

    async def get_output_async(self):
        self.waiting += 1
        assert self.waiting == 1, "two at a time"
        try:
            batch = await self.batches.get()
        finally:
            self.waiting -= 1
        if isinstance(batch, Exception):
            raise batch
        return batch

    async def abort_requests_async(self, request_ids):
        self.asked.append(("abort", *request_ids))
        await asyncio.sleep(0)

    async def collective_rpc_async(self, method, timeout=None, args=(), kwargs=None):
        self.asked.append(("rpc", method, args, kwargs))
        if method == "hang":
            await asyncio.sleep(1000)
        if method == "fail":
            raise KeyError("no such thing")
        return [method, *args]

    def check_health(self):
        if self.dead:
            raise EngineDeadError("it is gone")

    def shutdown(self):
        assert threading.current_thread() is not threading.main_thread()
        self.down.set()


def run(function, timeout=20):
    async def bounded():
        with trio.fail_after(timeout):
            return await function()

    return trio.run(bounded)


def context_for(spec=None, **fields):
    defaults = {
        "stage": spec or stage("hosted"),
        "stage_id": 0,
        "replica_id": 0,
        "want_text": False,
        "report": lambda phase: None,
        "close_timeout": 8.0,
    }
    return ReplicaContext(**defaults | fields)


@asynccontextmanager
async def opened(fake=Fake, *, context=None, prepare=lambda engine: None, **options):
    """Open one replica; gives its client and the engine behind it."""
    engines = []

    async def make(context):
        engine = fake()
        prepare(engine)
        engines.append(engine)
        return engine

    async with asyncio_client_factory(make, **options)(context or context_for()) as client:
        yield client, engines[0]


def request(request_id, text="x", **fields):
    return StageRequest(request_id=request_id, input=StageInput(text=text), **fields)


async def until_finished(client):
    tokens = {}
    while True:
        for output in await client.receive():
            tokens.setdefault(output.request_id, []).extend(output.token_ids)
            if output.finished:
                return tokens


# ---- the ordinary


def test_the_fake_is_what_is_asked_for():
    async def main():
        async with opened() as (client, engine):
            assert isinstance(engine, AsyncioStageClient)
            assert isinstance(client, StageClient)

    run(main)


def test_a_request_goes_in_and_its_outputs_come_out_in_order():
    async def main():
        async with opened() as (client, engine):
            await client.submit(request("a"))
            assert await until_finished(client) == {"a": [1, 2]}
        assert engine.down.is_set()

    run(main)


def test_a_runtime_runs_on_two_replicas_and_leaves_nothing():
    engines = []

    async def make(context):
        engines.append(Fake())
        return engines[-1]

    async def main():
        pipeline = Pipeline([stage("hosted", replicas=2, modality="tokens"), stage("after")])
        from omni_trio.testing import SimStage

        clients = {"hosted": asyncio_client_factory(make), "after": SimStage(tokens=3)}
        async with open_runtime(pipeline, clients=clients) as runtime:
            results = []

            async def one():
                results.append(await runtime.generate("x", final_stage="hosted"))

            async with trio.open_nursery() as nursery:
                for _ in range(20):
                    nursery.start_soon(one)
            assert [result["hosted"].token_ids for result in results] == [(1, 2)] * 20
            assert (await runtime.generate([1, 2]))["after"].metrics.num_tokens_out == 3
            answers = await runtime.collective_rpc("echo", [7], stages=["hosted"])
            assert [answer.result for answer in answers] == [["echo", 7]] * 2
            for engine in engines:
                engine.auto = False
            async with runtime.request("x", final_stage="hosted", request_id="left"):
                pass
            assert sum(asked[0] == "abort" for engine in engines for asked in engine.asked) == 1
        assert all(engine.down.is_set() for engine in engines)

    before = threading.active_count()
    run(main)
    assert threading.active_count() <= before + 2  # trio keeps idle worker threads for some seconds


def test_converters_stand_between_the_runtime_and_the_client():
    class Other(Fake):
        async def add_request_async(self, request):
            self.put(*request)

    async def main():
        async with opened(
            Other,
            convert_request=lambda given: (given.request_id, given.params["n"]),
            convert_output=lambda raw: StageOutput(
                request_id=raw.request_id, token_ids=[raw.new_token_ids[0] * 10], finish_reason="length"
            ),
        ) as (client, _):
            params = client.resolve_params({"n": 7})
            await client.submit(request("a", params=params))
            assert await until_finished(client) == {"a": [70]}

    run(main)


def test_parameters_are_laid_over_the_defaults():
    async def main():
        async with opened(context=context_for(stage("hosted", sampling={"a": 1, "b": 2}))) as (client, _):
            assert client.resolve_params(None) == {"a": 1, "b": 2}
            assert client.resolve_params({"b": 3}) == {"a": 1, "b": 3}
            own = object()
            assert client.resolve_params(own) is own
            assert client.statistics().running == -1

    run(main)


def test_raw_outputs_of_vllm_are_understood():
    class Reason(enum.IntEnum):
        STOP = 0

        def __str__(self):
            return self.name.lower()

    raw = SimpleNamespace(
        request_id="a", new_token_ids=[5], finish_reason=Reason.STOP, stop_reason=7, kv_transfer_params={"k": 1}
    )
    output = stage_output(raw)
    assert (output.token_ids, output.finish_reason, output.stop_reason) == ([5], "stop", 7)
    assert output.kv_transfer_params == {"k": 1}
    assert output.error is None
    assert output.data is None
    assert stage_output(SimpleNamespace(request_id="a", pooling_output=[1.0])).data == {"embedding": [1.0]}
    assert stage_output(SimpleNamespace(request_id="a", pooling_output={"audio": 1})).data == {"audio": 1}
    assert stage_output(SimpleNamespace(request_id="a", finish_reason="error")).error


def test_the_caller_may_have_an_asyncio_loop_of_its_own():
    import trio_asyncio

    async def main():
        async with trio_asyncio.open_loop() as mine, opened() as (client, engine):
            assert engine.loop is not mine
            async with trio.open_nursery() as nursery:
                # A task that knows the outer loop, and one that knows none.
                nursery.start_soon(client.submit, request("a"))
                trio_asyncio.current_loop.set(None)
                nursery.start_soon(client.submit, request("b"))
            seen = {}
            while len(seen) < 2:
                seen |= await until_finished(client)
            trio_asyncio.current_loop.set(mine)

    run(main)


# ---- cancellation


def test_a_cancelled_receive_loses_nothing():
    async def main():
        async with opened(prepare=lambda engine: setattr(engine, "auto", False)) as (client, engine):
            await client.submit(request("a"))
            got = []
            for number in range(200):
                with trio.CancelScope() as scope:
                    if number % 2:
                        # The output and the cancellation come in the same turn.
                        engine.put("a", number)
                    async with trio.open_nursery() as nursery:

                        async def receive():
                            for output in await client.receive():
                                got.extend(output.token_ids)

                        nursery.start_soon(receive)
                        for _ in range(number % 7):
                            await trio.lowlevel.checkpoint()
                        scope.cancel()
                assert engine.waiting <= 1
            engine.put("a", 999, finish_reason="stop")
            got.extend((await until_finished(client))["a"])
            assert got == [*range(1, 200, 2), 999]

    run(main)


def test_a_cancelled_submission_is_taken_back():
    def slow(engine):
        engine.add_gate = asyncio.Event()

    async def main():
        async with opened(prepare=slow) as (client, engine):
            with trio.move_on_after(0.01):
                await client.submit(request("a"))
            assert engine.asked == [("add", "a"), ("abort", "a")]
            engine.put("a", 1)  # a late output
            engine.add_gate.set()
            await client.submit(request("b"))
            assert await until_finished(client) == {"b": [1, 2]}

    run(main)


def test_a_cancelled_rpc_is_cancelled_in_the_loop():
    async def main():
        async with opened() as (client, engine):
            with trio.move_on_after(0.01) as scope:
                await client.call("hang")
            assert scope.cancelled_caught
            assert {task for task in asyncio.all_tasks(engine.loop) if not task.done()} == set()

    run(main)


# ---- refusals and failures


def test_a_refused_request_is_invalid_and_not_at_the_client():
    async def main():
        async with opened() as (client, engine):
            with pytest.raises(InvalidRequest, match="refused it: ValueError: not like this"):
                await client.submit(request("a", "bad"))
            with pytest.raises(StageFailed, match="raised OSError: no route") as caught:
                await client.submit(request("b", "worse"))
            assert caught.value.stage == "hosted"
            assert engine.asked == [("add", "a"), ("abort", "a"), ("add", "b"), ("abort", "b")]
            await client.submit(request("c"))
            assert await until_finished(client) == {"c": [1, 2]}

    run(main)


def test_a_request_that_can_not_be_converted_is_invalid_and_never_reaches_the_client():
    def convert(given):
        raise KeyError("audio")

    async def main():
        async with opened(convert_request=convert) as (client, engine):
            with pytest.raises(InvalidRequest, match="can not use it: KeyError: 'audio'"):
                await client.submit(request("a"))
            assert engine.asked == []

    run(main)


def test_an_output_that_can_not_be_converted_fails_its_request_alone(caplog):
    def convert(raw):
        if raw.new_token_ids == [13]:
            raise ZeroDivisionError("13")
        return None if raw.new_token_ids == [0] else stage_output(raw)

    async def main():
        async with opened(convert_output=convert, prepare=lambda e: setattr(e, "auto", False)) as (client, engine):
            await client.submit(request("a"))
            await client.submit(request("b"))
            engine.put("a", 13)
            (output,) = await client.receive()
            assert output.request_id == "a"
            assert "ZeroDivisionError" in output.error
            assert ("abort", "a") in engine.asked
            engine.put("b", 0)
            engine.put("a", 13)
            engine.put("b", 2, finish_reason="stop")
            assert await until_finished(client) == {"b": [2]}

    run(main)


def test_input_in_pieces_has_to_be_asked_for():
    async def main():
        async with opened() as (client, _):
            with pytest.raises(InvalidRequest, match="in pieces"):
                await client.submit(request("a", last=False))
            with pytest.raises(InvalidRequest, match="in pieces"):
                await client.update(request("a"))
        async with opened(takes_updates=True, prepare=lambda e: setattr(e, "auto", False)) as (client, engine):
            await client.update(request("a"))  # may cross with a last output, so it is no error
            assert engine.asked == []
            await client.submit(request("a", last=False))
            await client.update(request("a"))
            assert engine.asked == [("add", "a"), ("add", "a")]

    run(main)


def test_rpc_answers_and_errors():
    async def main():
        async with opened() as (client, engine):
            assert await client.call("echo", [1], {"k": 2}) == ["echo", 1]
            assert engine.asked == [("rpc", "echo", (1,), {"k": 2})]
            with pytest.raises(StageFailed, match="'fail' raised KeyError"):
                await client.call("fail")

    run(main)


# ---- abort


def test_after_an_abort_no_output_comes_and_the_id_is_free():
    async def main():
        async with opened(prepare=lambda engine: setattr(engine, "auto", False)) as (client, engine):
            await client.submit(request("a"))
            await client.submit(request("b"))
            engine.put("a", 1)
            await client.abort(["a", "unknown"])
            assert engine.asked[-1] == ("abort", "a")
            engine.put("a", 2)
            engine.put("b", 3, finish_reason="stop")
            assert await until_finished(client) == {"b": [3]}
            asked = len(engine.asked)
            await client.abort(["a", "b"])  # it knows neither any more
            assert len(engine.asked) == asked

    run(main)


def test_an_abort_that_is_cancelled_can_be_asked_again():
    class Slow(Fake):
        async def abort_requests_async(self, request_ids):
            await super().abort_requests_async(request_ids)
            if len(self.asked) == 2:
                await asyncio.sleep(1000)

    async def main():
        async with opened(Slow, prepare=lambda engine: setattr(engine, "auto", False)) as (client, engine):
            await client.submit(request("a"))
            with trio.move_on_after(0.01):
                await client.abort(["a"])
            await client.abort(["a"])
            assert engine.asked == [("add", "a"), ("abort", "a"), ("abort", "a")]

    run(main)


# ---- death


def test_a_death_ends_everything_that_waits():
    async def main():
        async with opened(prepare=lambda e: setattr(e, "add_gate", asyncio.Event())) as (client, engine):
            deaths = []

            async def expect(call, *args):
                with pytest.raises(EngineDied, match="the engine is dead: EngineDeadError: it is gone") as caught:
                    await call(*args)
                deaths.append(caught.value)

            async with trio.open_nursery() as nursery:
                nursery.start_soon(expect, client.receive)
                nursery.start_soon(expect, client.submit, request("a"))
                nursery.start_soon(expect, client.call, "hang")
                await trio.testing.wait_all_tasks_blocked()
                engine.die()
            for call in (client.receive, lambda: client.submit(request("b")), lambda: client.abort(["a"])):
                await expect(call)
            await expect(client.call, "echo")
            assert isinstance(deaths[0].__cause__, EngineDeadError)
            assert deaths[0].stage == "hosted"

    run(main)


def test_what_came_before_the_death_is_delivered_first():
    async def main():
        async with opened() as (client, engine):
            await client.submit(request("a"))
            engine.die()
            assert await until_finished(client) == {"a": [1, 2]}
            with pytest.raises(EngineDied):
                await client.receive()

    run(main)


def test_a_death_is_seen_at_submission_too():
    async def main():
        async with opened() as (client, engine):
            engine.dead = True
            with pytest.raises(EngineDied, match="it is gone"):
                await client.submit(request("a"))
            with pytest.raises(EngineDied):
                await client.receive()

    run(main)


def test_which_errors_mean_death_can_be_said():
    class Fatal(Exception):
        pass

    class Own(Fake):
        async def collective_rpc_async(self, method, timeout=None, args=(), kwargs=None):
            raise Fatal if method == "fatal" else EngineDeadError

    async def main():
        async with opened(Own, engine_dead=Fatal) as (client, _):
            with pytest.raises(StageFailed):
                await client.call("other")
            with pytest.raises(EngineDied, match="the engine is dead: Fatal"):
                await client.call("fatal")

    run(main)


def test_any_failure_of_get_output_is_a_death():
    async def main():
        async with opened() as (client, engine):
            engine.batches.put_nowait(KeyError("lost"))
            with pytest.raises(EngineDied, match="its client failed: KeyError: 'lost'"):
                await client.receive()
        async with opened() as (client, engine):

            async def give_up():
                raise asyncio.CancelledError

            engine.get_output_async = give_up
            with pytest.raises(EngineDied, match="cancelled the call itself"):
                await client.receive()

    run(main)


def test_an_error_that_nobody_in_the_loop_handles_is_a_death():
    async def main():
        async with opened() as (client, engine):

            def broken():
                raise LookupError("in a callback")

            engine.loop.call_soon(broken)
            with pytest.raises(EngineDied, match="nobody handled it: LookupError: in a callback"):
                await client.receive()

            async def broken_task():
                raise LookupError("in a task")

        async with opened() as (client, engine):
            engine.loop.create_task(broken_task())
            await trio.testing.wait_all_tasks_blocked()
            gc.collect()
            with pytest.raises(EngineDied, match="nobody handled it: LookupError: in a task"):
                await client.receive()

    run(main)


def test_a_runtime_ends_with_the_death():
    engines = []

    async def make(context):
        engines.append(Fake())
        engines[-1].auto = False
        return engines[-1]

    async def main():
        with pytest.raises(EngineDied, match="it is gone"):
            async with open_runtime(Pipeline([stage("hosted")]), clients={"hosted": asyncio_client_factory(make)}) as r:
                async with r.request("x") as one:
                    engines[0].die()
                    async for _ in one:
                        pass

    run(main)
    assert engines[0].down.is_set()


# ---- start and end


def test_start_up_fails_with_its_phase():
    async def fails(context):
        raise RuntimeError("no weights")

    async def makes_nothing(context):
        return SimpleNamespace(shutdown=lambda: None)

    def makes_no_awaitable(context):
        return 1

    async def main():
        phases = []
        context = context_for(report=phases.append)
        for make, match in (
            (fails, "RuntimeError: no weights"),
            (makes_nothing, "lacks .*get_output_async"),
            (makes_no_awaitable, "await"),
        ):
            with pytest.raises(StartupFailed, match=match) as caught:
                async with asyncio_client_factory(make)(context):
                    pytest.fail("it must not open")
            assert caught.value.phase == "load"
        assert phases == ["load"] * 3
        async with opened(context=context):
            assert phases[3:] == ["load", "ready"]

    run(main)


def test_start_up_is_bounded_and_cancellable():
    cancelled = []

    async def hangs(context):
        try:
            await asyncio.sleep(1000)
        except asyncio.CancelledError:
            cancelled.append(context.stage.name)
            raise

    async def main():
        with pytest.raises(StartupFailed, match=r"within start_timeout = 0\.01 s"):
            async with asyncio_client_factory(hangs)(context_for(stage("hosted", start_timeout=0.01))):
                pytest.fail("it must not open")
        with trio.move_on_after(0.01) as scope:
            async with asyncio_client_factory(hangs)(context_for()):
                pytest.fail("it must not open")
        assert scope.cancelled_caught
        assert len(cancelled) == 2

    run(main)


def test_a_client_that_comes_too_late_is_shut_down():
    engines = []

    async def late(context):
        engines.append(Fake())
        try:
            await asyncio.sleep(1000)
        except asyncio.CancelledError:
            pass
        return engines[-1]

    async def main():
        with trio.move_on_after(0.01):
            async with asyncio_client_factory(late)(context_for()):
                pytest.fail("it must not open")
        assert engines[0].down.is_set()

    run(main)


def test_the_bodys_own_error_comes_out_as_it_is():
    async def main():
        with pytest.raises(ZeroDivisionError):
            async with opened() as (_, engine):
                raise ZeroDivisionError
        assert engine.down.is_set()

    run(main)


def test_a_slow_shutdown_is_abandoned(caplog):
    release = threading.Event()

    class Slow(Fake):
        def shutdown(self):
            release.wait(30)
            super().shutdown()

    async def main():
        start = trio.current_time()
        async with opened(Slow, context=context_for(close_timeout=0.2)) as (_, engine):
            pass
        assert trio.current_time() - start < 10
        assert not engine.down.is_set()
        release.set()

    try:
        run(main)
    finally:
        release.set()
    assert "did not shut down in time" in caplog.text


def test_a_failing_shutdown_is_logged(caplog):
    class Broken(Fake):
        def shutdown(self):
            raise OSError("already gone")

    async def main():
        async with opened(Broken):
            pass

    run(main)
    assert "already gone" in caplog.text


def test_tasks_and_threads_of_the_client_end_with_it_even_stubborn_ones(caplog):
    release = threading.Event()
    ended = []

    async def tidy():
        try:
            await asyncio.sleep(1000)
        finally:
            ended.append("tidy")

    async def stubborn():
        while not release.is_set():
            try:
                await asyncio.sleep(1000)
            except asyncio.CancelledError:
                pass

    async def main():
        async with opened(context=context_for(close_timeout=0.4)) as (_, engine):
            engine.tasks = [engine.loop.create_task(tidy()), engine.loop.create_task(stubborn())]
            engine.future = engine.loop.run_in_executor(None, release.wait, 30)
            await trio.testing.wait_all_tasks_blocked()
        assert ended == ["tidy"]
        release.set()
        del engine.tasks

    try:
        run(main)
    finally:
        release.set()
    gc.collect()
    assert "ignores its end" in caplog.text


def test_without_trio_asyncio_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "trio_asyncio", None)

    async def make(context):
        return Fake()

    with pytest.raises(OmniTrioError, match=r"omni-trio\[asyncio\]"):
        asyncio_client_factory(make)
