"""A head process for the tests to kill: opens a launcher with a zygote of its own, and tells who is there."""

import os
import sys

import msgspec
import trio

import process_entries
from omni_trio.engines.process import Zygote, open_launcher
from test_process_launcher import Reports


async def main(path: str) -> None:
    with Zygote() as zygote:
        async with open_launcher(zygote=zygote) as launcher:
            with Reports(launcher) as reports:
                async with (
                    launcher.open_child(
                        "family",
                        "process_entries:run_for_ever",
                        {"path": reports.path, "grandchildren": 2, "ignore_sigterm": True},
                    ),
                    launcher.open_child("leaky", "process_entries:leak_shared_memory", {"path": reports.path}),
                ):
                    told = [await reports.next(), await reports.next()]
                    pids = [pid for one in told for pid in (one["pid"], *one["grandchildren"])]
                    shm = [one["shm"] for one in told if "shm" in one]
                    process_entries.report(
                        path,
                        {
                            "pids": pids,
                            "shm": shm,
                            "zygote": zygote.pid,
                            "directory": str(launcher.directory),
                            "head": os.getpid(),
                        },
                    )
                    await trio.sleep_forever()


async def preloading(path: str) -> None:
    with Zygote(["preload_sleeps"]) as zygote:
        async with open_launcher(zygote=zygote) as launcher:
            told = {"pids": [], "shm": [], "zygote": zygote.pid, "directory": str(launcher.directory)}
            process_entries.report(path, told)
            await trio.sleep_forever()


if __name__ == "__main__":
    assert msgspec
    trio.run({"main": main, "preloading": preloading}[sys.argv[1]], sys.argv[2])
