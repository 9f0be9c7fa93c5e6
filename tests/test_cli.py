"""The command line, with simulated engines: what it prints, which files it leaves, how it ends."""

from __future__ import annotations

import json
import os
import pty
import signal
import struct
import subprocess
import sys
import textwrap
import wave
import zlib

import numpy as np
import pytest
from click.testing import CliRunner

from omni_trio import open_runtime
from omni_trio.cli import _run, main
from omni_trio.cli._prompts import BadLine, parse_params, read_jobs
from omni_trio.cli._save import describe, png_bytes, sample_rate, save, to_json
from omni_trio.config import load_pipeline
from omni_trio.pipeline import Pipeline, StageSpec
from omni_trio.runtime import StageResult
from omni_trio.testing.script import Chunk, Die, Error, Finish, Stall, Wait
from omni_trio.testing.simulated import SimStage

PIPELINE = """
name = "sim"
[[stages]]
name = "thinker"
kind = "simulated"
options = { tokens = 3 }
[[stages]]
name = "talker"
kind = "simulated"
bridge = "tokens"
options = { tokens = 4 }
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "sim.toml").write_text(PIPELINE)
    return tmp_path


def omni(*arguments, input=None):  # noqa: A002 - as CliRunner calls it
    result = CliRunner().invoke(main, [str(argument) for argument in arguments], input=input)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def scripted(monkeypatch, **stages):
    """Let the command open a runtime whose stages do as the scripts say."""

    def open_scripted(pipeline, **options):
        return open_runtime(pipeline, clients=stages, **options)

    monkeypatch.setattr(_run, "open_runtime", open_scripted)


def lines(text):
    return [json.loads(line) for line in text.splitlines()]


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
    (folder / "guidance.py").write_text("def expand(context): return ()\ndef length(prompt): return 1\n")
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
        ("tokens = 4", "tokns = 4", "sim.toml: stages.talker.options.tokns: unknown option"),
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
    result = omni("run", "sim.toml", "--input", "-", input="\n\n")
    assert result.exit_code == 0
    assert "0 of 0 prompts" in result.stderr


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
        (["x", "--trace", "no/such/folder.json"], "--trace: the folder"),
        (["x", "--timeline", "no/such/folder.svg"], "--timeline: the folder"),
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
    ("line", "words"),
    [
        (b"[1]", "expected an object"),
        (b"{}", "prompt: expected a text or a list of token ids"),
        (b'{"prompt": []}', "prompt: expected"),
        (b'{"prompt": [true]}', "prompt: expected"),
        (b'{"prompt": [1.0]}', "prompt: expected"),
        (b'{"prompt": 3}', "prompt: expected"),
        (b'{"prompt": "x", "deadline": 0}', "deadline: expected"),
        (b'{"prompt": "x", "deadline": true}', "deadline: expected"),
        (b'{"prompt": "x", "deadline": NaN}', "deadline: expected"),
        (b'{"prompt": "x", "request_id": ""}', "request_id: expected"),
        (b'{"prompt": "x", "request_id": 3}', "request_id: expected"),
        (b'{"prompt": "x", "sampling_params": []}', "sampling_params: expected"),
        (b'{"prompt": "\xff"}', "not JSON"),
        (b"[" * 100_000, "not JSON"),
    ],
)
def test_bad_lines(line, words):
    ((number, error),) = read_jobs(TWO, [b"", line], {})
    assert number == 2
    assert isinstance(error, BadLine)
    assert words in str(error)


# Files


def result_of(modality, text="", token_ids=(), **data):
    return StageResult(
        stage="s",
        modality=modality,
        text=text,
        token_ids=token_ids,
        data=data,
        finish_reason="stop",
        stop_reason=None,
        metrics=None,
    )


def read_wav(path):
    with wave.open(str(path)) as file:
        frames = np.frombuffer(file.readframes(file.getnframes()), "<i2").reshape(-1, file.getnchannels())
        return frames, file.getframerate()


@pytest.mark.parametrize(
    ("audio", "frames"),
    [
        (np.array([0.0, 0.5, -1.0, 2.0, np.nan], np.float32), [[0], [16384], [-32767], [32767], [0]]),
        (np.array([0, 1000, -32768], np.int16), [[0], [1000], [-32768]]),
        (np.array([0, 100_000], np.int32), [[0], [32767]]),
        (np.array([[0.0, 1.0, 0.0], [1.0, 0.0, 0.0]]), [[0, 32767], [32767, 0], [0, 0]]),
        (np.array([[0, 1], [2, 3], [4, 5]], np.int16), [[0, 1], [2, 3], [4, 5]]),
        ([0.0, 1.0], [[0], [32767]]),
    ],
)
def test_audio(tmp_path, audio, frames):
    (path,) = save(result_of("audio", audio=audio, sr=np.array([8000])), tmp_path, "a")
    got, rate = read_wav(path)
    assert rate == 8000
    assert np.abs(got - np.array(frames)).max() <= 1


def test_tensors_are_saved_without_being_asked_for_their_library(tmp_path):
    torch = pytest.importorskip("torch")
    (path,) = save(result_of("audio", audio=torch.ones(3, dtype=torch.bfloat16), sample_rate=4), tmp_path, "a")
    assert read_wav(path)[0].tolist() == [[32767]] * 3
    assert to_json(result_of("audio", audio=torch.ones(3)), [], tmp_path)["data"] == {
        "audio": {"shape": [3], "dtype": "torch.float32"}
    }


def test_what_is_no_audio_file_is_saved_as_an_array(tmp_path):
    for data in ({"audio": np.zeros(3)}, {"audio": np.zeros(0), "sr": 1}, {"audio": np.zeros((2, 2, 2)), "sr": 1}):
        (path,) = save(result_of("audio", **data), tmp_path, "a")
        assert path.name == "a.npy"
        assert np.array_equal(np.load(path), data["audio"])


def test_an_image_becomes_a_png(tmp_path):
    image = np.arange(2 * 3 * 3, dtype=np.uint8).reshape(2, 3, 3)
    (path,) = save(result_of("image", image=image), tmp_path, "i")
    assert path.name == "i.png"
    content = path.read_bytes()
    assert content == png_bytes(image)
    assert content[:8] == b"\x89PNG\r\n\x1a\n"
    assert struct.unpack(">II", content[16:24]) == (3, 2)
    start = content.index(b"IDAT")
    size = struct.unpack(">I", content[start - 4 : start])[0]
    pixels = zlib.decompress(content[start + 4 : start + 4 + size])
    assert pixels == b"".join(b"\0" + row.tobytes() for row in image)
    assert save(result_of("image", image=image / 2), tmp_path, "i")[0].name == "i.npy"


def test_other_modalities(tmp_path):
    assert save(result_of("text", text="é\ud800"), tmp_path, "t")[0].read_bytes() == "é?".encode()
    assert save(result_of("tokens", token_ids=(1, 2)), tmp_path, "t") == []
    (path,) = save(result_of("embedding", embedding=[1.0, 2.0]), tmp_path, "e")
    assert np.load(path).tolist() == [1.0, 2.0]
    data = {"a/b": np.zeros(2), "words": "x", "rows": [[1], [2, 3]], "objects": np.array([object()])}
    paths = save(result_of("data", **data), tmp_path, "d")
    assert [path.name for path in paths] == ["d.a_b.npy"]
    assert save(result_of("embedding"), tmp_path, "none") == []


def test_json_holds_small_arrays_only_where_no_file_does(tmp_path):
    result = result_of("embedding", embedding=np.ones(3, np.float32), big=np.ones(10_000), n=np.int64(3), o=object)
    inline = to_json(result, [], None)["data"]
    assert inline["embedding"] == [1.0, 1.0, 1.0]
    assert inline["big"] == {"shape": [10_000], "dtype": "float64"}
    assert inline["n"] == 3
    data = to_json(result, [tmp_path / "x.npy"], tmp_path)
    assert data["data"]["embedding"] == {"shape": [3], "dtype": "float32"}
    assert data["files"] == ["x.npy"]
    json.dumps([inline, data])


def test_descriptions():
    assert describe(result_of("audio", audio=np.zeros(150), sample_rate=100)) == "1.50 s of audio"
    assert describe(result_of("embedding", embedding=np.zeros((1, 4)))) == "embedding of shape [1, 4]"
    assert describe(result_of("tokens", token_ids=(1, 2))) == "2 tokens"
    assert describe(result_of("data")) == "data"
    assert sample_rate({"sample_rate": "fast"}) == 0
    assert sample_rate({"sampling_rate": 3, "sr": 4}) == 3


# As a process

SLOW = PIPELINE.replace("tokens = 3", "token_time = 1000")


def spawn(*arguments, **options):
    command = [sys.executable, "-c", "from omni_trio.cli import main; main()", *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options)


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_it_in_order(folder, number, status):
    (folder / "slow.toml").write_text(SLOW)
    with spawn("run", "slow.toml", "--input", "-", "--timeline", "t.svg", stdin=subprocess.PIPE) as process:
        process.stdin.write('{"prompt": "x"}\n' * 3)
        process.stdin.close()
        for line in process.stderr:
            if line == "thinker #0: ready\n":
                break
        process.send_signal(number)
        process.stdin = None
        out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (status, "")
    assert err.endswith("stopping\n")
    assert "Traceback" not in err
    assert "runtime" not in err
    assert (folder / "t.svg").exists()


def test_a_signal_during_start_up(folder):
    (folder / "slow.toml").write_text(PIPELINE.replace("tokens = 3", "start_time = 1000"))
    with spawn("run", "slow.toml", "x") as process:
        assert "spawn" in process.stderr.readline()
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Traceback" not in err


def test_a_second_signal_does_not_cut_the_closing_short(folder):
    (folder / "slow.toml").write_text(SLOW.replace("token_time = 1000", "token_time = 1000, close_time = 2"))
    with spawn("run", "slow.toml", "x", "--trace", "t.json") as process:
        for line in process.stderr:
            if line == "thinker #0: ready\n":
                break
        process.send_signal(signal.SIGINT)
        assert any(line == "stopping\n" for line in process.stderr)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "still stopping" in err
    assert "Traceback" not in err
    assert (folder / "t.json").exists()


def test_a_reader_who_leaves_is_no_error(folder):
    (folder / "p.jsonl").write_text('{"prompt": "x"}\n' * 2000)
    with spawn("run", "-q", "sim.toml", "--input", "p.jsonl") as process:
        process.stdout.readline()
        process.stdout.close()
        err = process.stderr.read()
        assert process.wait(60) == 141
    assert err == ""


def test_bars_on_a_terminal(folder):
    (folder / "p.jsonl").write_text('{"prompt": "x"}\nnonsense\n')
    ours, theirs = pty.openpty()
    with os.fdopen(ours, "rb") as terminal:
        command = [sys.executable, "-c", "from omni_trio.cli import main; main()"]
        with subprocess.Popen(
            [*command, "run", "sim.toml", "--input", "p.jsonl"],
            stdout=subprocess.DEVNULL,
            stderr=theirs,
            env=os.environ | {"TERM": "xterm", "COLUMNS": "100"},
        ) as process:
            os.close(theirs)
            shown = b""
            try:
                while piece := terminal.read1(4096):
                    shown += piece
            except OSError:  # how Linux says that the other side of a terminal is closed
                pass
        assert process.returncode == 1
    for words in (b"starting", b"requests", b"1/2", b"2/2", b"1 failed", b"1 of 2 prompts were served"):
        assert words in shown


def test_help_is_there_without_any_engine(folder):
    code = "import sys; from omni_trio.cli import main; main(['run', '--help'], standalone_mode=False); "
    code += "print([m for m in ('torch', 'vllm', 'rich') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "Exit status:\n" in done.stdout
    assert done.stdout.endswith("[]\n")


def test_the_examples_in_the_help_are_prompts(folder):
    text = omni("run", "--help").stdout
    examples = [line.strip().encode() for line in text.splitlines() if line.strip().startswith('{"prompt"')]
    jobs = list(read_jobs(load_pipeline("sim.toml"), examples, {}))
    assert len(jobs) == 3
    assert not any(isinstance(job, tuple) for job in jobs)
