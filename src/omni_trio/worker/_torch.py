"""What a worker stage runs in its own process: a class to subclass, and a ready one for torch modules.

A stage of kind ``worker`` names its target as ``package.module:name``. That is either a subclass of `Worker`,
or any other callable, which is then called once per request with everything that came in for it::

    def shout(item: WorkItem, *, mark: str) -> str:
        return item.input.text.upper() + mark

This module is imported inside worker processes.
"""

from __future__ import annotations

import importlib
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from omni_trio.messages import FinishReason, StageInput

__all__ = ["Reply", "TorchModuleWorker", "WorkItem", "Worker"]


class WorkItem(msgspec.Struct, kw_only=True, eq=False):
    """One piece of one request's input."""

    request_id: str
    input: StageInput
    """What is new. An item that only closes a request's input (`last`) may have nothing in it."""
    last: bool
    """Whether no more input of this request will follow."""
    params: Mapping[str, Any]
    """The stage's defaults (`StageSpec.sampling`) with the caller's parameters over them."""
    state: dict[str, Any]
    """The worker's own memory for this request: empty at first, the same for each of its items."""
    aborted: bool = False
    """Becomes True when nobody wants the request's replies any more. Worth a look between the steps of a batch;
    a batch of which all items are aborted is ended by closing the generator."""


class Reply(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker says of one request: a delta, never a repetition."""

    data: Mapping[str, Any] = {}
    """Arrays, tensors and plain values by name; successive ones add up as `omni_trio.merging` says."""
    text: str = ""
    token_ids: Sequence[int] = ()
    finish_reason: FinishReason | None = None
    """Ends the request early. Without it the request ends, with ``stop``, once its last item was gone through."""
    error: str | None = None
    """Ends the request as failed, with these words."""


class Worker:
    """Base class of worker stages. One instance lives in each replica's process; all calls are in one thread.

    Args:
        **options: the stage's `StageSpec.options`.
    """

    max_batch_size: int = 1
    """How many items, each of another request, `process` may be given at once. Read before each call."""

    def __init__(self, **options: Any) -> None:
        if options:
            raise TypeError(f"{type(self).__name__} takes no options, but the stage gives {', '.join(options)}")

    def process(self, batch: Sequence[WorkItem]) -> Iterable[tuple[WorkItem, Reply]]:
        """Work on some requests' next input: usually a generator, which yields any number of replies per item.

        Each reply goes out when it is yielded. Between replies the framework looks after aborts and signs of
        life, so a long computation should yield now and then; `StageSpec.probe_timeout` is the limit.

        If it raises, the requests of the batch that have not ended fail with the exception's type and text. A
        larger batch from which nothing has been yielded is tried again item by item first (with each item's
        `state` as it was, as far as its own keys go), so that only those fail that are to blame.

        Args:
            batch: at most `max_batch_size` items, never two of one request. A request's items come in order.
        """
        raise TypeError(f"{type(self).__name__} must define process(self, batch)")

    def close(self) -> None:
        """Let go of what the worker holds. Called at an orderly end only: a killed process gets no chance."""


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
