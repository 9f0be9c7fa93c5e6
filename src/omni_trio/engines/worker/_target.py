"""How a stage's target becomes a worker."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from msgspec import structs

from omni_trio.worker import Reply, Worker, WorkItem
from omni_trio.worker._pieces import gather

__all__ = ["make_worker"]


def make_worker(target: str, options: Mapping[str, Any]) -> Worker:
    """Import what a ``package.module:name`` stands for, and make a worker of it.

    Raises:
        TypeError: it is not callable, or does not take these options.
    """
    module_name, _, path = target.partition(":")
    made: Any = importlib.import_module(module_name)
    for name in path.split("."):
        made = getattr(made, name)
    if isinstance(made, type) and issubclass(made, Worker):
        return made(**options)
    if not callable(made):
        raise TypeError(f"{target!r} is neither a Worker subclass nor callable")
    return _Target(made, options)


class _Target(Worker):
    """A worker made of any other callable."""

    def __init__(self, function: Any, options: Mapping[str, Any]) -> None:
        super().__init__()
        self._function = function
        self._options = options

    def process(self, batch: Sequence[WorkItem]) -> Iterator[tuple[WorkItem, Reply]]:
        for item in batch:
            if (given := gather(item)) is not None:
                whole = WorkItem(
                    request_id=item.request_id,
                    input=given,
                    last=item.last,
                    segment_end=item.segment_end,
                    params=item.params,
                    kv_senders=item.kv_senders,
                    state={},
                )
                yield item, structs.replace(_as_reply(self._function(whole, **self._options)), done=True)


def _as_reply(value: Any) -> Reply:
    if isinstance(value, Reply):
        return value
    if isinstance(value, str):
        return Reply(text=value)
    if isinstance(value, Mapping):
        return Reply(data=value)
    raise TypeError(f"the target returned a {type(value).__name__}; it must be a mapping, a string or a Reply")
