"""The worker that the conformance kit plays with."""

from __future__ import annotations

import time

from omni_trio.worker import Reply, Worker


class Tokens(Worker):
    """Says its tokens one by one; with ``slow``, for ever."""

    def process(self, batch):
        for item in batch:
            tokens = item.input.token_ids or ()
            if not tokens and item.input.text:
                yield item, Reply(error="expected token ids")
                continue
            for token in tokens:
                yield item, Reply(token_ids=[token])
            while item.params.get("slow"):
                time.sleep(0.002)
                yield item, Reply(token_ids=[0])

    def add(self, a, b):
        return a + b

    def nap(self, seconds):
        time.sleep(seconds)
