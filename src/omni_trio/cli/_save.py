"""Results as files and as lines of JSON."""

from __future__ import annotations

import json
import math
import struct
import wave
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from omni_trio.runtime import StageResult

__all__ = [
    "as_array",
    "audio_seconds",
    "describe",
    "json_line",
    "png_bytes",
    "rate_complaint",
    "sample_rate",
    "save",
    "to_json",
    "write_wav",
]

_RATE_KEYS = ("sample_rate", "audio_sample_rate", "sampling_rate", "sr")
_HIGHEST_RATE = 10_000_000
"""Samples per second: far above any sound, and what the header of a .wav file can hold for `_MOST_CHANNELS`."""
_MOST_CHANNELS = 128
_LONGEST_NAME = 200
"""Bytes of a file's name, which leaves room for a number and the suffix."""


def save(result: StageResult, folder: Path, stem: str, taken: set[str]) -> list[Path]:
    """Write what one stage made; return the files, which are named after `stem`.

    Audio with a sample rate becomes ``.wav``, images of 8-bit RGB ``.png``, text ``.txt``, and every other array
    ``.npy``. Tokens and plain values have no file: they are in the line of JSON.

    Args:
        result: what to write.
        folder: where.
        stem: of the names. One that is too long is cut.
        taken: names that earlier files of the same request have, which it adds to. A name that is taken gets a number.
    """
    if result.modality == "text":
        path = folder / f"{_free_name(stem, taken)}.txt"
        path.write_text(result.text, encoding="utf-8", errors="replace")
        return [path]
    if result.modality == "data":
        named = [(f"{stem}.{_file_name(key)}", value) for key, value in result.data.items()]
    else:
        named = [(stem, result.value)] if result.modality != "tokens" else []
    return [
        _save_array(result, array, folder, _free_name(name, taken))
        for name, value in named
        if (array := as_array(value)) is not None
    ]


def _free_name(wanted: str, taken: set[str]) -> str:
    cut = wanted.encode()[:_LONGEST_NAME].decode(errors="ignore")
    name, number = cut, 1
    while name in taken:
        number += 1
        name = f"{cut}-{number}"
    taken.add(name)
    return name


def _save_array(result: StageResult, array: npt.NDArray[Any], folder: Path, name: str) -> Path:
    rate = sample_rate(result.data)
    if result.modality == "audio" and rate and _is_audio(array):
        path = folder / f"{name}.wav"
        write_wav(path, array, rate)
    elif result.modality == "image" and array.dtype == np.uint8 and array.ndim == 3 and array.shape[2] == 3:
        path = folder / f"{name}.png"
        path.write_bytes(png_bytes(array))
    else:
        path = folder / f"{name}.npy"
        np.save(path, array, allow_pickle=False)
    return path


def _is_audio(array: npt.NDArray[Any]) -> bool:
    if not array.size or array.ndim > 2 or array.dtype.kind == "c":
        return False
    return bool(_samples(array).shape[1] <= _MOST_CHANNELS)


def _file_name(key: str) -> str:
    return "".join(character if character.isalnum() or character in "-_." else "_" for character in key)


def as_array(value: Any) -> npt.NDArray[Any] | None:
    """Return an array or tensor as a numpy array of numbers, and None for anything else."""
    try:
        if hasattr(value, "detach"):  # a torch tensor, told without importing torch
            tensor = value.detach().cpu()
            value = (tensor.float() if str(tensor.dtype) == "torch.bfloat16" else tensor).numpy()
        elif isinstance(value, list | tuple):
            value = np.asarray(value)
    except (TypeError, ValueError, RuntimeError):  # a tensor that numpy has no type for, lists of different lengths
        return None
    if isinstance(value, np.ndarray) and value.dtype.kind in "biufc":
        return value
    return None


def sample_rate(data: Mapping[str, Any]) -> int:
    """Return the samples per second that come with audio, or 0 where it does not say."""
    for key in _RATE_KEYS:
        if key in data:
            given = as_array([data[key]])
            if given is not None and given.size and given.dtype.kind in "iuf":
                rate = given.reshape(-1)[-1]
                return int(rate) if 1 <= rate <= _HIGHEST_RATE else 0  # so written, it catches nan as well
    return 0


