"""Worker targets of tests/test_control.py."""

from __future__ import annotations

from pathlib import Path

from omni_trio.worker import Reply, Worker


def take_one(pipe: str) -> None:
    """Block until there is a byte in a named pipe, and take it."""
    with Path(pipe).open("rb", buffering=0) as file:
        file.read(1)


class Napper(Worker):
    """Computes until there is a byte for it in the named pipe that is its input; can sleep."""

    def __init__(self):
        super().__init__()
        self._done = []

    def process(self, batch):
        for item in batch:
            take_one(item.input.text)
            yield item, Reply(text="done")

    def wait_for(self, pipe):
        take_one(pipe)
        return "got it"

    def done(self):
        return self._done

    def sleep(self, level):
        self._done.append(f"sleep {level}")

    def wake_up(self, tags=None):
        self._done.append(f"wake {tags}")
