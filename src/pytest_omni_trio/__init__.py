"""The pytest plugin of omni_trio: simulations that fail leave their plan and their timeline behind.

It is a package of its own because pytest imports its plugins whenever it starts, and importing anything of omni_trio
imports trio: here nothing is imported before a test asks for it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from omni_trio.testing.trace import Trace

__all__ = ["omni_trio_simulate"]

_MOST_LINES = 300
"""Of a timeline, in a report; the file has it all."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add our options."""
    group = parser.getgroup("omni_trio", "simulations of omni_trio")
    group.addoption(
        "--omni-trio-seed",
        type=int,
        metavar="N",
        help="run simulations under this seed of trio's scheduler, in place of their plans' own",
    )
    group.addoption(
        "--omni-trio-plans",
        type=Path,
        metavar="DIR",
        help="where the plans of failed simulations are saved (default: in pytest's cache)",
    )


@pytest.fixture(scope="session")
def omni_trio_simulate(request: pytest.FixtureRequest) -> Callable[..., Trace]:
    """A function that runs a plan and all checks, and returns the trace.

    ``omni_trio_simulate(plan, skip={"name": "why"}, wrap=..., clients=...)``: see `omni_trio.testing.check_all` and
    `omni_trio.testing.run_simulation`. It may be called in a test of Hypothesis, once per example.
    """
    import msgspec  # noqa: PLC0415 - see above

    from omni_trio.testing.checks import check_all  # noqa: PLC0415 - likewise
    from omni_trio.testing.simulation import run_simulation  # noqa: PLC0415 - likewise

    seed = request.config.getoption("omni_trio_seed")

    def simulate(plan: Any, *, skip: Any = None, **options: Any) -> Trace:
        if seed is not None:
            plan = msgspec.structs.replace(plan, seed=seed)
        trace = run_simulation(plan, **options)
        check_all(trace, skip=skip)
        return trace

    return simulate


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Save the plan of each trace that an error carries, and show the timeline."""
    # Without this module there is no trace, and nothing to import.
    if call.excinfo is not None and "omni_trio.testing.trace" in sys.modules:
        for error, trace in _traces(call.excinfo.value):
            _attach(item, call.when, error, trace)
    return (yield)


def _traces(error: BaseException) -> Iterator[tuple[BaseException, Trace]]:
    """The traces that an error, those in its group and those that led to it carry, each once."""
    from omni_trio.testing.trace import Trace  # noqa: PLC0415 - it has been imported

    seen: list[object] = []
    waiting: list[BaseException | None] = [error]
    while waiting:
        one = waiting.pop(0)
        if one is None or any(one is other for other in seen):
            continue
        seen.append(one)
        for name in ("trace", "changed"):
            trace = getattr(one, name, None)
            if isinstance(trace, Trace) and not any(trace is other for other in seen):
                seen.append(trace)
                yield one, trace
        if isinstance(one, BaseExceptionGroup):
            waiting.extend(one.exceptions)
        waiting += (one.__cause__, one.__context__)


def _attach(item: pytest.Item, when: str, error: BaseException, trace: Trace) -> None:
    from omni_trio.testing.replay import save_plan  # noqa: PLC0415 - only for what has failed

    try:
        path = save_plan(trace.plan, _folder(item.config))
    except OSError as problem:
        where = f"the plan could not be saved: {problem}"
    else:
        where = f"the plan is saved; to run it again: python -m omni_trio.testing replay {path}"
    error.add_note(where)
    lines = trace.timeline().splitlines()
    if (more := len(lines) - _MOST_LINES) > 0:
        lines = [f"... {more} lines before", *lines[more:]]
    item.add_report_section(when, "omni_trio timeline", "\n".join((*lines, where)))


def _folder(config: pytest.Config) -> Path:
    given: Path | None = config.getoption("omni_trio_plans")
    if given is not None:
        return config.invocation_params.dir / given
    cache: pytest.Cache | None = getattr(config, "cache", None)
    return config.rootpath / ".omni_trio" if cache is None else cache.mkdir("omni_trio_plans")
