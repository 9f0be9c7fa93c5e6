"""``python -m omni_trio.testing``: run a saved plan again and look at what happens."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from .render import mermaid_sequence, sequence_svg
from .replay import NoPlan, read_plan, replay

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line. Returns the exit status: 0, or 1 where something is wrong, or 2 where there is no plan."""
    given = _parser().parse_args(arguments)
    try:
        plan = read_plan(given.plan)
    except NoPlan as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    done = replay(plan, seed=given.seed)
    if given.timeline:
        print(done.trace.timeline())
    try:
        if given.mermaid is not None:
            given.mermaid.write_text(mermaid_sequence(done.trace), encoding="utf-8")
        if given.svg is not None:
            given.svg.write_text(sequence_svg(done.trace, title=given.plan.name), encoding="utf-8")
        if given.json is not None:
            given.json.write_bytes(done.trace.to_json())
    except OSError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for violation in done.violations:
        print(violation)
    if not done.violations:
        print(f"{len(plan.requests)} requests, {len(done.trace.entries)} entries: nothing is wrong")
    return 1 if done.violations else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m omni_trio.testing", description="Tools for simulations.")
    commands = parser.add_subparsers(required=True, metavar="command")
    command = commands.add_parser(
        "replay",
        help="run a saved plan and all checks",
        description="Run a saved plan and all checks. Exit status: 0; 1 if something is wrong; 2 if there is no plan.",
    )
    command.add_argument("plan", type=Path, help="the file")
    command.add_argument("--seed", type=int, metavar="N", help="of trio's scheduler, in place of the plan's own")
    command.add_argument("--timeline", action="store_true", help="print what happens")
    command.add_argument("--mermaid", type=Path, metavar="FILE", help="write a Mermaid sequence diagram")
    command.add_argument("--svg", type=Path, metavar="FILE", help="write a picture")
    command.add_argument("--json", type=Path, metavar="FILE", help="write the trace")
    return parser


if __name__ == "__main__":
    sys.exit(main())
