"""What a worker is: it is given items, and yields replies."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar

import msgspec

from omni_trio.messages import FinishReason, StageInput

__all__ = ["Reply", "WorkItem", "Worker", "in_words"]


class WorkItem(msgspec.Struct, kw_only=True, eq=False):
    """One piece of one request's input."""

    request_id: str
    input: StageInput
    """What is new. An item that only closes a request's input (`last`) may have nothing in it: see `empty`."""
    last: bool
    """Whether no more input of this request will follow."""
    params: Mapping[str, Any]
    """The stage's defaults (`StageSpec.sampling`) with the caller's parameters over them."""
    state: dict[str, Any]
    """The worker's own memory for this request: empty at first, the same for each of its items."""
    number: int = 0
    """Counts the request's items, from 0."""
    segment_end: bool = False
    """In a session: whether this item completes a segment. The framework tells the next stage so once the item was
    gone through; there is nothing to do but to keep nothing back."""
    kv_senders: Mapping[str, Mapping[str, Any]] = {}
    """By stage name: where a stage that feeds this one offers the request's KV cache."""
    aborted: bool = False
    """Becomes True when nobody wants the request's replies any more. Worth a look between the steps of a batch;
    a batch of which all items are aborted is ended by closing the generator."""

    @property
    def empty(self) -> bool:
        """Whether `input` has nothing in it."""
        given = self.input
        words = (given.text, given.token_ids, given.messages, given.embeds, given.batch)
        return not given.data and all(value is None for value in words)


class Reply(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker says of one item: a delta, never a repetition."""

    data: Mapping[str, Any] = {}
    """Arrays, tensors and plain values by name; successive ones add up as `omni_trio.merging` says."""
    text: str = ""
    token_ids: Sequence[int] = ()
    progress: tuple[int, int] | None = None
    """Steps done and steps in all, of work that is done in steps."""
    done: bool = False
    """The item was gone through: nothing more will be said of it. Not needed (what is left when `Worker.process` ends
    is done too), but it has the request end, or go on with its next item, while others of the batch are at work."""
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

    joins: ClassVar[bool] = False
    """Whether a batch lives on while it is worked on: see `process`."""

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

        With `joins`, the batch changes at each reply: items that are done (`Reply.done`) or aborted have left it, and
        others have joined, as many as wait and fit. Such a worker goes on until the batch is empty. Calls from
        outside are made between two batches; while one waits nobody joins.

        Args:
            batch: at most `max_batch_size` items, never two of one request. A request's items come in order.
        """
        raise TypeError(f"{type(self).__name__} must define process(self, batch)")

    def close(self) -> None:
        """Let go of what the worker holds. Called at an orderly end only: a killed process gets no chance."""


def in_words(error: BaseException) -> str:
    """Return an exception's type and text."""
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
