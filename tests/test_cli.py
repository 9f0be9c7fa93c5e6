"""The command line, with simulated engines: what it prints, how it ends, what it takes for a prompt."""

from __future__ import annotations

import json
import math
import textwrap
import wave

import numpy as np
import pytest

from cli_support import PIPELINE, enter, lines, omni, scripted
from omni_trio.cli import _run
from omni_trio.cli._prompts import BadLine, parse_params, read_jobs
from omni_trio.config import load_pipeline
from omni_trio.errors import ConfigError
from omni_trio.pipeline import Pipeline, StageSpec
from omni_trio.runtime._admission import split_params
from omni_trio.testing.script import Chunk, Die, Error, Finish, Stall, Wait
from omni_trio.testing.simulated import SimStage


@pytest.fixture
def folder(tmp_path, monkeypatch):
    return enter(tmp_path, monkeypatch)


# check


def test_check_shows_the_stages(folder):
    (folder / "own.py").write_text("class Voice: pass")
    (folder / "more.yaml").write_text(
        textwrap.dedent("""
        name: story
        stages:
          - {name: thinker, model: hub/m, replicas: 2, devices: [0, 1]}
          - {name: voice, kind: worker, target: "own:Voice", bridge: text, feed: output, modality: audio}
        """)
    )
    result = omni("check", "more.yaml")
    assert result.exit_code == 0
    for words in ("pipeline story", "hub/m", "own:Voice", "the prompt", "streamed through text", "2 on 0; 1", "(text)"):
        assert words in result.stdout
    assert "brackets" in result.stdout
    assert "limits" not in result.stdout
    assert result.stderr == ""


MODES = """
expand: guidance:expand
stages:
  - {name: thinker, model: hub/m, dispatch_timeout: 2}
  - {name: painter, kind: diffusion, target: "guidance:Painter", feed: kv}
  - {name: poet, kind: simulated, feed: connector, placeholder: "guidance:length", chunk_timeout: 0.5}
  - {name: reader, kind: simulated, feed: connector}
"""
PAIR = """
stages:
  - {name: first, kind: simulated, role: prefill, dispatch_timeout: 3, when_empty: skip}
  - {name: second, kind: simulated, role: decode, start_timeout: 10}
"""


def test_check_shows_the_modes(folder):
    (folder / "guidance.py").write_text(
        "def expand(context): return ()\ndef length(prompt): return 1\nclass Painter: pass\n"
    )
    (folder / "modes.yaml").write_text(MODES)
    shown = omni("check", "modes.yaml").stdout
    for words in (
        "thinker, through original_prompt, when its KV cache is ready",
        "painter, by connector, placeholder by guidance:length",
        "poet, by connector ",
        "dispatch_timeout 2 s",
        "chunk_timeout 0.5 s",
        "thinker also runs the companions that guidance:expand makes; what it feeds waits for them ",
    ):
        assert words in shown
    (folder / "modes.yaml").write_text(f"bundle_timeout: 7{MODES}")
    assert "waits for them, 7 s at most" in omni("check", "modes.yaml").stdout


@pytest.mark.parametrize(("handoff", "found"), [("params", " "), ("content", ", found by its content ")])
def test_check_shows_a_pair(folder, handoff, found):
    (folder / "pair.yaml").write_text(f"{PAIR[:-2]}, handoff: {handoff}}}\n")
    shown = omni("check", "pair.yaml").stdout
    for words in (
        "simulated, prefill",
        "simulated, decode",
        f"the prompt, and the KV cache of first{found}",
        "dispatch_timeout 3 s, then skipped",
        "start_timeout 10 s",
    ):
        assert words in shown


def test_check_prints_the_graph(folder):
    alone = omni("check", "--mermaid", "sim.toml")
    assert alone.exit_code == 0
    assert alone.stdout.startswith("flowchart LR\n")
    assert 's0 -->|"tokens"| s1' in alone.stdout
    shown = omni("check", "sim.toml").stdout
    assert shown.startswith("pipeline sim ")
    assert shown.endswith(f"\n\n{alone.stdout}")


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ('bridge = "tokens"', 'bridge = "tokns"', "sim.toml:10: stages.talker.bridge: no built-in bridge"),
        ("kind =", "knd =", "sim.toml:5: stages.thinker.knd: there is no such key; did you mean 'kind'?"),
        ("tokens = 4", "tokns = 4", "sim.toml:11: stages.talker.options.tokns: unknown option"),
        ("tokens = 4", "tokens = -3", "sim.toml:11: stages.talker.options.tokens: expected a whole number from 1 up"),
        ("name", "[[", "sim.toml:2: this is not valid TOML"),
    ],
)
@pytest.mark.parametrize("command", [["check"], ["run", "--quiet"]])
def test_a_wrong_file_ends_with_2(folder, command, old, new, words):
    (folder / "sim.toml").write_text(PIPELINE.replace(old, new, 1))
    result = omni(*command, "sim.toml", *(["hello"] if command[0] == "run" else []))
    assert result.exit_code == 2
    assert result.stderr.startswith(words)
    assert result.stdout == ""