def rate_complaint(result: StageResult) -> str | None:
    """Say what is wrong with the sample rate that comes with audio, if anything is."""
    if result.modality != "audio" or sample_rate(result.data):
        return None
    for key in _RATE_KEYS:
        if key in result.data:
            return f"{key} is {result.data[key]!r:.80}, no number of samples per second; the audio is kept as an array"
    return None


def _samples(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return audio as [samples, channels]: the shorter side of two is the channels."""
    if array.ndim < 2:
        return array.reshape(-1, 1)
    return array.T if array.shape[0] < array.shape[1] else array


def audio_seconds(result: StageResult) -> float:
    """How long the audio of a result is, as far as it says."""
    rate = sample_rate(result.data)
    array = as_array(result.value)
    return len(_samples(array)) / rate if rate and array is not None and _is_audio(array) else 0.0


def write_wav(path: Path, array: npt.NDArray[Any], rate: int) -> None:
    """Write audio as 16-bit PCM: floats count as -1 to 1 and are clipped, 16-bit integers are taken as they are."""
    samples = _samples(array)
    if samples.dtype.kind == "f":
        samples = np.clip(np.nan_to_num(samples.astype(np.float64)), -1.0, 1.0) * 32767.0
    elif samples.dtype != np.int16:
        samples = np.clip(samples.astype(np.float64), -32768, 32767)  # not every type of integer has these bounds
    with wave.open(str(path), "wb") as file:
        file.setnchannels(samples.shape[1])
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes(np.rint(samples).astype("<i2").tobytes())


def png_bytes(image: npt.NDArray[np.uint8]) -> bytes:
    """Return an image of shape [height, width, 3] as a PNG file."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    height, width = image.shape[:2]
    lines = np.zeros((height, 1 + width * 3), np.uint8)  # each line begins with its filter: none
    lines[:, 1:] = image.reshape(height, width * 3)
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    parts = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(lines.tobytes())) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + parts


def describe(result: StageResult) -> str:
    """Say in a few words what a stage made, for somebody who does not get to see it."""
    if result.modality == "audio" and (seconds := audio_seconds(result)):
        return f"{seconds:.2f} s of audio"
    array = as_array(result.value)
    if array is not None and result.modality != "tokens":
        return f"{result.modality} of shape {list(array.shape)}"
    return f"{len(result.token_ids)} tokens" if result.modality == "tokens" else str(result.modality)


def to_json(result: StageResult, files: list[Path], folder: Path | None) -> dict[str, Any]:
    """Return a stage's result as plain data; arrays that are in a file are only described."""
    data: dict[str, Any] = {"modality": result.modality, "finish_reason": result.finish_reason}
    if result.text:
        data["text"] = result.text
    if result.token_ids:
        data["token_ids"] = list(result.token_ids)
    if result.data:
        data["data"] = {key: _plain(value, whole=folder is None) for key, value in result.data.items()}
    if files and folder is not None:
        data["files"] = [str(path.relative_to(folder)) for path in files]
    if result.metrics is not None:
        data["metrics"] = _plain(msgspec.to_builtins(result.metrics), whole=True)
    return data


_LARGEST_INLINE = 8192
"""Numbers of an array that a line of JSON may hold where no file does: an embedding, but no audio."""


def _plain(value: Any, *, whole: bool) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(item, whole=whole) for key, item in value.items()}
    if hasattr(value, "detach") or isinstance(value, np.ndarray):
        array = as_array(value)
        if (
            array is not None
            and array.dtype.kind != "c"
            and (array.ndim == 0 or (whole and array.size <= _LARGEST_INLINE))
        ):
            return _plain(array.tolist(), whole=whole)
        return {"shape": list(value.shape), "dtype": str(value.dtype)}
    if isinstance(value, list | tuple):
        return [_plain(item, whole=whole) for item in value]
    if isinstance(value, np.floating):
        value = float(value)
    elif isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return _NOT_FINITE.get(value, "NaN")
    return value if value is None or isinstance(value, str | int | float | bool) else str(value)


_NOT_FINITE = {math.inf: "Infinity", -math.inf: "-Infinity"}
"""JSON has no such numbers; Python's `float` and JavaScript's `Number` read these words."""


def json_line(data: Mapping[str, Any]) -> str:
    """Return one line of a JSON Lines file."""
    return json.dumps(data, allow_nan=False) + "\n"
