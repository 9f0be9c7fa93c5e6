"""The public state machine: deterministic, open to users' own rules and stages, and it finds what is planted."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import ClassVar

import pytest
import trio
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import invariant, rule, run_state_machine_as_test

from omni_trio.pipeline import Pipeline, StageSpec
from omni_trio.testing import Finish, SimStage
from omni_trio.testing._guest import Guest
from omni_trio.testing.machine import MachineRequest, OrchestratorMachine

SETTINGS = settings(
    max_examples=50,
    stateful_step_count=20,
    database=None,
    derandomize=True,
    deadline=None,
    report_multiple_bugs=False,
    phases=(Phase.generate, Phase.shrink),
)


def play(machine: type[OrchestratorMachine], examples: int = 50) -> None:
    run_state_machine_as_test(machine, settings=settings(SETTINGS, max_examples=examples))


class Wrapped:
    """A client that hands everything on."""

    def __init__(self, client) -> None:
        self._client = client

    def __getattr__(self, name: str):
        return getattr(self._client, name)


def machine_with(wrapper: type[Wrapped], name: str = "first") -> type[OrchestratorMachine]:
    class Broken(OrchestratorMachine):
        def client(self, stage):
            factory = super().client(stage)

            @asynccontextmanager
            async def wrapped(context):
                async with factory(context) as client:
                    yield wrapper(client) if stage.name == name else client

            return wrapped

    return Broken


def the_failure(machine: type[OrchestratorMachine], examples: int = 200) -> tuple[str, list[str]]:
    """Return what a broken machine fails with, and the steps of the smallest failing example."""
    with pytest.raises(AssertionError) as caught:
        play(machine, examples)
    lines = [line.strip() for note in caught.value.__notes__ for line in note.splitlines()]
    steps = [line for line in lines if "state." in line and "books_are_true" not in line]
    return str(caught.value), steps


# ---- it holds, and is repeatable


def test_equal_examples_take_the_same_course():
    courses: list[str] = []

    class Recorded(OrchestratorMachine):
        def teardown(self) -> None:
            super().teardown()
            courses.append(self.timeline())

    play(Recorded)
    first, courses[:] = list(courses), []
    play(Recorded)
    assert first == courses
    assert any("dies" in course for course in first)
    assert any("RequestAborted" in course for course in first)
    assert any("pause done" in course for course in first)


def test_a_runtime_that_ends_with_a_replica_is_left_in_order():
    deaths: list[str] = []

    class FailStop(OrchestratorMachine):
        runtime_options: ClassVar = {"on_engine_death": "fail_stop"}

        def teardown(self) -> None:
            super().teardown()
            if self.failure is not None:
                deaths.append(type(self.failure).__name__)

    play(FailStop)
    assert set(deaths) == {"EngineDied"}


# ---- it is open


def test_users_add_rules_invariants_pipelines_and_stages():
    prompts: set[tuple[int, ...]] = set()

    class Mine(OrchestratorMachine):
        pipeline = Pipeline(
            [
                StageSpec(name="thinker", kind="simulated", replicas=2),
                StageSpec(name="talker", kind="simulated", bridge="original_prompt"),
            ]
        )
        stages: ClassVar = {"talker": SimStage(capacity=1, token_time=1.0, abort_time=2.0)}
        scripts = st.just((Finish("stop", (5,)),))

        @rule(target=OrchestratorMachine.requests, deadline=st.sampled_from((1.0, 100.0)))
        def submit_with_a_deadline(self, deadline: float) -> MachineRequest:
            return self.ask(((Finish(),), (Finish(),)), prompt=[1, 2, 3], deadline=deadline)

        @invariant()
        def prompts_are_seen(self) -> None:
            prompts.update(entry.tokens for entry in self.entries if entry.what == "submit")

    play(Mine)
    assert {(1, 2), (1, 2, 3)} <= prompts


def test_a_stage_of_ones_own_plays_no_script():
    class Mine(OrchestratorMachine):
        pipeline = Pipeline([StageSpec(name="only", kind="simulated")])
        stages: ClassVar = {"only": SimStage(script=lambda request: (Finish("stop", (7,)),))}

        def must_end(self, request: MachineRequest) -> bool:
            return True

        @rule(request=OrchestratorMachine.requests)
        def everybody_hears_the_same(self, request: MachineRequest) -> None:
            while self.read_one(request, within=1.0) is not None:
                pass
            if request.end == "finished":
                assert request.heard[0] == [7]

    play(Mine)


# ---- it finds what is planted


class SwallowsLast(Wrapped):
    async def receive(self):
        while not (kept := [output for output in await self._client.receive() if not output.finished]):
            pass
        return kept


class Repeats(Wrapped):
    async def receive(self):
        return [
            again for output in await self._client.receive() for again in (output, output)[: 1 + (not output.finished)]
        ]


class LosesAborts(Wrapped):
    async def abort(self, request_ids):
        await trio.lowlevel.checkpoint()


def test_a_swallowed_last_output_is_found_and_shrunk_to_one_request():
    message, steps = the_failure(machine_with(SwallowsLast))
    assert message.startswith("I2: r0 has not ended")
    assert [step.partition("(")[0] for step in steps] == ["state.open", "requests_0 = state.submit", "state.teardown"]


def test_a_doubled_output_is_found():
    message, steps = the_failure(machine_with(Repeats))
    assert message.startswith("I4: stage 0 said")
    assert sum("submit" in step for step in steps) == 1


def test_a_lost_abort_is_found():
    message, steps = the_failure(machine_with(LosesAborts, "second"))
    assert message.startswith("I5: nobody waits for anything, and replicas are at work: {'stage 1, replica 0'")
    assert sum("submit" in step for step in steps) == 1


def test_an_event_after_an_abort_is_found(monkeypatch: pytest.MonkeyPatch):
    abort = OrchestratorMachine._abort

    async def claims_too_much(self, request) -> None:
        await abort(self, request)
        request.aborted = True  # as if the runtime had said that it ended it

    class Prompt(OrchestratorMachine):
        scripts = st.just((Finish("stop", (1,)),))

    monkeypatch.setattr(OrchestratorMachine, "_abort", claims_too_much)
    message, _ = the_failure(Prompt)
    assert message.startswith("I6: r0 was aborted, and")


def test_untrue_statistics_are_found(monkeypatch: pytest.MonkeyPatch):
    from omni_trio.runtime._orchestrator import Orchestrator

    forget = Orchestrator.forget

    def forgets_to_count(self, task) -> None:
        forget(self, task)
        self.verdicts["aborted"] = 0

    monkeypatch.setattr(Orchestrator, "forget", forgets_to_count)
    message, _ = the_failure(OrchestratorMachine)
    assert message.startswith("I11: of 1 requests")


# ---- the run that it drives


def test_what_waits_for_ever_is_reported_by_its_name():
    guest = Guest(0, patience=60.0)
    with pytest.raises(AssertionError, match=r"^sleep_forever has not returned within 60 virtual seconds$"):
        guest.run(trio.sleep_forever)
    guest.close()


def test_background_tasks_live_from_call_to_call_and_time_stands_still_between_calls():
    times: list[float] = []

    async def tick() -> None:
        while True:
            await trio.sleep(1.0)
            times.append(trio.current_time())

    guest = Guest(0, patience=60.0)
    guest.nursery.start_soon(tick)
    guest.run(trio.sleep, 2.5)
    assert times == [1.0, 2.0]
    guest.run(trio.sleep, 1.0)
    assert times == [1.0, 2.0, 3.0]
    guest.close()


def test_a_background_task_that_fails_fails_the_call_once():
    async def fail() -> None:
        raise ValueError("no")

    guest = Guest(0, patience=60.0)
    guest.nursery.start_soon(fail)
    with pytest.raises(ValueError, match="no"):
        guest.run(trio.sleep, 1.0)
    guest.close()
    with pytest.raises(RuntimeError, match="the simulation is over"):
        guest.run(trio.sleep, 1.0)


def test_what_a_call_raises_comes_out_of_it_and_the_run_goes_on():
    async def fail() -> None:
        raise ValueError("no")

    guest = Guest(0, patience=60.0)
    with pytest.raises(ValueError, match="no"):
        guest.run(fail)
    assert guest.run(trio.sleep, 1.0) is None
    guest.close()
    guest.close()