@pytest.mark.parametrize(
    ("key", "values"),
    [
        ("tokens", [0, -3, 2.5, math.nan, True, "3"]),
        ("capacity", [0, -1, math.inf]),
        ("max_prompt_tokens", [0, 1.5]),
        ("token_time", [-1, math.nan, "1", False]),
        ("close_time", [-0.5]),
        ("start_error", [3, True]),
    ],
)
def test_options_of_simulated_stages_have_bounds(key, values):
    for value in values:
        with pytest.raises(ConfigError) as caught:
            SimStage.from_options({key: value}, stage="a")
        assert caught.value.key == f"stages.a.options.{key}"
        assert caught.value.message.startswith("expected a ")
        assert caught.value.message.endswith(f", not {value!r}")


def test_a_simulated_stage_of_a_file_keeps_no_log():
    stage = SimStage.from_options({"tokens": 3, "token_time": 0, "abort_time": math.inf, "start_error": ""}, stage="a")
    assert (stage.tokens, stage.abort_time, stage.log) == (3, math.inf, None)


def test_a_bridge_that_exits_is_an_error(folder):
    (folder / "sim.toml").write_text(PIPELINE.replace('bridge = "tokens"', 'bridge = "leaves:own"'))
    (folder / "leaves.py").write_text("import sys\nsys.exit(0)\n")
    result = omni("check", "sim.toml")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "sim.toml:10: stages.talker.bridge: importing 'leaves' called sys.exit()" in result.stderr


# run: one prompt


def test_run_prints_the_text(folder):
    result = omni("run", "sim.toml", "hello you")
    assert result.exit_code == 0
    assert result.stdout == "w3 w4 w5 w6 \n"
    assert "thinker #0: ready" in result.stderr


def test_run_can_be_quiet(folder):
    result = omni("run", "-q", "sim.toml", "hello you", "--out", "out")
    assert (result.exit_code, result.stderr) == (0, "")
    assert (folder / "out" / "talker.txt").read_text() == "w3 w4 w5 w6 "
    (record,) = lines((folder / "out" / "results.jsonl").read_text())
    assert record["outputs"]["talker"]["text"] == "w3 w4 w5 w6 "
    assert record["outputs"]["talker"]["files"] == ["talker.txt"]
    assert record["outputs"]["talker"]["metrics"]["num_tokens_out"] == 4


def test_run_takes_parameters(folder):
    result = omni("run", "-q", "sim.toml", "x", "--param", "talker.max_tokens=2", "--param", "thinker.temperature=0.5")
    assert result.stdout == "w3 w4 \n"


def test_several_texts_do_not_mix(folder):
    (folder / "sim.toml").write_text(PIPELINE.replace('name = "thinker"', 'name = "thinker"\nfinal_output = true'))
    assert omni("run", "-q", "sim.toml", "x").stdout == "w1 w2 w3 \n\n[talker]\nw3 w4 w5 w6\n"


def test_a_refused_prompt_ends_with_1(folder):
    result = omni("run", "-q", "sim.toml", "x", "--param", "talker.max_tokens=0", "--out", "out")
    assert result.exit_code == 1
    assert "max_tokens must be a whole number" in result.stderr
    (record,) = lines((folder / "out" / "results.jsonl").read_text())
    assert record["error"]["type"] == "InvalidRequest"


def test_a_deadline_ends_with_1(folder, monkeypatch):
    scripted(monkeypatch, thinker=SimStage(script=lambda _: (Stall(),)), talker=SimStage())
    result = omni("run", "-q", "sim.toml", "x", "--deadline", "0.05")
    assert result.exit_code == 1
    assert "its deadline passed" in result.stderr


def test_an_error_after_some_text_stands_on_its_own_line(folder, monkeypatch):
    scripted(
        monkeypatch, thinker=SimStage(), talker=SimStage(script=lambda _: (Chunk((1,)), Wait(0.01), Error("oh no")))
    )
    result = omni("run", "-q", "sim.toml", "x")
    assert (result.exit_code, result.stdout) == (1, "w1 \n")
    assert "oh no" in result.stderr


