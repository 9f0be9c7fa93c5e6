"""Targets of worker stages in tests."""

from __future__ import annotations

import os
import signal
import sys
import time

import numpy as np

from omni_trio.worker import DiffusionWorker, Reply, Worker


def slow_echo(item):
    time.sleep(60)
    return item.input.text or ""


def shout(item, *, mark="!"):
    return (item.input.text or "").upper() + mark


def tone(item):
    """One sample per token."""
    return {"audio": np.asarray(item.input.token_ids or (), dtype=np.float32), "sample_rate": 100}


def nonsense(item):
    return 5


class Pieces(Worker):
    """Answers each piece with its tokens, one reply per token; ends early at a token of 13."""

    def process(self, batch):
        for item in batch:
            for token in item.input.token_ids or ():
                item.state["count"] = item.state.get("count", 0) + 1
                if token == 13:
                    yield item, Reply(token_ids=[token], finish_reason="unlucky")
                    break
                yield item, Reply(token_ids=[token], data={"count": item.state["count"]})


class Endless(Worker):
    """Replies for ever, 100 times a second."""

    def process(self, batch):
        number = 0
        while True:
            for item in batch:
                yield item, Reply(token_ids=[number])
            number += 1
            time.sleep(0.01)


class Batches(Worker):
    """Tells how large its batch was; raises for the text ``bad``, before any reply or after the first."""

    max_batch_size = 8

    def __init__(self, *, late=False):
        super().__init__()
        self._late = late

    def process(self, batch):
        time.sleep(0.05)
        replies = []
        for item in batch:
            if item.input.text == "bad":
                if self._late:
                    yield from replies
                raise ValueError("a bad item")
            replies.append((item, Reply(data={"size": len(batch)})))
        yield from replies


class Acts(Worker):
    """Does what its input says."""

    def process(self, batch):
        (item,) = batch
        what = item.input.text
        if what == "hang":
            time.sleep(600)
        elif what == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif what == "exit":
            print("the last words of a worker", flush=True)
            sys.exit(7)
        elif what == "unsendable":
            yield item, Reply(data={"object": object()})
        elif what == "wrong":
            yield item, "not a reply"
        elif what == "fail":
            yield item, Reply(error="no such voice")
        yield item, Reply(text=f"{what} {item.params.get('speed')}")

    def add(self, a, b=0):
        return a + b

    def explode(self):
        raise LookupError("no fuse")

    def _secret(self):
        return 1


class Stubborn(Acts):
    """Does not end when asked to, nor at SIGTERM."""

    def __init__(self):
        super().__init__()
        signal.signal(signal.SIGTERM, signal.SIG_IGN)

    def close(self):
        time.sleep(600)


class Broken(Worker):
    def __init__(self):
        raise FileNotFoundError("there is no voice here")


class Slow(Worker):
    def __init__(self):
        time.sleep(600)


def double(item):
    return {name: value * 2 for name, value in item.input.data.items()}


def environment(item):
    return " ".join(os.environ.get(name, "-") for name in ("SPEED", "CUDA_VISIBLE_DEVICES"))


def pieces_of(item):
    """Says what it was called with, and at which point of a session."""
    return f"{item.input.text}{'$' if item.segment_end else ''}{'.' if item.last else ''}"


class Denoiser(DiffusionWorker):
    """Noise from the seed that decays towards the prompt's length; keeps count of what its steps were done for.

    The texts ``bad prepare``, ``bad step`` (its third), ``bad finish``, ``kill`` and ``nothing`` do as they say.
    """

    max_batch_size = 4
    default_steps = 3

    def __init__(self, *, max_batch_size=4, step_time=0.0):
        super().__init__()
        self.max_batch_size = max_batch_size
        self._step_time = step_time
        self._runs = []

    def prepare(self, sample):
        if sample.input.text == "bad prepare":
            raise ValueError("the prompt can not be encoded")
        return np.random.default_rng(sample.seed).standard_normal((3, 4))

    def step(self, samples):
        together = [sample.item.request_id for sample in samples]
        if self._runs and self._runs[-1][0] == together:
            self._runs[-1][1] += 1
        else:
            self._runs.append([together, 1])
        time.sleep(self._step_time)
        states = []
        for sample in samples:
            if sample.input.text == "bad step" and sample.step == 2:
                raise ValueError("the noise is too loud")
            states.append(0.5 * sample.state + len(sample.input.text or ""))
        return states

    def finish(self, sample):
        if sample.input.text == "bad finish":
            raise ValueError("the image can not be decoded")
        if sample.input.text == "nothing":
            return None
        return {
            "image": sample.state,
            "text": sample.input.text,
            "seed": sample.seed,
            "steps": sample.step,
            "params": dict(sample.params),
            "kv_senders": dict(sample.item.kv_senders),
        }

    def runs(self):
        """The requests of successive steps, and how many steps were done for just these."""
        return self._runs


class Counted(Worker):
    """Joins, and counts each item up to its text's number."""

    max_batch_size = 3
    joins = True

    def process(self, batch):
        while batch:
            for item in tuple(batch):
                if any(item is one for one in batch):
                    count = item.state["count"] = item.state.get("count", 0) + 1
                    size = len(batch)
                    yield item, Reply(data={"size": size}, done=count >= int(item.input.text))


def texts_of_batch(item):
    return {"texts": [one.text for one in item.input.batch], "image": item.input.batch[-1].data["image"]}


class DoneThenFails(Worker):
    """Waits for a second request, is done with the first one, and fails."""

    max_batch_size = 2
    joins = True

    def process(self, batch):
        if batch[0].empty:
            return
        while len(batch) < 2:
            yield batch[0], Reply(progress=(0, 1))
        yield batch[0], Reply(text="well", done=True)
        raise ValueError("too late for the first")
