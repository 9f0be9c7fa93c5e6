"""What the command line keeps of results: files, lines of JSON, and what it does with what it can not keep."""

from __future__ import annotations

import json
import math
import struct
import wave
import zlib

import numpy as np
import pytest

from cli_support import PIPELINE, enter, lines, omni, scripted
from omni_trio.cli._save import describe, json_line, png_bytes, sample_rate, save, to_json
from omni_trio.runtime import StageResult
from omni_trio.testing.script import Chunk, Finish
from omni_trio.testing.simulated import SimStage


@pytest.fixture
def folder(tmp_path, monkeypatch):
    return enter(tmp_path, monkeypatch)


ODD_RATES = [math.nan, math.inf, 1e12, -1, 0, "fast", [[1], [1, 2]], None]


@pytest.mark.parametrize("rate", ODD_RATES, ids=repr)
def test_an_output_that_can_not_be_kept_fails_alone(folder, monkeypatch, rate):
    (folder / "sim.toml").write_text(PIPELINE + 'modality = "audio"\n')

    def script(request):
        odd = request.request_id.startswith("odd")
        return (Chunk(data={"audio": np.zeros(5), "sample_rate": rate if odd else 100}), Finish())

    scripted(monkeypatch, thinker=SimStage(), talker=SimStage(script=script))
    prompts = "".join(json.dumps({"prompt": "x", "request_id": name}) + "\n" for name in ("fine", "odd", "well"))
    result = omni("run", "sim.toml", "--input", "-", "--out", "out", input=prompts)
    assert result.exit_code == 1
    assert "-:2: stage 'talker': sample_rate is " in result.stderr
    assert "2 of 3 prompts were served" in result.stderr
    names = {path.name for path in (folder / "out").iterdir()}
    assert names == {"00001-talker.wav", "00002-talker.npy", "00003-talker.wav", "results.jsonl"}
    records = {record["line"]: record for record in lines((folder / "out" / "results.jsonl").read_text())}
    assert records[2]["error"]["type"] == "BadOutput"
    assert records[2]["outputs"]["talker"]["files"] == ["00002-talker.npy"]
    assert not any("error" in records[line] for line in (1, 3))


def test_an_output_that_json_can_not_hold_fails_alone(folder, monkeypatch):
    (folder / "sim.toml").write_text(PIPELINE + 'modality = "data"\n')
    deep = []
    for _ in range(100_000):
        deep = [deep]

    def script(request):
        return (Chunk(data={"deep": deep if request.request_id.startswith("odd") else 1}), Finish())

    scripted(monkeypatch, thinker=SimStage(), talker=SimStage(script=script))
    prompts = '{"prompt": "x", "request_id": "odd"}\n{"prompt": "x"}\n'
    result = omni("run", "sim.toml", "--input", "-", input=prompts)
    assert result.exit_code == 1
    assert "-:1: stage 'talker': its output can not be kept: RecursionError" in result.stderr
    records = {record["line"]: record for record in lines(result.stdout)}
    assert (records[1]["error"]["type"], records[1]["outputs"]) == ("BadOutput", {})
    assert records[2]["outputs"]["talker"]["data"] == {"deep": 1}
    one = omni("run", "-q", "sim.toml", "x", "--out", "out")
    assert one.exit_code == 0


def test_a_folder_that_can_not_be_written_ends_it(folder):
    (folder / "out").mkdir()
    (folder / "out" / "results.jsonl").symlink_to("/dev/full")
    result = omni("run", "-q", "sim.toml", "--input", "-", "--out", "out", input='{"prompt": "x"}\n' * 3)
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.count("\n") == 1
    assert result.stderr.startswith("can not write the results: [Errno 28]")


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
        (np.array([0, 255], np.uint8), [[0], [255]]),
        (np.array([False, True]), [[0], [1]]),
        (np.array([[0.0, 1.0, 0.0], [1.0, 0.0, 0.0]]), [[0, 32767], [32767, 0], [0, 0]]),
        (np.array([[0, 1], [2, 3], [4, 5]], np.int16), [[0, 1], [2, 3], [4, 5]]),
        ([0.0, 1.0], [[0], [32767]]),
    ],
)
def test_audio(tmp_path, audio, frames):
    (path,) = save(result_of("audio", audio=audio, sr=np.array([8000])), tmp_path, "a", set())
    got, rate = read_wav(path)
    assert rate == 8000
    assert np.abs(got - np.array(frames)).max() <= 1