def test_a_death_ends_with_3_and_is_told_once(folder, monkeypatch):
    scripted(monkeypatch, thinker=SimStage(script=lambda _: (Die("blown up"),)), talker=SimStage())
    result = omni("run", "-q", "sim.toml", "x", "--timeline", "run.svg")
    assert result.exit_code == 3
    assert result.stderr.count("blown up") == 1
    assert "died: blown up" in (folder / "run.svg").read_text()


def test_a_failed_start_ends_with_3(folder):
    (folder / "sim.toml").write_text(PIPELINE.replace("tokens = 4", 'start_error = "no room"'))
    result = omni("run", "-q", "sim.toml", "x")
    assert result.exit_code == 3
    assert "no room" in result.stderr


def test_audio_becomes_a_wav_file(folder, monkeypatch):
    (folder / "sim.toml").write_text(PIPELINE + 'modality = "audio"\n')
    piece = {"audio": np.full(50, 0.5, np.float32), "sample_rate": 100}
    scripted(
        monkeypatch,
        thinker=SimStage(),
        talker=SimStage(script=lambda _: (Chunk(data=piece), Chunk(data=piece), Finish())),
    )
    result = omni("run", "sim.toml", "x", "--out", "out")
    assert result.exit_code == 0
    assert "wrote out/talker.wav" in result.stderr
    with wave.open("out/talker.wav") as file:
        assert (file.getnframes(), file.getframerate(), file.getnchannels(), file.getsampwidth()) == (100, 100, 1, 2)
    result = omni("run", "sim.toml", "x")
    assert "talker: 1.00 s of audio; give --out DIR to keep it" in result.stderr
    assert result.stdout == ""


def test_trace_and_timeline(folder):
    assert omni("run", "sim.toml", "x", "--trace", "t.json", "--timeline", "t.svg").exit_code == 0
    assert json.loads((folder / "t.json").read_text())["traceEvents"]
    assert (folder / "t.svg").read_text().startswith("<svg ")


# run: many prompts

PROMPTS = """\
{"prompt": "one"}
{"prompt": [7, 8], "request_id": "mine", "sampling_params": {"max_tokens": 1}}

{"promt": "x"}
nonsense
{"prompt": "x", "sampling_params": {"talker": {"max_tokns": 1}}}
"""


def test_a_batch_goes_on_after_bad_lines(folder):
    (folder / "p.jsonl").write_text(PROMPTS)
    result = omni("run", "sim.toml", "--input", "p.jsonl")
    assert result.exit_code == 1
    records = {record["line"]: record for record in lines(result.stdout)}
    assert sorted(records) == [1, 2, 4, 5, 6]
    assert records[1]["outputs"]["talker"]["text"] == "w3 w4 w5 w6 "
    assert records[2]["request_id"] == "mine"
    assert records[2]["outputs"]["talker"]["token_ids"] == [1, 2, 3, 4]
    assert "did you mean 'prompt'?" in records[4]["error"]["message"]
    assert records[5]["error"]["type"] == "BadLine"
    assert (records[6]["error"]["type"], records[6]["error"]["stage"]) == ("InvalidRequest", "talker")
    assert "p.jsonl:4: unknown key 'promt'" in result.stderr
    assert "p.jsonl:5: this is not JSON" in result.stderr
    assert "2 of 5 prompts were served" in result.stderr


def test_a_batch_from_stdin_into_a_folder(folder):
    result = omni("run", "-q", "sim.toml", "--input", "-", "--out", "a/b", input='{"prompt": "one"}\n{"prompt": "two"}')
    assert (result.exit_code, result.stdout, result.stderr) == (0, "", "")
    assert sorted(path.name for path in (folder / "a" / "b").iterdir()) == [
        "00001-talker.txt",
        "00002-talker.txt",
        "results.jsonl",
    ]


def test_no_more_than_concurrency_at_a_time(folder, monkeypatch):
    running, most = set(), [0]

    def script(request):
        running.add(request.request_id)
        most[0] = max(most[0], len(running))
        return (Wait(0.005), Finish("stop", (1,)))

    class Last(SimStage):
        pass

    def done(request):
        running.pop()
        return (Finish("stop", (1,)),)

    scripted(monkeypatch, thinker=SimStage(script=script), talker=SimStage(script=done))
    result = omni("run", "-q", "sim.toml", "--input", "-", "--concurrency", "3", input='{"prompt": "x"}\n' * 20)
    assert result.exit_code == 0
    assert len(lines(result.stdout)) == 20
    assert most == [3]


