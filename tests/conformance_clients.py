"""A small client that keeps its contract, and the same with one bug each."""

from __future__ import annotations

from contextlib import asynccontextmanager

import trio

from omni_trio.errors import EngineDied, InvalidRequest, StageFailed
from omni_trio.messages import StageOutput
from omni_trio.stages import ClientStatistics

SLOTS = 4


class Echo:
    """Says the tokens of its input again, one per output. `SLOTS` requests at a time; the others wait."""

    def __init__(self, nursery):
        self.nursery, self.slots = nursery, trio.Semaphore(SLOTS)
        self.scopes, self.ready = {}, []
        self.news, self.calls = trio.Event(), trio.CancelScope()
        self.death = None

    def resolve_params(self, params):
        if params is not None and not isinstance(params, dict):
            raise InvalidRequest(f"expected a dict, not {params!r}")
        return {"repeat": 1, **(params or {})}

    async def submit(self, request):
        await trio.lowlevel.checkpoint()
        self.check()
        if not request.input.token_ids:
            raise InvalidRequest("expected token ids")
        self.scopes[request.request_id] = trio.CancelScope()
        self.nursery.start_soon(self.work, request, self.scopes[request.request_id])

    async def work(self, request, scope):
        with scope:
            async with self.slots:
                tokens = request.input.token_ids * request.params["repeat"]
                for index, token in enumerate(tokens, 1):
                    await trio.sleep(0.001)
                    reason = "stop" if index == len(tokens) else None
                    self.put(StageOutput(request_id=request.request_id, token_ids=(token,), finish_reason=reason))
        if self.scopes.get(request.request_id) is scope:
            del self.scopes[request.request_id]

    def put(self, output):
        self.ready.append(output)
        self.news.set()

    async def update(self, request):
        await trio.lowlevel.checkpoint()
        self.check()

    async def abort(self, request_ids):
        await trio.lowlevel.checkpoint()
        self.check()
        for request_id in request_ids:
            if scope := self.scopes.pop(request_id, None):
                scope.cancel()
        self.ready = [output for output in self.ready if output.request_id not in request_ids]

    async def receive(self):
        await trio.lowlevel.checkpoint()
        while not self.ready:
            self.check()
            self.news = trio.Event()
            await self.news.wait()
        outputs, self.ready = self.ready, []
        return outputs

    async def call(self, method, args=(), kwargs=None):
        self.check()
        if method != "wait":
            await trio.lowlevel.checkpoint()
            raise StageFailed(f"no such method: {method}")
        with self.calls:
            await trio.sleep(*args)
        self.check()

    def statistics(self):
        return ClientStatistics(running=min(len(self.scopes), SLOTS), waiting=max(0, len(self.scopes) - SLOTS))

    def check(self):
        if self.death:
            raise EngineDied(self.death)

    def die(self):
        self.death = "killed"
        for scope in (*self.scopes.values(), self.calls):
            scope.cancel()
        self.scopes.clear()
        self.ready.clear()
        self.news.set()

    async def close(self):
        self.nursery.cancel_scope.cancel()


def factory(kind=Echo):
    """Return what opens a client."""

    @asynccontextmanager
    async def opened(context):
        async with trio.open_nursery() as nursery:
            client = kind(nursery)
            try:
                yield client
            finally:
                await client.close()

    return opened


def mortal(kind=Echo):
    """Return what opens a client together with what kills it."""

    @asynccontextmanager
    async def opened(context):
        async with factory(kind)(context) as client:
            yield client, client.die

    return opened


def full(kind=Echo):
    """Return what opens a client all of whose slots are taken."""

    @asynccontextmanager
    async def opened(context):
        async with factory(kind)(context) as client:
            for _ in range(SLOTS):
                client.slots.acquire_nowait()
            yield client

    return opened


class DropsTheLastOutput(Echo):
    def put(self, output):
        if not output.finished:
            super().put(output)


class DropsTheLastChunk(Echo):
    def put(self, output):
        if output.finished:
            output = StageOutput(request_id=output.request_id, finish_reason=output.finish_reason)
        super().put(output)


class OverwritesWhatIsReady(Echo):
    """Keeps one output per request where the receiver is slow."""

    def put(self, output):
        self.ready = [other for other in self.ready if other.request_id != output.request_id]
        super().put(output)


class DoublesTheLast(Echo):
    def put(self, output):
        super().put(output)
        if output.finished:
            super().put(output)


class MixesTwo(Echo):
    def put(self, output):
        ids = list(self.scopes)
        if len(ids) > 1 and not output.finished and output.request_id == ids[0]:
            output = StageOutput(request_id=ids[1], token_ids=output.token_ids)
        super().put(output)


class SaysWhatNobodyAsked(Echo):
    def put(self, output):
        super().put(output)
        super().put(StageOutput(request_id="somebody", token_ids=(1,)))


class ReturnsNothing(Echo):
    async def receive(self):
        await trio.sleep(0.0005)
        self.check()
        outputs, self.ready = self.ready, []
        return outputs


class LosesOnCancel(Echo):
    async def receive(self):
        outputs = await super().receive()
        await trio.lowlevel.checkpoint()
        return outputs


class ForgetsAnAbort(Echo):
    async def abort(self, request_ids):
        await trio.lowlevel.checkpoint()
        self.check()


class NeverAcknowledges(Echo):
    async def abort(self, request_ids):
        if any(request_id in self.scopes for request_id in request_ids):
            await trio.sleep_forever()
        await super().abort(request_ids)


