"""The worker process: one thread, one socket, one loop.

The loop takes what has come, then one batch, over and over. Between two replies of a batch it looks at the
socket again, so that aborts and pings are heard; calls wait until the batch is done, since a method must not run
in the midst of `Worker.process`.
"""

from __future__ import annotations

import heapq
import itertools
import sys
import traceback
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import msgspec
import zmq

from omni_trio.engines.codec import CodecError, decode, encode
from omni_trio.messages import StageOutput
from omni_trio.worker import DiffusionWorker, Reply, Worker, WorkItem
from omni_trio.worker._base import in_words

from ._target import make_worker
from ._wire import (
    Abort,
    Add,
    AddValue,
    Answer,
    Call,
    CallValue,
    FromWorker,
    Out,
    Ping,
    Ready,
    Shutdown,
    Started,
    StartFailed,
    ToWorker,
    envelope,
)

__all__ = ["main"]

_LINGER_MS: Final = 2000
"""Milliseconds that the last messages may take to leave after an orderly end."""

_BASES: Final[tuple[type[Worker], ...]] = (Worker, DiffusionWorker)
"""Classes whose own methods are the framework's to call."""


class _Request:
    """A request that has not ended."""

    def __init__(self, request_id: str, priority: int, params: Mapping[str, Any]) -> None:
        self.request_id = request_id
        self.priority = priority
        self.params = params
        self.state: dict[str, Any] = {}
        self.items: deque[WorkItem] = deque()
        self.count = 0
        """Items that have come."""
        self.queued = False

    def take(self, message: Add, given: AddValue) -> None:
        item = WorkItem(
            request_id=self.request_id,
            input=given.input,
            last=message.last,
            params=self.params,
            state=self.state,
            number=self.count,
            segment_end=message.segment_end,
            kv_senders=given.kv_senders,
        )
        self.count += 1
        self.items.append(item)


class _Failure(NamedTuple):
    """What came of a batch whose `Worker.process` raised."""

    error: Exception
    yielded: bool
    """Whether there had been a reply by then."""
    items: list[WorkItem]
    """Those that were not done by then."""


class _Stop(BaseException):
    """Unwinds the loop when the client asks for the end."""


