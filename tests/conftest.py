"""Fixtures that several test files share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from omni_trio.engines.process import Zygote


@pytest.fixture(scope="session")
def zygote() -> Iterator[Zygote]:
    """One warm zygote for the whole session: a child costs a few milliseconds."""
    with Zygote() as warm:
        yield warm
