"""What a zygote imports, so that an engine forked from it starts in a fraction of a second.

Nothing here may start a thread or compute with torch: neither survives a fork.
"""

from __future__ import annotations

import contextlib
import importlib
import os

from ._child import _DEFAULTS

for _name, _value in _DEFAULTS.items():
    os.environ.setdefault(_name, _value)

from . import _compat  # noqa: E402 - vLLM reads its log level when it is imported

# What an engine core imports while it starts. Not every build of vLLM has each of them.
for _module in (
    "vllm.v1.engine.core",
    "vllm.v1.executor.uniproc_executor",
    "vllm.v1.worker.cpu_worker" if _compat.on_cpu() else "vllm.v1.worker.gpu_worker",
    "vllm.v1.attention.backends.cpu_attn" if _compat.on_cpu() else "vllm.v1.attention.backends.flash_attn",
    "vllm.model_executor.model_loader.default_loader",
    "vllm.model_executor.models.qwen2",
    "vllm.model_executor.models.llama",
    "vllm.model_executor.models.adapters",
    "vllm.distributed.parallel_state",
    "vllm.model_executor.layers.quantization.online.base",
    "compressed_tensors",
):
    with contextlib.suppress(ImportError):
        importlib.import_module(_module)