def test_tensors_are_saved_without_being_asked_for_their_library(tmp_path):
    torch = pytest.importorskip("torch")
    (path,) = save(result_of("audio", audio=torch.ones(3, dtype=torch.bfloat16), sample_rate=4), tmp_path, "a", set())
    assert read_wav(path)[0].tolist() == [[32767]] * 3
    assert to_json(result_of("audio", audio=torch.ones(3)), [], tmp_path)["data"] == {
        "audio": {"shape": [3], "dtype": "torch.float32"}
    }


def test_what_is_no_audio_file_is_saved_as_an_array(tmp_path):
    shapes = (0, (2, 2, 2), (200, 300))
    odd = [{"audio": np.zeros(shape), "sr": 1} for shape in shapes]
    for data in ({"audio": np.zeros(3)}, *odd, {"audio": np.zeros(3, np.complex64), "sr": 1}):
        (path,) = save(result_of("audio", **data), tmp_path, "a", set())
        assert path.name == "a.npy"
        assert np.array_equal(np.load(path), data["audio"])


def test_an_image_becomes_a_png(tmp_path):
    image = np.arange(2 * 3 * 3, dtype=np.uint8).reshape(2, 3, 3)
    (path,) = save(result_of("image", image=image), tmp_path, "i", set())
    assert path.name == "i.png"
    content = path.read_bytes()
    assert content == png_bytes(image)
    assert content[:8] == b"\x89PNG\r\n\x1a\n"
    assert struct.unpack(">II", content[16:24]) == (3, 2)
    start = content.index(b"IDAT")
    size = struct.unpack(">I", content[start - 4 : start])[0]
    pixels = zlib.decompress(content[start + 4 : start + 4 + size])
    assert pixels == b"".join(b"\0" + row.tobytes() for row in image)
    assert save(result_of("image", image=image / 2), tmp_path, "i", set())[0].name == "i.npy"


def test_other_modalities(tmp_path):
    assert save(result_of("text", text="é\ud800"), tmp_path, "t", set())[0].read_bytes() == "é?".encode()
    assert save(result_of("tokens", token_ids=(1, 2)), tmp_path, "t", set()) == []
    (path,) = save(result_of("embedding", embedding=[1.0, 2.0]), tmp_path, "e", set())
    assert np.load(path).tolist() == [1.0, 2.0]
    data = {"a/b": np.zeros(2), "words": "x", "rows": [[1], [2, 3]], "objects": np.array([object()])}
    paths = save(result_of("data", **data), tmp_path, "d", set())
    assert [path.name for path in paths] == ["d.a_b.npy"]
    assert save(result_of("embedding"), tmp_path, "none", set()) == []


def test_names_of_files_differ_and_are_not_too_long(tmp_path):
    keys = ("a/b", "a_b", "a_b-2", "é" * 300, "é" * 301, "", "..")
    data = {key: np.full(2, index) for index, key in enumerate(keys)}
    taken = set()
    paths = save(result_of("data", **data), tmp_path, "d", taken)
    assert [path.name for path in paths[:3]] == ["d.a_b.npy", "d.a_b-2.npy", "d.a_b-2-2.npy"]
    assert [np.load(path).tolist() for path in paths] == [[index, index] for index in range(len(keys))]
    assert len({path.resolve() for path in tmp_path.iterdir()}) == len(keys)
    (path,) = save(result_of("text", text="x"), tmp_path, "s" * 1000, taken)
    (other,) = save(result_of("text", text="y"), tmp_path, "s" * 1001, taken)
    assert (path.read_text(), other.read_text()) == ("x", "y")


def test_json_has_words_for_numbers_that_it_does_not_have():
    data = {
        "a": math.nan,
        "b": [math.inf, -math.inf, 1.5],
        "c": np.array([1.0, np.nan], np.float32),
        "d": np.float64("inf"),
        "e": np.longdouble(0.5),
        "f": np.complex64(1j),
        "g": {"h": np.int8(3), "i": b"x"},
    }
    line = json_line(to_json(result_of("data", **data), [], None))

    def refuse(word):
        raise AssertionError(word)

    with pytest.raises(ValueError, match="JSON"):
        json_line({"a": math.nan})
    assert json.loads(line, parse_constant=refuse)["data"] == {
        "a": "NaN",
        "b": ["Infinity", "-Infinity", 1.5],
        "c": [1.0, "NaN"],
        "d": "Infinity",
        "e": 0.5,
        "f": "1j",
        "g": {"h": 3, "i": "b'x'"},
    }


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
    assert [sample_rate({"sample_rate": rate}) for rate in ODD_RATES] == [0] * len(ODD_RATES)
    assert sample_rate({"sample_rate": np.array([100, 200])}) == 200
    assert sample_rate({"sampling_rate": 3, "sr": 4}) == 3