class _Loop:
    def __init__(self, socket: zmq.Socket[bytes], worker: Worker) -> None:
        self._socket = socket
        self._worker = worker
        self._requests: dict[str, _Request] = {}
        self._queue: list[tuple[int, int, _Request]] = []
        """A heap of those that have input: by priority, then by when they came."""
        self._turns = itertools.count()
        self._batch: dict[str, WorkItem] = {}
        """What is being computed on and has not ended, by request."""
        self._calls: deque[tuple[Call, Sequence[Any]]] = deque()

    def run(self) -> None:
        try:
            while True:
                self._hear(wait=not (self._queue or self._calls))
                while self._calls:
                    self._call(*self._calls.popleft())
                if batch := self._next_items(self._size):
                    self._process(batch)
        except _Stop:
            self._worker.close()

    # -- what comes in

    def _hear(self, *, wait: bool = False) -> None:
        """Take the messages that are there; with `wait`, at least one."""
        while True:
            try:
                frames = self._socket.recv_multipart(0 if wait else zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            wait = False
            self._take(msgspec.msgpack.decode(frames[0].buffer, type=ToWorker), [f.buffer for f in frames[1:]])

    def _take(self, message: ToWorker, value: Sequence[Any]) -> None:
        match message:
            case Add():
                self._add(message, value)
            case Abort(call_id=call_id, request_ids=request_ids):
                for request_id in request_ids:
                    self._requests.pop(request_id, None)
                    if (item := self._batch.pop(request_id, None)) is not None:
                        item.aborted = True
                self._answer(call_id)
            case Call():
                self._calls.append((message, value))
            case Ping(call_id=call_id):
                self._answer(call_id)
            case Shutdown():
                raise _Stop

    def _add(self, message: Add, value: Sequence[Any]) -> None:
        request_id = message.request_id
        request = self._requests.get(request_id)
        if request is None and not message.first:
            # It has ended here while this was under way; its end is on its way to the client.
            return
        try:
            given = decode(value, type=AddValue)
        except CodecError as error:
            self._fail(request_id, f"the input can not be used: {error}")
            return
        if request is None:
            request = self._requests[request_id] = _Request(request_id, message.priority, given.params)
        request.take(message, given)
        self._enqueue(request)

    def _enqueue(self, request: _Request) -> None:
        if request.items and not request.queued and request.request_id not in self._batch:
            request.queued = True
            heapq.heappush(self._queue, (request.priority, next(self._turns), request))

    def _call(self, message: Call, value: Sequence[Any]) -> None:
        name = message.method
        internal = any(name in vars(base) for base in _BASES if isinstance(self._worker, base))
        method = None if name.startswith("_") or internal else getattr(self._worker, name, None)
        if not callable(method):
            self._answer(message.call_id, error=f"the worker has no method {name!r} to call")
            return
        try:
            given = decode(value, type=CallValue)
            result = encode(method(*given.args, **given.kwargs))
        except Exception as error:  # the method's error is the caller's answer
            traceback.print_exc()
            self._answer(message.call_id, error=in_words(error))
        else:
            self._answer(message.call_id, result)

    # -- what goes out

    def _send(self, message: FromWorker, value: Sequence[Any] = ()) -> None:
        self._socket.send_multipart([envelope(message), *value])

    def _answer(self, call_id: int, value: Sequence[Any] = (), *, error: str | None = None) -> None:
        running, waiting = self._load()
        self._send(Answer(call_id=call_id, running=running, waiting=waiting, error=error), value)

    def _load(self) -> tuple[int, int]:
        running = len(self._batch)
        return running, len(self._requests) - running

    def _output(self, output: StageOutput) -> None:
        value = encode(output)
        if output.finished:
            self._requests.pop(output.request_id, None)
            self._batch.pop(output.request_id, None)
        running, waiting = self._load()
        self._send(Out(request_id=output.request_id, running=running, waiting=waiting), value)

    def _fail(self, request_id: str, error: str) -> None:
        if (item := self._batch.get(request_id)) is not None:
            item.aborted = True
        self._output(StageOutput(request_id=request_id, error=error, finish_reason="error"))

    # -- batches

    @property
    def _size(self) -> int:
        return max(1, self._worker.max_batch_size)

    def _next_items(self, limit: int) -> list[WorkItem]:
        items: list[WorkItem] = []
        while self._queue and len(items) < limit:
            _, _, request = heapq.heappop(self._queue)
            request.queued = False
            if self._requests.get(request.request_id) is request:  # not aborted while it waited
                items.append(request.items.popleft())
        return items

    def _process(self, batch: list[WorkItem]) -> None:
        states = [dict(item.state) for item in batch]
        single = len(batch) == 1
        failure = self._go_through(batch)
        if failure is None:
            return
        if single or failure.yielded:
            self._blame(failure)
            return
        for item, state in zip(failure.items, states, strict=True):
            if item.request_id not in self._requests:
                continue  # aborted meanwhile
            item.state.clear()
            item.state.update(state)
            if (failure := self._go_through([item])) is not None:
                self._blame(failure)

    def _go_through(self, batch: list[WorkItem]) -> _Failure | None:
        """Run `Worker.process`, and see every item of the batch to its end."""
        self._batch = {item.request_id: item for item in batch}
        yielded = False
        try:
            replies: Any = self._worker.process(batch)
            if not isinstance(replies, Iterable):
                raise TypeError(f"process() returned {type(replies).__name__}; it must yield pairs of item and Reply")
            iterator = iter(replies)
            try:
                for item, reply in iterator:
                    yielded = True
                    self._reply(item, reply, batch)
                    self._hear()
                    if all(item.aborted for item in batch):
                        break
                    if self._worker.joins:
                        self._renew(batch)
            finally:
                if (close := getattr(iterator, "close", None)) is not None:
                    close()
            for item in list(self._batch.values()):
                self._tell(item, Reply(done=True))
        except Exception as error:
            traceback.print_exc()
            return _Failure(error, yielded, list(self._batch.values()))
        else:
            return None
        finally:
            self._batch = {}

    def _renew(self, batch: list[WorkItem]) -> None:
        """Take out of a living batch who has left it, and let those join who wait."""
        batch[:] = [item for item in batch if self._batch.get(item.request_id) is item]
        if self._calls:
            # They are made between two batches, so there has to be an end to this one.
            return
        for item in self._next_items(self._size - len(batch)):
            batch.append(item)
            self._batch[item.request_id] = item

    def _reply(self, item: Any, reply: Any, batch: Sequence[WorkItem]) -> None:
        if not isinstance(item, WorkItem) or not isinstance(reply, Reply):
            raise TypeError("process() must yield pairs of an item of its batch and a Reply")
        if item.aborted:
            return
        if not any(item is one for one in batch):
            raise TypeError("process() must yield pairs of an item of its batch and a Reply")
        if item.request_id not in self._batch:
            raise RuntimeError(f"process() replied to {item.request_id!r} after it had said that it was done with it")
        self._tell(item, reply)

    def _tell(self, item: WorkItem, reply: Reply) -> None:
        """Send a reply, and let the item go if that is its last."""
        finish = "error" if reply.error is not None else reply.finish_reason
        if reply.done and item.last:
            finish = finish or "stop"
        segment_end = reply.done and item.segment_end and finish is None
        output = StageOutput(
            request_id=item.request_id,
            token_ids=reply.token_ids,
            text=reply.text,
            data=reply.data or None,
            progress=reply.progress,
            segment_end=segment_end,
            finish_reason=finish,
            error=reply.error,
        )
        silent = reply.done and not (finish or segment_end or _says_something(reply))
        request = self._requests[item.request_id]
        if reply.done:
            del self._batch[item.request_id]
        if not silent:
            try:
                self._output(output)
            except CodecError as error:
                self._fail(item.request_id, f"the worker's reply can not be sent: {error}")
        if self._requests.get(item.request_id) is request:
            self._enqueue(request)

    def _blame(self, failure: _Failure) -> None:
        for item in failure.items:
            if item.request_id in self._requests and not item.aborted:
                self._fail(item.request_id, in_words(failure.error))


def _says_something(reply: Reply) -> bool:
    return bool(reply.data or reply.text or len(reply.token_ids) or reply.progress)


def main(address: str, target: str, options: dict[str, Any], path: Sequence[str] = ()) -> None:
    """Run a worker until its client says that it shall end.

    Args:
        address: where the client listens.
        target: as `StageSpec.target`.
        options: as `StageSpec.options`.
        path: as `StageSpec.path`.
    """
    sys.path[:0] = [folder for folder in path if folder not in sys.path]
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=1)
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.RCVHWM, 0)
    socket.connect(address)
    try:
        socket.send(envelope(Started()))
        try:
            worker = make_worker(target, options)
        except BaseException as error:
            traceback.print_exc()
            sys.stderr.flush()
            socket.send(envelope(StartFailed(message=in_words(error))))
            # Until killed: an exit would race with the message.
            socket.recv()
            raise
        socket.send(envelope(Ready()))
        _Loop(socket, worker).run()
    finally:
        context.destroy(_LINGER_MS)