class AnswersAfterAbort(Echo):
    async def abort(self, request_ids):
        live = [request_id for request_id in request_ids if request_id in self.scopes]
        await super().abort(request_ids)
        for request_id in live:
            self.put(StageOutput(request_id=request_id, finish_reason="abort"))


class RaisesOnUnknown(Echo):
    async def abort(self, request_ids):
        await trio.lowlevel.checkpoint()
        self.check()
        for request_id in request_ids:
            self.scopes.pop(request_id).cancel()
        self.ready = [output for output in self.ready if output.request_id not in request_ids]


class LeaksASlot(Echo):
    async def work(self, request, scope):
        await super().work(request, scope)
        if scope.cancelled_caught:
            await self.slots.acquire()


class KeepsWhatItRefuses(Echo):
    async def submit(self, request):
        if not request.input.token_ids:
            self.put(StageOutput(request_id=request.request_id, finish_reason="error", error="no tokens"))
        await super().submit(request)


class TakesEverything(Echo):
    async def submit(self, request):
        if not request.input.token_ids:
            self.put(StageOutput(request_id=request.request_id, finish_reason="stop"))
            await trio.lowlevel.checkpoint()
            return
        await super().submit(request)


class KeepsACancelledSubmission(Echo):
    async def submit(self, request):
        await super().submit(request)
        await trio.lowlevel.checkpoint()


class RaisesOnUpdate(Echo):
    async def update(self, request):
        self.scopes[request.request_id].deadline = float("inf")
        await trio.lowlevel.checkpoint()


class ChangesParams(Echo):
    def resolve_params(self, params):
        resolved = super().resolve_params(params)
        if params is not None:
            params.update(resolved)
        return resolved


class ResolvesLater(Echo):
    async def resolve_params(self, params):
        return super().resolve_params(params)


class SpendsParams(Echo):
    async def submit(self, request):
        request.params["seen"] = True
        await super().submit(request)


class TakesAnyParams(Echo):
    def resolve_params(self, params):
        return {"repeat": 1, **(params if isinstance(params, dict) else {})}


class AnswersAnyCall(Echo):
    async def call(self, method, args=(), kwargs=None):
        return await super().call(method, args, kwargs) if method == "wait" else None


class CountsForEver(Echo):
    count = 0

    async def submit(self, request):
        await super().submit(request)
        self.count += 1

    def statistics(self):
        return ClientStatistics(running=self.count)


class RaisesWhatItLikes(Echo):
    async def submit(self, request):
        if self.scopes:
            raise KeyError(request.request_id)
        await super().submit(request)


class NeverEndsOnDeath(Echo):
    def die(self):
        self.death = "killed"


class TellsOnce(Echo):
    told = False

    async def receive(self):
        if self.told:
            await trio.sleep_forever()
        try:
            return await super().receive()
        except EngineDied:
            self.told = True
            raise


class AnswersWhenDead(Echo):
    async def receive(self):
        try:
            return await super().receive()
        except EngineDied:
            if self.ready or self.death == "told":
                return [StageOutput(request_id="r0", finish_reason="stop")]
            self.death = "told"
            raise


class TakesRequestsWhenDead(Echo):
    async def submit(self, request):
        await trio.lowlevel.checkpoint()
        if not self.death:
            await super().submit(request)


class LeavesCallsWaiting(Echo):
    def die(self):
        calls, self.calls = self.calls, trio.CancelScope()
        super().die()
        self.calls = calls


class HangsOnClose(Echo):
    async def close(self):
        await trio.sleep_forever()


class HangsOnCloseShielded(Echo):
    async def close(self):
        with trio.CancelScope(shield=True):
            await trio.sleep_forever()


class HangsOnCloseWhenBusy(Echo):
    async def close(self):
        with trio.CancelScope(shield=True):
            if self.scopes:
                await trio.sleep_forever()
        await super().close()


def deaf(context):
    """A factory whose start does not let itself be cancelled."""

    @asynccontextmanager
    async def opened():
        with trio.CancelScope(shield=True):
            await trio.sleep(1000)
        async with factory()(context) as client:
            yield client

    return opened()


PLANTED = {
    DropsTheLastOutput: 1,
    DoublesTheLast: 2,
    SaysWhatNobodyAsked: 3,
    ReturnsNothing: 3,
    DropsTheLastChunk: 4,
    OverwritesWhatIsReady: 4,
    MixesTwo: 5,
    LosesOnCancel: 6,
    NeverAcknowledges: 7,
    ForgetsAnAbort: 8,
    AnswersAfterAbort: 8,
    RaisesOnUnknown: 9,
    LeaksASlot: 10,
    RaisesOnUpdate: 11,
    ChangesParams: 14,
    ResolvesLater: 14,
    SpendsParams: 15,
    TakesAnyParams: 16,
    KeepsWhatItRefuses: 17,
    TakesEverything: 17,
    KeepsACancelledSubmission: 18,
    AnswersAnyCall: 19,
    CountsForEver: 20,
    NeverEndsOnDeath: 21,
    TellsOnce: 21,
    AnswersWhenDead: 21,
    TakesRequestsWhenDead: 22,
    LeavesCallsWaiting: 23,
    HangsOnClose: 24,
    HangsOnCloseShielded: 24,
    HangsOnCloseWhenBusy: 24,
    RaisesWhatItLikes: 26,
}
"""By client, the number of the rule that it breaks."""
