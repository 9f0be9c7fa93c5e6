"""A ready worker for a plain `torch.nn.Module`."""

from __future__ import annotations

import importlib
import operator
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from omni_trio.messages import StageInput

from ._base import Reply, Worker, WorkItem

__all__ = ["TorchModuleWorker"]


class TorchModuleWorker(Worker):
    """Runs a `torch.nn.Module`, one call per item, under `torch.inference_mode`.

    Per item the module gets one tensor with a batch axis of 1, ``[1, ...]``, and returns one, of which the
    batch axis is taken off again. An item without that input gives no output.

    Args:
        module: ``package.module:Class`` of the module.
        module_options: keyword arguments of that class.
        weights: path of a safetensors file with its state, or None for what the class itself sets up.
        input: what of the item goes in: ``token_ids`` (int64, ``[1, tokens]``), ``embeds``, or a key of the
            input's `data`.
        output: key in the reply's `data` under which the result goes out, without its batch axis.
        extra: constants to send beside it, such as ``{"sample_rate": 16000}``.
        device: torch's name of the device, such as ``cuda``.
    """

    def __init__(
        self,
        *,
        module: str,
        module_options: Mapping[str, Any] | None = None,
        weights: str | None = None,
        input: str = "token_ids",  # noqa: A002 - the name that a pipeline file uses
        output: str = "audio",
        extra: Mapping[str, Any] | None = None,
        device: str = "cpu",
    ) -> None:
        import torch  # noqa: PLC0415 - only for those who use it

        super().__init__()
        module_name, _, path = module.partition(":")
        make = operator.attrgetter(path)(importlib.import_module(module_name))
        self._module = make(**(module_options or {}))
        if not isinstance(self._module, torch.nn.Module):
            raise TypeError(f"{module!r} made a {type(self._module).__name__}, not a torch.nn.Module")
        if weights is not None:
            from safetensors.torch import load_file  # noqa: PLC0415 - as above

            self._module.load_state_dict(load_file(weights))
        self._module.eval().to(device)
        self._device = device
        self._input = input
        self._output = output
        self._extra = dict(extra or {})

    def process(self, batch: Sequence[WorkItem]) -> Iterator[tuple[WorkItem, Reply]]:
        """Run the module on each item that has its input."""
        import torch  # noqa: PLC0415 - as above

        for item in batch:
            value = self._input_of(item.input)
            if value is None:
                continue
            with torch.inference_mode():
                tensor = torch.as_tensor(value).to(self._device).unsqueeze(0)
                result = self._module(tensor)
            if not isinstance(result, torch.Tensor):
                raise TypeError(f"the module returned a {type(result).__name__}, not a tensor")
            yield item, Reply(data={self._output: result.squeeze(0), **self._extra})

    def _input_of(self, given: StageInput) -> Any:
        if self._input == "token_ids":
            return np.asarray(given.token_ids, dtype=np.int64) if given.token_ids else None
        if self._input == "embeds":
            return given.embeds
        return given.data.get(self._input)
