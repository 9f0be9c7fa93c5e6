"""Plans as files, run again from the command line, and traces as text, diagram and picture."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree as ET

import msgspec
import pytest

from omni_trio.testing.__main__ import main
from omni_trio.testing.plan import OperatorAct, Plan, RequestPlan, SegmentPlan, StagePlan
from omni_trio.testing.render import mermaid_sequence, messages, sequence_svg
from omni_trio.testing.replay import NoPlan, read_plan, replay, save_plan
from omni_trio.testing.script import Chunk, Duplicate, Error, Finish, Stall, Wait
from omni_trio.testing.simulation import run_simulation

GOOD = Plan(
    stages=(StagePlan(final=True, replicas=2), StagePlan(source=0, feed="output", final=True)),
    requests=(
        RequestPlan(scripts=((Chunk((1,)), Wait(1.0), Finish()), (Finish("stop", (3,)),))),
        RequestPlan(scripts=((Stall(),),), act="abort", when=0.5),
        RequestPlan(segments=(SegmentPlan((4,)), SegmentPlan((5,), after=1.0))),
        RequestPlan(scripts=((Error("<bad> & #1; \x00 worse"),),)),
        RequestPlan(scripts=((Stall(),),), act="leave", when=1.0),
    ),
    operator=(OperatorAct(at=5.0, act="kill"),),
)
HANGS = Plan(stages=(StagePlan(final=True),), requests=(RequestPlan(scripts=((Stall(),),)),))


# ---- files


def test_a_saved_plan_is_read_as_it_was(tmp_path: Path):
    path = save_plan(GOOD, tmp_path / "new" / "folder")
    assert read_plan(path) == GOOD
    assert save_plan(GOOD, path.parent) == path
    assert save_plan(HANGS, path.parent) != path


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "No such file"),
        ("{", "is no plan"),
        ("{}", "missing required field"),
        ('{"stages": [], "requests": 3}', "requests"),
        ("\udcff", "is no plan"),
    ],
)
def test_what_is_no_plan_is_told_so(tmp_path: Path, content: str | None, words: str, capsys):
    path = tmp_path / "plan.json"
    if content is not None:
        path.write_text(content, encoding="utf-8", errors="surrogateescape")
    with pytest.raises(NoPlan, match=words):
        read_plan(path)
    assert main(["replay", str(path)]) == 2
    assert words in capsys.readouterr().err


# ---- the command


def test_a_plan_that_is_right_ends_with_0(tmp_path: Path, capsys):
    path = save_plan(GOOD, tmp_path)
    assert main(["replay", str(path)]) == 0
    assert capsys.readouterr().out.endswith("nothing is wrong\n")


def test_a_plan_that_hangs_ends_with_1_and_its_timeline_is_there(tmp_path: Path, capsys):
    path = save_plan(HANGS, tmp_path)
    assert main(["replay", str(path), "--timeline"]) == 1
    out = capsys.readouterr().out
    assert "something still waits" in out
    assert "submit" in out


def test_violations_are_printed(tmp_path: Path, capsys, monkeypatch: pytest.MonkeyPatch):
    from omni_trio.runtime._orchestrator import Orchestrator

    path = save_plan(GOOD, tmp_path)
    monkeypatch.setattr(Orchestrator, "forget", lambda self, task: None)
    assert main(["replay", str(path)]) == 1
    assert "I5 no_leak" in capsys.readouterr().out


def test_everything_is_written_that_is_asked_for(tmp_path: Path, capsys):
    path = save_plan(GOOD, tmp_path)
    files = [tmp_path / name for name in ("trace.mmd", "trace.svg", "trace.json")]
    options = [
        word for name, file in zip(("mermaid", "svg", "json"), files, strict=True) for word in (f"--{name}", file)
    ]
    assert main(["replay", str(path), "--seed", "3", *map(str, options)]) == 0
    trace = run_simulation(msgspec.structs.replace(GOOD, seed=3))
    assert files[0].read_text(encoding="utf-8") == mermaid_sequence(trace)
    assert files[1].read_text(encoding="utf-8") == sequence_svg(trace, title=path.name)
    assert files[2].read_bytes() == trace.to_json()


def test_a_picture_that_can_not_be_written_is_an_error(tmp_path: Path, capsys):
    path = save_plan(GOOD, tmp_path)
    assert main(["replay", str(path), "--svg", str(tmp_path / "no" / "folder.svg")]) == 2
    assert "No such file" in capsys.readouterr().err


def test_it_is_a_program(tmp_path: Path):
    path = save_plan(HANGS, tmp_path)
    command = [sys.executable, "-W", "error", "-m", "omni_trio.testing", "replay", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stderr


def test_a_replay_is_the_simulation_again():
    assert replay(GOOD).trace.to_json() == run_simulation(GOOD).to_json()
    assert not replay(GOOD).violations
    assert replay(HANGS, seed=3).trace.plan.seed == 3


# ---- diagrams


TRACE = run_simulation(GOOD)


def test_every_entry_is_a_message_between_those_whom_it_concerns():
    told = list(messages(TRACE))
    assert len(told) == len(TRACE.entries)
    ways = {(message.source.rstrip("0123456789"), message.target.rstrip("0123456789")) for message in told}
    assert ways == {
        ("caller ", "runtime"),
        ("runtime", "caller "),
        ("runtime", "s0.r"),
        ("runtime", "s1.r"),
        ("s0.r", "runtime"),
        ("s1.r", "runtime"),
        ("s0.r", "s0.r"),
        ("s1.r", "s1.r"),
        ("operator", "runtime"),
        ("runtime", "operator"),
        ("operator", "s0.r"),
        ("runtime", "runtime"),
    }


def test_a_mermaid_diagram_has_callers_left_and_stages_right():
    text = mermaid_sequence(TRACE)
    lines = text.splitlines()
    assert lines[0] == "sequenceDiagram"
    names = [line.partition(" as ")[2] for line in lines if " as " in line]
    assert names == [*(f"caller {index}" for index in range(5)), "operator", "runtime", "s0.r0", "s0.r1", "s1.r0"]
    assert "    p0->>p6: ask" in lines
    assert "    p6-->>p0: output of s1 [3]" in lines
    assert "#lt;bad#gt; #amp; #35;1#59;" in text
    assert "    Note over p0,p9: 0.5 s" in lines


def test_a_picture_is_a_document_by_itself():
    picture = ET.fromstring(sequence_svg(TRACE, title="<&>"))
    texts = ["".join(element.itertext()) for element in picture.iter("{http://www.w3.org/2000/svg}text")]
    assert texts[0] == "<&>"
    for words in ("caller 4", "runtime", "s0.r1", "0.5 s"):
        assert words in texts, words
    assert any("\ufffd worse" in text for text in texts)


def test_nothing_makes_an_empty_diagram():
    assert mermaid_sequence([]) == "sequenceDiagram\n"
    ET.fromstring(sequence_svg([]))


def test_a_trace_that_repeats_an_output_is_drawn_too():
    plan = Plan(stages=(StagePlan(final=True),), requests=(RequestPlan(scripts=((Finish(), Duplicate()),)),))
    assert mermaid_sequence(run_simulation(plan))
