"""The requests that one engine works on, and what comes of them. Nothing in here waits."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final

from omni_trio.messages import StageOutput

from . import _compat
from ._legs import FOR_GOOD, Leg
from ._outputs import failed, from_core_output, from_pooling_output, from_request_output
from ._sessions import Piece, Session
from ._text import describe
from ._wire import ABORT, ADD

__all__ = ["Work"]


class _Sink:
    """What vLLM's output processor puts its outputs in, one by one, as it makes them."""

    def __init__(self) -> None:
        self.items: list[Any] = []

    def put(self, item: Any) -> None:
        self.items.append(item)


class Work:
    """Keeps what is known of requests in step with what the engine is told and says.

    Args:
        processor: vLLM's output processor.
        send: sends the engine a message of some kind; never waits.
        tell: is told whether requests are at work whenever that may have changed.
    """

    def __init__(self, processor: Any, send: Callable[[bytes, Any], None], tell: Callable[[bool], None]) -> None:
        self._processor: Final = processor
        self._send = send
        self._tell = tell
        self._by_engine_id: dict[str, Leg] = {}
        self._idle: set[str] = set()
        self._sink = _Sink()
        self._aborts: list[str] = []
        self.legs: dict[str, Leg] = {}
        """By the runtime's ids: all requests that have not ended."""
        self.ready: list[StageOutput] = []
        """What has come out and has not been received."""

    @property
    def active(self) -> int:
        """How many requests the engine has something to do for; sessions that wait for input are not counted."""
        return len(self.legs) - len(self._idle)

    def has(self, engine_ids: Iterable[str]) -> bool:
        """Whether the engine works on a request with one of these ids."""
        return not self._by_engine_id.keys().isdisjoint(engine_ids)

    # -- towards the engine

    def begin(self, leg: Leg, requests: Sequence[Any]) -> None:
        """Hand the engine a new request, which may be several to it; a session begins without any.

        Raises:
            Exception: it can not be encoded. Nothing has happened.
        """
        messages = [_compat.encode(request) for request in requests]
        if not leg.raw:
            for request in requests:
                self._processor.add_request(request, None, queue=self._sink)
        self.legs[leg.request_id] = leg
        for engine_id in leg.engine_ids:
            self._by_engine_id[engine_id] = leg
        if leg.session is not None:
            self._idle.add(leg.request_id)
        for message in messages:
            self._send(ADD, message)
        self._tell(self.active > 0)

    def more(self, leg: Leg, piece: Piece | None, *, segment_end: bool, last: bool) -> None:
        """Give a session more input, or none, and what it completes."""
        session = leg.session
        assert session is not None  # the caller has looked
        session.add(piece, segment_end=segment_end, last=last)
        self._go_on(leg, session)
        self._flush()

    def let_go(self, request_ids: Iterable[str]) -> None:
        """Forget requests here and have the engine forget them."""
        for request_id in request_ids:
            self._forget(self.legs[request_id])
        self._flush()

    def clear(self) -> None:
        """Forget all requests of an engine that is dead."""
        self.legs.clear()
        self._by_engine_id.clear()
        self._idle.clear()
        self._tell(False)

    # -- from the engine

    def take(self, outputs: Iterable[Any]) -> None:
        """Take the outputs of one step."""
        processed: list[Any] = []
        for output in outputs:
            leg = self._by_engine_id.get(output.request_id)
            if leg is None:
                # Made before the engine knew of an abort.
                continue
            session = leg.session
            if session is not None and not self._count(leg, session, output):
                continue
            if leg.raw or (session is not None and not session.answering):
                self._take_raw(leg, output)
            else:
                processed.append(output)
        if processed:
            self._process(processed)
        self._flush()

    def fail(self, engine_id: str, text: str) -> None:
        """End a request that something went wrong with."""
        if (leg := self._by_engine_id.get(engine_id)) is not None:
            self._emit(leg, failed(leg.request_id, text))
            self._flush()

    def fail_all(self, text: str) -> None:
        """End all requests that the engine works on."""
        for leg in list(self.legs.values()):
            if leg.request_id not in self._idle:
                self._emit(leg, failed(leg.request_id, text))
        self._flush()

    def _count(self, leg: Leg, session: Session, output: Any) -> bool:
        """Keep a session's books; return whether anybody is to see the output."""
        session.produced(len(output.new_token_ids))
        if session.answering:
            return True
        if output.finish_reason is None:
            return False
        if session.at_work is None or str(output.finish_reason) in FOR_GOOD:
            return True
        session.done()
        self._go_on(leg, session)
        return False

    def _process(self, outputs: Sequence[Any]) -> None:
        """Have vLLM make text and logprobs of outputs, all in one pass."""
        current: Any = None

        def walk() -> Iterator[Any]:
            nonlocal current
            # Afterwards it is known whose output could not be processed.
            for output in outputs:
                current = output
                yield output

        steps = walk()
        going = True
        while going:
            try:
                self._processor.process_outputs(steps)
                going = False
            except Exception as error:  # whatever it is, it becomes this request's end; the others go on
                self.fail(current.request_id, f"its output could not be processed: {describe(error)}")
        made, self._sink.items = self._sink.items, []
        sources = {output.request_id: output for output in outputs}
        for item in made:
            # It has ended in the meantime where its completions fell together.
            if (leg := self._by_engine_id.get(item.request_id)) is not None:
                self._take_processed(leg, item, sources[item.request_id])

    def _take_raw(self, leg: Leg, output: Any) -> None:
        try:
            made = from_core_output(output, leg)
        except Exception as error:  # whatever it is, it becomes this request's end
            self.fail(output.request_id, f"its output could not be read: {describe(error)}")
        else:
            self._emit(leg, made)

    def _take_processed(self, leg: Leg, item: Any, output: Any) -> None:
        try:
            if leg.task is not None:
                made = from_pooling_output(item, leg, output)
            else:
                made = from_request_output(item, leg, output)
                if item.outputs[0].finish_reason is not None and output.finish_reason is None:
                    # A stop string, which only this side looks for.
                    self._aborts.append(output.request_id)
        except Exception as error:  # whatever it is, it becomes this request's end
            self.fail(output.request_id, f"its output could not be read: {describe(error)}")
        else:
            self._emit(leg, made)

    def _emit(self, leg: Leg, output: StageOutput) -> None:
        self.ready.append(output)
        if output.finished:
            self._forget(leg)
        elif output.segment_end and leg.session is not None:
            self._go_on(leg, leg.session)

    # -- sessions

    def _go_on(self, leg: Leg, session: Session) -> None:
        """Give the engine what is next in a session, or end it."""
        try:
            while (piece := session.next()) is not None and piece.request is None:
                over = session.done()
                self._emit_bare(leg, over=over)
                if over:
                    return
            if piece is not None:
                self._send_piece(leg, session, piece)
        except Exception as error:  # it was taken already, so the request has to end with it
            self._emit(leg, failed(leg.request_id, describe(error)))
            return
        if session.over:
            self._emit_bare(leg, over=True)
        elif session.at_work is None:
            self._idle.add(leg.request_id)
        else:
            self._idle.discard(leg.request_id)
        self._tell(self.active > 0)

    def _send_piece(self, leg: Leg, session: Session, piece: Piece) -> None:
        request = piece.request
        if not piece.answered:
            request.sampling_params = _compat.silent(request.sampling_params)
        message = _compat.encode(request)
        if piece.answered:
            leg.prompt_tokens = session.given
            leg.raw = piece.raw
            if not leg.raw:
                # To the output processor each segment is a request of its own, with its own text.
                request.resumable = False
                self._processor.add_request(request, None, queue=self._sink)
        self._send(ADD, message)

    def _emit_bare(self, leg: Leg, *, over: bool) -> None:
        end = {"finish_reason": "stop"} if over else {"segment_end": True}
        self.ready.append(StageOutput(request_id=leg.request_id, **end))
        if over:
            self._forget(leg)

    # -- both ways

    def _forget(self, leg: Leg) -> None:
        """Forget a request; what the engine may still have of it is aborted with the next `_flush`."""
        self.legs.pop(leg.request_id, None)
        self._idle.discard(leg.request_id)
        for engine_id in leg.engine_ids:
            self._by_engine_id.pop(engine_id, None)
        if leg.session is None and leg.raw:
            self._aborts.extend(leg.open)
        elif leg.open:
            self._aborts.extend(leg.open)
            # It puts an output of its own for each, which is not wanted.
            mark = len(self._sink.items)
            self._processor.abort_requests(list(leg.open), internal=True)
            del self._sink.items[mark:]
        self._tell(self.active > 0)

    def _flush(self) -> None:
        if self._aborts:
            aborts, self._aborts = self._aborts, []
            self._send(ABORT, _compat.encode(aborts))
