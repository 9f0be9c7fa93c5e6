"""vLLM engines as stages: `llm` stages generate, `pooling` stages embed, classify or score.

Importing this package does not import vLLM.
"""

from __future__ import annotations

from ._version import installed_version
from .client import vllm_client_factory

__all__ = ["PRELOAD", "installed_version", "vllm_client_factory"]

PRELOAD = ("omni_trio.engines.vllm._preload",)
"""What a zygote has to preload so that engines start in a fraction of a second."""
