from __future__ import annotations

import numpy as np
import pytest

from omni_trio.merging import merge_data


def test_a_single_part_is_passed_on_as_it_is():
    audio = np.zeros(3)
    assert merge_data([{"audio": audio}])["audio"] is audio


def test_audio_is_joined_on_the_last_axis_and_the_rate_is_the_newest():
    merged = merge_data(
        [{"audio": np.ones((1, 2)), "sample_rate": 16000}, {"audio": np.zeros((1, 3)), "sample_rate": 22050}]
    )
    assert merged["audio"].shape == (1, 5)
    assert merged["sample_rate"] == 22050


def test_audio_of_unlike_shapes_is_flattened():
    assert merge_data([{"audio": np.ones((2, 2))}, {"audio": np.zeros(3)}])["audio"].shape == (7,)


def test_other_arrays_are_joined_on_the_first_axis():
    assert merge_data([{"latent": np.ones((2, 4))}, {"latent": np.ones((1, 4))}])["latent"].shape == (3, 4)


def test_other_arrays_of_unlike_shapes_keep_the_newest():
    newest = np.zeros((3, 5))
    assert merge_data([{"latent": np.ones((2, 4))}, {"latent": newest}])["latent"] is newest


def test_scalars_in_arrays_keep_the_newest():
    assert merge_data([{"loss": np.array(1.0)}, {"loss": np.array(2.0)}])["loss"] == 2.0


def test_lists_are_appended_and_all_else_is_replaced():
    assert merge_data([{"a": [1], "b": "x"}, {"a": [2], "b": "y"}]) == {"a": [1, 2], "b": "y"}


def test_a_key_that_changes_its_type_keeps_the_newest():
    assert merge_data([{"a": [1]}, {"a": 2}]) == {"a": 2}


def test_parts_stay_as_they_are():
    first = {"a": [1]}
    merge_data([first, {"a": [2]}])
    assert first == {"a": [1]}


def test_torch_tensors():
    torch = pytest.importorskip("torch")
    merged = merge_data([{"latent": torch.ones(2, 4)}, {"latent": torch.ones(1, 4)}])
    assert tuple(merged["latent"].shape) == (3, 4)