def test_an_empty_batch(folder):
    result = omni("run", "sim.toml", "--input", "-", "--timeline", "t.svg", input="\n\n")
    assert result.exit_code == 0
    assert result.stderr == "0 of 0 prompts were served\n"
    assert (folder / "t.svg").read_text().startswith("<svg ")


def test_bad_lines_are_told_before_anything_starts(folder):
    bad = '{"prompt": ""}\n{"prompt": "x", "sampling_params": {"talkr": {}}}\n'
    result = omni("run", "sim.toml", "--input", "-", input=f'{{"prompt": "x"}}\n{bad}')
    assert result.exit_code == 1
    shown = result.stderr.splitlines()
    assert shown[0] == "-:2: prompt: the prompt is empty"
    assert shown[1].startswith("-:3: sampling_params: no stage is called 'talkr'; did you mean 'talker'?")
    assert "thinker #0: ready" in shown
    assert shown[-1] == "1 of 3 prompts were served"
    nothing = omni("run", "sim.toml", "--input", "-", input=bad)
    assert (nothing.exit_code, len(lines(nothing.stdout))) == (1, 2)
    assert "ready" not in nothing.stderr


def test_a_picture_that_can_not_be_written_after_all(folder):
    result = omni("run", "-q", "sim.toml", "x", "--trace", "/dev/full", "--timeline", "t.svg")
    assert (result.exit_code, result.stdout) == (1, "w3 w4 w5 w6 \n")
    assert result.stderr == "can not write /dev/full: No space left on device\n"
    assert (folder / "t.svg").exists()


def test_the_look_at_a_pictures_file_leaves_it_as_it_is(folder):
    (folder / "old.json").write_text("kept")
    result = omni("run", "sim.toml", "", "--trace", "old.json", "--timeline", "new.svg")
    assert result.exit_code == 2
    _run._check_writable(folder / "old.json")
    _run._check_writable(folder / "new.svg")
    assert (folder / "old.json").read_text() == "kept"
    assert not (folder / "new.svg").exists()
    (folder / "link.svg").symlink_to("new.svg")
    _run._check_writable(folder / "link.svg")
    assert [path.name for path in folder.glob("*.svg")] == ["link.svg"]


def test_a_death_in_a_batch(folder, monkeypatch):
    scripted(monkeypatch, thinker=SimStage(script=lambda _: (Die("blown up"),)), talker=SimStage())
    result = omni("run", "-q", "sim.toml", "--input", "-", "--concurrency", "2", input='{"prompt": "x"}\n' * 5)
    assert result.exit_code == 3
    assert all(record["error"]["type"] in ("EngineDied", "ShutDown") for record in lines(result.stdout))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "give either a PROMPT or --input FILE"),
        (["x", "--input", "p"], "give either a PROMPT or --input FILE"),
        (["x", "--concurrency", "0"], "concurrency"),
        (["x", "--deadline", "0"], "deadline"),
        (["x", "--deadline", "nan"], "deadline"),
        (["x", "--param", "nonsense"], "not of the form stage.key=value"),
        (["x", "--param", "talker.=1"], "not of the form stage.key=value"),
        (["x", "--param", "tlker.a=1"], "did you mean 'talker'?"),
        (["--input", "none.jsonl"], "none.jsonl"),
        (["x", "--trace", "no/such/folder.json"], "--trace: can not write no/such/folder.json: No such file"),
        (["x", "--trace", "."], "--trace: can not write .: Is a directory"),
        (["x", "--timeline", "/proc/x.svg"], "--timeline: can not write /proc/x.svg: "),
        ([""], "PROMPT: the prompt is empty"),
        (["x", "--out", "sim.toml"], "--out"),
    ],
)
def test_wrong_usage_ends_with_2(folder, arguments, words):
    result = omni("run", "sim.toml", *arguments)
    assert result.exit_code == 2
    assert words in result.stderr
    assert "spawn" not in result.stderr


# Prompts and parameters

TWO = Pipeline((StageSpec(name="a", kind="simulated"), StageSpec(name="b", kind="simulated")))


def test_parameters():
    texts = ["a.x=1", "a.y=0.5", "b.z=[1, null]", "b.s=plain words", "b.t=a=b", "b.u.v=true", "b.w="]
    assert parse_params(TWO, texts) == {
        "a": {"x": 1, "y": 0.5},
        "b": {"z": [1, None], "s": "plain words", "t": "a=b", "u.v": True, "w": ""},
    }


