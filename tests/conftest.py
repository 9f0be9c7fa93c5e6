"""Fixtures that several test files share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from omni_trio.engines.process import Zygote
from omni_trio.engines.vllm import PRELOAD
from omni_trio.testing.tiny_model import make_tiny_model


@pytest.fixture(scope="session")
def zygote() -> Iterator[Zygote]:
    """One warm zygote for the whole session: a child costs a few milliseconds."""
    with Zygote() as warm:
        yield warm


@pytest.fixture(scope="session")
def vllm_zygote() -> Iterator[Zygote]:
    """A warm zygote that has vLLM: an engine costs half a second."""
    with Zygote(PRELOAD) as warm:
        yield warm


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The path of a tiny language model."""
    return make_tiny_model(tmp_path_factory.mktemp("models") / "tiny")
