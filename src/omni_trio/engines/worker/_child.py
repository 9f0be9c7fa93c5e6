"""The worker process: one thread, one socket, one loop.

The loop takes what has come, then one batch, over and over. Between two replies of a batch it looks at the
socket again, so that aborts and pings are heard; calls wait until the batch is done, since a method must not run
in the midst of `Worker.process`.
"""

from __future__ import annotations

import heapq
import importlib
import itertools
import sys
import traceback
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

import msgspec
import zmq

from omni_trio.engines.codec import CodecError, decode, encode
from omni_trio.merging import merge_data
from omni_trio.messages import StageInput, StageOutput
from omni_trio.worker import Reply, Worker, WorkItem

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

_NOT_CALLABLE: Final = frozenset(("process", "close"))
"""Methods of a worker that are the framework's to call."""


class _Target(Worker):
    """A worker made of any other callable."""

    def __init__(self, function: Any, options: Mapping[str, Any]) -> None:
        super().__init__()
        self._function = function
        self._options = options

    def process(self, batch: Sequence[WorkItem]) -> Iterator[tuple[WorkItem, Reply]]:
        for item in batch:
            pieces: list[StageInput] = item.state.setdefault("pieces", [])
            pieces.append(item.input)
            if item.last:
                whole = WorkItem(
                    request_id=item.request_id,
                    input=_merge_inputs(pieces),
                    last=True,
                    params=item.params,
                    state={},
                )
                yield item, _as_reply(self._function(whole, **self._options))


def _merge_inputs(pieces: Sequence[StageInput]) -> StageInput:
    if len(pieces) == 1:
        return pieces[0]
    embeds = [{"embeds": piece.embeds} for piece in pieces if piece.embeds is not None]
    token_ids = [piece.token_ids for piece in pieces if piece.token_ids is not None]
    texts = [piece.text for piece in pieces if piece.text is not None]
    messages = [piece.messages for piece in pieces if piece.messages is not None]
    return StageInput(
        text="".join(texts) if texts else None,
        token_ids=tuple(itertools.chain.from_iterable(token_ids)) if token_ids else None,
        messages=tuple(itertools.chain.from_iterable(messages)) if messages else None,
        embeds=merge_data(embeds).get("embeds"),
        data=merge_data(piece.data for piece in pieces),
    )


def _as_reply(value: Any) -> Reply:
    if isinstance(value, Reply):
        return value
    if isinstance(value, str):
        return Reply(text=value)
    if isinstance(value, Mapping):
        return Reply(data=value)
    raise TypeError(f"the target returned a {type(value).__name__}; it must be a mapping, a string or a Reply")


class _Request:
    """A request that has not ended."""

    def __init__(self, request_id: str, priority: int, params: Mapping[str, Any]) -> None:
        self.request_id = request_id
        self.priority = priority
        self.params = params
        self.state: dict[str, Any] = {}
        self.pieces: deque[tuple[StageInput, bool]] = deque()
        self.queued = False


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
                if batch := self._next_batch():
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
        request.pieces.append((given.input, message.last))
        self._enqueue(request)

    def _enqueue(self, request: _Request) -> None:
        if request.pieces and not request.queued and request.request_id not in self._batch:
            request.queued = True
            heapq.heappush(self._queue, (request.priority, next(self._turns), request))

    def _call(self, message: Call, value: Sequence[Any]) -> None:
        name = message.method
        method = None if name.startswith("_") or name in _NOT_CALLABLE else getattr(self._worker, name, None)
        if not callable(method):
            self._answer(message.call_id, error=f"the worker has no method {name!r} to call")
            return
        try:
            given = decode(value, type=CallValue)
            result = encode(method(*given.args, **given.kwargs))
        except Exception as error:  # the method's error is the caller's answer
            traceback.print_exc()
            self._answer(message.call_id, error=_in_words(error))
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

    def _next_batch(self) -> list[WorkItem]:
        batch: list[WorkItem] = []
        while self._queue and len(batch) < max(1, self._worker.max_batch_size):
            _, _, request = heapq.heappop(self._queue)
            request.queued = False
            if self._requests.get(request.request_id) is not request:
                continue  # aborted while it waited
            given, last = request.pieces.popleft()
            batch.append(
                WorkItem(
                    request_id=request.request_id,
                    input=given,
                    last=last,
                    params=request.params,
                    state=request.state,
                )
            )
        return batch

    def _process(self, batch: Sequence[WorkItem]) -> None:
        requests = [self._requests[item.request_id] for item in batch]
        states = [dict(item.state) for item in batch]
        error, yielded = self._go_through(batch)
        if error is not None:
            if len(batch) == 1 or yielded:
                self._blame(batch, error)
            else:
                for item, request, state in zip(batch, requests, states, strict=True):
                    if self._requests.get(item.request_id) is not request:
                        continue  # aborted meanwhile
                    item.state.clear()
                    item.state.update(state)
                    error, _ = self._go_through([item])
                    if error is not None:
                        self._blame([item], error)
        for request in requests:
            if self._requests.get(request.request_id) is request:
                self._enqueue(request)

    def _go_through(self, batch: Sequence[WorkItem]) -> tuple[Exception | None, bool]:
        """Run `Worker.process`; return what it raised, and whether it had replied by then."""
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
            finally:
                if (close := getattr(iterator, "close", None)) is not None:
                    close()
            for item in batch:
                if item.last and item.request_id in self._batch:
                    self._output(StageOutput(request_id=item.request_id, finish_reason="stop"))
        except Exception as error:
            traceback.print_exc()
            return error, yielded
        else:
            return None, yielded
        finally:
            self._batch = {}

    def _reply(self, item: WorkItem, reply: Any, batch: Sequence[WorkItem]) -> None:
        if not any(item is one for one in batch) or not isinstance(reply, Reply):
            raise TypeError("process() must yield pairs of an item of its batch and a Reply")
        if item.aborted:
            return
        if item.request_id not in self._batch:
            raise RuntimeError(f"process() replied to {item.request_id!r} after it had ended the request")
        finish = "error" if reply.error is not None else reply.finish_reason
        try:
            self._output(
                StageOutput(
                    request_id=item.request_id,
                    token_ids=reply.token_ids,
                    text=reply.text,
                    data=reply.data or None,
                    finish_reason=finish,
                    error=reply.error,
                )
            )
        except CodecError as error:
            self._fail(item.request_id, f"the worker's reply can not be sent: {error}")

    def _blame(self, batch: Sequence[WorkItem], error: Exception) -> None:
        for item in batch:
            if item.request_id in self._requests and not item.aborted:
                self._fail(item.request_id, _in_words(error))


def _in_words(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def _make_worker(target: str, options: Mapping[str, Any]) -> Worker:
    module_name, _, path = target.partition(":")
    made: Any = importlib.import_module(module_name)
    for name in path.split("."):
        made = getattr(made, name)
    if isinstance(made, type) and issubclass(made, Worker):
        return made(**options)
    if not callable(made):
        raise TypeError(f"{target!r} is neither a Worker subclass nor callable")
    return _Target(made, options)


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
            worker = _make_worker(target, options)
        except BaseException as error:
            traceback.print_exc()
            sys.stderr.flush()
            socket.send(envelope(StartFailed(message=_in_words(error))))
            # Until killed: an exit would race with the message.
            socket.recv()
            raise
        socket.send(envelope(Ready()))
        _Loop(socket, worker).run()
    finally:
        context.destroy(_LINGER_MS)