def test_a_lines_parameters_go_over_the_command_lines():
    params = {"a": {"x": 1, "y": 1}, "b": {"z": 1}}
    text = (
        b'{"prompt": "p", "sampling_params": {"y": 2}}\n'
        b'{"prompt": "p", "sampling_params": {"b": {"z": 2}}}\n'
        b'{"prompt": "p", "deadline": 0.5}'
    )
    first, second, third = read_jobs(TWO, text.splitlines(), params)
    assert first.params == {"a": {"x": 1, "y": 2}, "b": {"z": 1}}
    assert second.params == {"a": {"x": 1, "y": 1}, "b": {"z": 2}}
    assert third.params == params == {"a": {"x": 1, "y": 1}, "b": {"z": 1}}
    assert (first.deadline, third.deadline) == (None, 0.5)


@pytest.mark.parametrize(
    ("given", "params"),
    [
        (None, {}),
        ({"x": 1}, {"first": {"x": 1}}),
        (
            {"structured_outputs": {"choice": ["a"]}, "y": 1},
            {"first": {"structured_outputs": {"choice": ["a"]}, "y": 1}},
        ),
        (
            {"logit_bias": {"5": 1}, "extra_args": {"k": {}}},
            {"first": {"logit_bias": {"5": 1}, "extra_args": {"k": {}}}},
        ),
        ({"second": {"x": 1}}, {"second": {"x": 1}}),
        ([None, {"x": 1}], {"second": {"x": 1}}),
    ],
)
def test_parameters_are_dealt_out_as_the_runtime_does(given, params):
    names = ("first", "second")
    pipeline = Pipeline([StageSpec(name=name, kind="simulated") for name in names])
    (job,) = read_jobs(pipeline, [json.dumps({"prompt": "p", "sampling_params": given}).encode()], {})
    assert job.params == params
    dealt = split_params(job.params or None, pipeline)
    assert dealt == {names.index(name): values for name, values in params.items()}
    assert {stage: values for stage, values in split_params(given, pipeline).items() if values is not None} == dealt


def test_a_slip_in_a_stages_name_is_named():
    pipeline = Pipeline([StageSpec(name=name, kind="simulated") for name in ("thinker", "talker")])
    ((_, error),) = read_jobs(pipeline, [b'{"prompt": "p", "sampling_params": {"talkr": {"max_tokens": 1}}}'], {})
    assert "no stage is called 'talkr'; did you mean 'talker'?" in str(error)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (b"[1]", "expected an object"),
        (b"{}", "prompt: expected a text or a list of token ids"),
        (b'{"prompt": ""}', "prompt: the prompt is empty"),
        (b'{"prompt": []}', "prompt: the prompt is empty"),
        (b'{"prompt": [true]}', "prompt: a prompt of token ids holds whole numbers from 0 up, not True"),
        (b'{"prompt": [1.0]}', "not 1.0"),
        (b'{"prompt": [-1]}', "not -1"),
        (b'{"prompt": {"text": "x"}}', "prompt: expected"),
        (b'{"prompt": 3}', "prompt: expected"),
        (b'{"prompt": "x", "deadline": 0}', "deadline: expected"),
        (b'{"prompt": "x", "deadline": true}', "deadline: expected"),
        (b'{"prompt": "x", "deadline": NaN}', "deadline: expected"),
        (b'{"prompt": "x", "request_id": ""}', "request_id: expected"),
        (b'{"prompt": "x", "request_id": 3}', "request_id: expected"),
        (
            b'{"prompt": "x", "sampling_params": []}',
            "sampling_params as a list needs one entry per stage (2: a, b), not 0",
        ),
        (b'{"prompt": "x", "sampling_params": 3}', "sampling_params: expected an object for the stage 'a', not 3"),
        (b'{"prompt": "x", "sampling_params": {"b": 3}}', "expected an object for the stage 'b', not 3"),
        (b'{"prompt": "x", "sampling_params": {"b": {}, "c": {}}}', "no stage is called 'c'"),
        (b'{"prompt": "\xff"}', "not JSON"),
        (b"[" * 100_000, "not JSON"),
    ],
)
def test_bad_lines(line, words):
    ((number, error),) = read_jobs(TWO, [b"", line], {})
    assert number == 2
    assert isinstance(error, BadLine)
    assert words in str(error)


def test_the_examples_in_the_help_are_prompts(folder):
    text = omni("run", "--help").stdout
    examples = [line.strip().encode() for line in text.splitlines() if line.strip().startswith('{"prompt"')]
    jobs = list(read_jobs(load_pipeline("sim.toml"), examples, {}))
    assert len(jobs) == 3
    assert not any(isinstance(job, tuple) for job in jobs)
