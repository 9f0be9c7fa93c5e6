"""The pytest plugin: it saves what fails, shows what happened, and costs nothing where it is not used."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

from omni_trio.testing.plan import Plan, RequestPlan, StagePlan
from omni_trio.testing.replay import read_plan
from omni_trio.testing.script import Duplicate, Finish

ROOT = Path(__file__).resolve().parents[1]

HEAD = """
from contextlib import asynccontextmanager
import trio
from omni_trio.testing.plan import Plan, RequestPlan, StagePlan
from omni_trio.testing.script import Chunk, Finish

PLAN = Plan(stages=(StagePlan(final=True),), requests=(RequestPlan(scripts=((Chunk((1,)), Finish("stop", (2,))),)),))

class Loses:
    def __init__(self, client):
        self._client = client
    def __getattr__(self, name):
        return getattr(self._client, name)
    async def receive(self):
        return [output for output in await self._client.receive() if output.finished] or await self._client.receive()

def loses(factory):
    @asynccontextmanager
    async def wrapped(context):
        async with factory(context) as client:
            yield Loses(client)
    return wrapped
"""


def run_pytest(folder: Path, program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run pytest in a folder of its own, with no plugin but ours, and with warnings as errors."""
    (folder / "test_it.py").write_text(program, encoding="utf-8")
    env = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    command = [sys.executable, "-W", "error", "-m", "pytest", "-p", "pytest_omni_trio", "-q", "-W", "error"]
    command += ["--rootdir", str(folder), *arguments]
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False)


def test_it_is_declared_where_pytest_looks():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert project["project"]["entry-points"]["pytest11"] == {"pytest_omni_trio": "pytest_omni_trio"}
    assert "src/pytest_omni_trio" in project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]


def test_until_it_is_used_it_imports_neither_trio_nor_hypothesis(tmp_path: Path):
    program = """
import sys

def test_nothing_is_loaded():
    assert "pytest_omni_trio" in sys.modules
    loaded = [name for name in ("trio", "hypothesis", "msgspec", "omni_trio") if name in sys.modules]
    assert not loaded

def test_nor_by_a_failure():
    assert False
"""
    done = run_pytest(tmp_path, program)
    assert "1 failed, 1 passed" in done.stdout, done.stdout + done.stderr
    assert "omni_trio timeline" not in done.stdout


def test_a_plan_that_is_right_gives_its_trace(tmp_path: Path):
    program = (
        HEAD
        + """
def test_it(omni_trio_simulate):
    assert omni_trio_simulate(PLAN).end_of(0).detail == "finished"
"""
    )
    done = run_pytest(tmp_path, program)
    assert done.returncode == 0, done.stdout + done.stderr
    assert not list(tmp_path.rglob("plan-*.json"))


def test_a_plan_that_fails_is_saved_and_shown(tmp_path: Path):
    program = (
        HEAD
        + """
def test_it(omni_trio_simulate):
    omni_trio_simulate(PLAN, wrap=loses)
"""
    )
    done = run_pytest(tmp_path, program)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "I4" in done.stdout
    assert re.search(r"^-+ Captured omni_trio timeline call -+$", done.stdout, re.MULTILINE)
    assert re.search(r"caller +ask +request 0", done.stdout)
    (path,) = tmp_path.rglob("plan-*.json")
    assert done.stdout.count(f"python -m omni_trio.testing replay {path}") >= 2  # with the error and the timeline
    assert len(read_plan(path).requests) == 1


def test_plans_are_saved_where_one_says(tmp_path: Path):
    program = (
        HEAD
        + """
def test_it(omni_trio_simulate):
    omni_trio_simulate(PLAN, wrap=loses)
"""
    )
    run_pytest(tmp_path, program, "--omni-trio-plans", "plans", "-p", "no:cacheprovider")
    assert len(list((tmp_path / "plans").glob("plan-*.json"))) == 1
    run_pytest(tmp_path, program, "-p", "no:cacheprovider")
    assert len(list((tmp_path / ".omni_trio").glob("plan-*.json"))) == 1


def test_checks_without_the_fixture_are_saved_too_and_so_are_both_sides_of_a_relation(tmp_path: Path):
    program = (
        HEAD
        + """
import functools
import pytest
from hypothesis import given, settings, strategies as st
from omni_trio.testing.checks import check_all
from omni_trio.testing.metamorphic import schedules_change_nothing
from omni_trio.testing.simulation import run_simulation

@settings(database=None)
@given(st.integers(0, 9))
def test_with_hypothesis(seed):
    check_all(run_simulation(PLAN, wrap=loses))

def test_a_relation():
    def run(plan):
        return run_simulation(plan, wrap=loses) if plan.seed else run_simulation(plan)
    schedules_change_nothing(PLAN, run=run)
"""
    )
    done = run_pytest(tmp_path, program)
    assert "2 failed" in done.stdout, done.stdout + done.stderr
    assert len(re.findall(r"^-+ Captured omni_trio timeline call -+$", done.stdout, re.MULTILINE)) == 3
    assert len(list(tmp_path.rglob("plan-*.json"))) == 3


def test_the_seed_can_be_given(tmp_path: Path):
    program = (
        HEAD
        + """
def test_it(omni_trio_simulate):
    assert omni_trio_simulate(PLAN).plan.seed == 7
"""
    )
    assert run_pytest(tmp_path, program).returncode == 1
    assert run_pytest(tmp_path, program, "--omni-trio-seed=7").returncode == 0


def test_a_check_can_be_skipped_for_a_reason(tmp_path: Path):
    plan = Plan(
        stages=(StagePlan(final=True),),
        requests=(RequestPlan(scripts=((Finish(), Duplicate()),)),),
    )
    program = (
        HEAD
        + f"""
from omni_trio.testing.script import Duplicate
import pytest

def test_it(omni_trio_simulate):
    omni_trio_simulate({plan!r})
    with pytest.raises(ValueError, match="say why"):
        omni_trio_simulate(PLAN, skip={{"conservation": ""}})
    omni_trio_simulate(PLAN, skip=dict.fromkeys(("conservation", "model", "fresh"), "it loses"), wrap=loses)
"""
    )
    done = run_pytest(tmp_path, program)
    assert done.returncode == 0, done.stdout + done.stderr
