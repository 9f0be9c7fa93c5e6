"""The launcher, with real processes: whatever happens, nothing is left."""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self

import msgspec
import pytest
import trio
import trio.testing

from omni_trio.engines.process import (
    UNKNOWN_RETURNCODE,
    Launcher,
    LaunchFailed,
    Zygote,
    describe_exit,
    open_launcher,
    open_service_nursery,
)

HERE = Path(__file__).parent


def run(function: Callable[..., Awaitable[Any]], *args: Any, seconds: float = 30.0) -> Any:
    async def guarded() -> Any:
        with trio.fail_after(seconds):
            return await function(*args)

    return trio.run(guarded)


class Reports:
    """What children tell the test, by a socket in the launcher's directory."""

    def __init__(self, launcher: Launcher) -> None:
        self.path = str(launcher.directory / "reports")

    def __enter__(self) -> Self:
        self._socket = trio.socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket._sock.bind(self.path)
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    async def next(self) -> Any:
        return msgspec.msgpack.decode(await self._socket.recv(65536))


class Watched:
    """A process that is not our child: whether and when it ends."""

    def __init__(self, pid: int) -> None:
        self.pidfd = os.pidfd_open(pid)

    def ended(self, seconds: float = 5.0) -> bool:
        poll = select.poll()
        poll.register(self.pidfd, select.POLLIN)
        return bool(poll.poll(seconds * 1000))

    def close(self) -> None:
        os.close(self.pidfd)


@contextmanager
def watching(*pids: int) -> Iterator[list[Watched]]:
    watched = [Watched(pid) for pid in pids]
    try:
        yield watched
    finally:
        for one in watched:
            one.close()


def children_of(pid: int) -> list[int]:
    return [
        int(word) for task in Path(f"/proc/{pid}/task").iterdir() for word in (task / "children").read_text().split()
    ]


def fds_of(pid: int | str | None) -> int:
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


# -- how a child ends


@pytest.mark.parametrize(
    ("entry", "kwargs", "returncode"),
    [
        ("return_normally", {}, 0),
        ("exit_with", {"code": None}, 0),
        ("exit_with", {"code": 7}, 7),
        ("exit_with", {"code": "a message"}, 1),
        ("fail", {"message": "oh"}, 1),
        ("kill_self", {"number": signal.SIGTERM}, -signal.SIGTERM),
        ("kill_self", {"number": signal.SIGKILL}, -signal.SIGKILL),
        ("kill_self", {"number": signal.SIGABRT}, -signal.SIGABRT),
        ("leave_thread_and_exit_handler", {}, 0),
    ],
)
def test_returncode(zygote: Zygote, entry: str, kwargs: dict[str, Any], returncode: int) -> None:
    async def main() -> None:
        async with (
            open_launcher(zygote=zygote) as launcher,
            launcher.open_child("child", f"process_entries:{entry}", kwargs) as child,
        ):
            async with trio.open_nursery() as nursery:
                for _ in range(3):
                    nursery.start_soon(child.wait)
            assert await child.wait() == returncode
            assert child.returncode == returncode
            assert "exit handler" not in child.log_tail()

    run(main)


@pytest.mark.parametrize(
    ("entry", "text"),
    [
        ("no_such_module_at_all:function", "No module named 'no_such_module_at_all'"),
        ("process_entries:no_such_function", "no attribute 'no_such_function'"),
        ("process_entries:fail", "missing 1 required positional argument"),
    ],
)
def test_an_entry_that_can_not_be_called_ends_the_child_with_a_traceback(zygote: Zygote, entry: str, text: str) -> None:
    async def main() -> None:
        async with open_launcher(zygote=zygote) as launcher, launcher.open_child("child", entry, {}) as child:
            assert await child.wait() == 1
            assert "Traceback" in child.log_tail(1000)
            assert text in child.log_tail()

    run(main)


def test_log_has_both_streams_and_survives_the_end(zygote: Zygote) -> None:
    async def main() -> None:
        async with open_launcher(zygote=zygote) as launcher:
            entry = "process_entries:write"
            async with launcher.open_child("child", entry, {"out": "to stdout", "err": "to\nstderr"}) as child:
                await child.wait()
            assert sorted(child.log_tail().splitlines()) == ["stderr", "to", "to stdout"]
            assert len(child.log_tail(1).splitlines()) == 1

    run(main)


def test_log_is_bounded_and_never_blocks_the_child(zygote: Zygote) -> None:
    async def main() -> None:
        async with (
            open_launcher(zygote=zygote) as launcher,
            launcher.open_child("child", "process_entries:write_much", {"lines": 10_000}) as child,
        ):
            assert await child.wait() == 0
            lines = child.log_tail(1_000_000).splitlines()
            assert lines[-1].startswith("line 9999 ")
            assert 64 * 1024 // 120 < len(lines) < 3000

    run(main)


# -- what a child finds


def test_child_environment(zygote: Zygote, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SET_TOO_LATE", "yes")

    async def main() -> None:
        async with open_launcher(zygote=zygote) as launcher:
            assert launcher.directory.stat().st_mode & 0o777 == 0o700
            assert len(str(launcher.directory)) < 70
            with Reports(launcher) as reports:
                echo = {
                    "none": None,
                    "tuple": (1, 2.5, True),
                    "bytes": b"\0\xff",
                    "deep": MappingProxyType({"a": [{"b": "c"}]}),
                }
                kwargs = {"path": reports.path, "keys": ["OWN", "TMPDIR", "SET_TOO_LATE", "PATH"], "echo": echo}
                env = {"OWN": "värde"}
                entry = "process_entries:describe"
                # A sibling whose descriptors could leak into the child that looks.
                async with launcher.open_child("old", "process_entries:run_for_ever", {"path": reports.path}):
                    await reports.next()
                    async with launcher.open_child("a name that is long", entry, kwargs, env=env) as child:
                        told = await reports.next()
                        assert await child.wait() == 0
            assert told["pid"] == told["pgid"] == child.pid
            assert told["env"] == {
                "OWN": "värde",
                "TMPDIR": str(launcher.directory),
                "SET_TOO_LATE": None,
                "PATH": os.environ["PATH"],
            }
            assert told["tempdir"] == str(launcher.directory)
            assert told["sigint_default"]
            assert told["sigchld_default"]
            assert told["wakeup_fd"] == -1
            assert told["stdin"] == ""
            assert told["comm"] == "a name that is"
            assert told["echo"] == {
                "none": None,
                "tuple": [1, 2.5, True],
                "bytes": b"\0\xff",
                "deep": {"a": [{"b": "c"}]},
            }
            pipes = [name for name in told["fds"].values() if name.startswith("pipe:")]
            # stdout and stderr are one pipe; the others are the death pipe and the resource tracker's.
            assert len(pipes) == 4
            assert not [name for name in told["fds"].values() if "socket" in name or "anon_inode" in name]
            assert len(told["fds"]) == 5  # those and stdin

    run(main)


def test_modules_are_found_where_the_head_finds_them_now(
    zygote: Zygote, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "found_later.py").write_text("import sys\ndef entry(): sys.exit(5)\n")
    monkeypatch.syspath_prepend(tmp_path)

    async def main() -> None:
        async with open_launcher(zygote=zygote) as launcher, launcher.open_child("c", "found_later:entry", {}) as child:
            assert await child.wait() == 5

    run(main)


def test_kwargs_of_any_size(zygote: Zygote) -> None:
    async def main() -> None:
        async with (
            open_launcher(zygote=zygote) as launcher,
            launcher.open_child("child", "process_entries:fail", {"message": "y" * 3_000_000 + "end"}) as child,
        ):
            assert await child.wait() == 1
            assert child.log_tail().endswith("yyyend")

    run(main)


@pytest.mark.parametrize(
    ("kwargs", "text"),
    [
        ({"a": object()}, r"kwargs\['a'\] is of type builtins.object"),
        ({"a": [1, {"b": {1, 2}}]}, r"kwargs\['a'\]\[1\]\['b'\] is of type builtins.set"),
        ({"a": {1: 2}}, r"kwargs\['a'\] has the key 1"),
        ({"a": 1 << 64}, r"kwargs\['a'\] is an integer of more than 64 bits"),
    ],
)
def test_kwargs_must_be_plain(zygote: Zygote, kwargs: dict[str, Any], text: str) -> None:
    async def main() -> None:
        async with open_launcher(zygote=zygote) as launcher:
            with pytest.raises(TypeError, match=text):
                async with launcher.open_child("child", "process_entries:return_normally", kwargs):
                    pytest.fail("started")

    run(main)


@pytest.mark.parametrize("entry", ["", "os", "os:", ":f", "os.path", "os:f()", "a b:c", "os::f"])
def test_entry_must_have_its_form(zygote: Zygote, entry: str) -> None:
    async def main() -> None:
        async with open_launcher(zygote=zygote) as launcher:
            with pytest.raises(ValueError, match=r"package\.module:function"):
                async with launcher.open_child("child", entry, {}):
                    pytest.fail("started")

    run(main)


def test_env_must_be_strings(zygote: Zygote) -> None:
    async def main() -> None:
        async with open_launcher(zygote=zygote) as launcher:
            with pytest.raises(TypeError, match="pair of strings, not 'A': 1"):
                async with launcher.open_child("child", "os:abort", {}, env={"A": 1}):  # type: ignore[dict-item]
                    pytest.fail("started")

    run(main)


# -- ending children


def test_leaving_the_block_kills_the_whole_group(zygote: Zygote) -> None:
    async def main() -> None:
        async with open_launcher(zygote=zygote) as launcher:
            with Reports(launcher) as reports:
                kwargs = {"path": reports.path, "grandchildren": 3, "ignore_sigterm": True}
                async with launcher.open_child("child", "process_entries:run_for_ever", kwargs) as child:
                    told = await reports.next()
                    watched = [Watched(pid) for pid in (told["pid"], *told["grandchildren"])]
                assert child.returncode == -signal.SIGKILL
                assert all(one.ended(0) for one in watched)
                for one in watched:
                    one.close()

    run(main)


def test_what_a_child_leaves_in_its_group_dies_with_it(zygote: Zygote) -> None:
    async def main() -> None:
        async with open_launcher(zygote=zygote) as launcher:
            with Reports(launcher) as reports:
                go = str(launcher.directory / "go")
                kwargs = {"path": reports.path, "go": go}
                async with launcher.open_child("child", "process_entries:leave_grandchild", kwargs) as child:
                    told = await reports.next()
                    with watching(*told["grandchildren"]) as (grandchild,):
                        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
                            sock.sendto(b"g", go)
                        assert await child.wait() == 0
                        await trio.lowlevel.wait_readable(grandchild.pidfd)

    run(main)


@pytest.mark.parametrize(
    ("ignore", "options", "returncode"),
    [
        (False, {}, -signal.SIGTERM),
        (False, {"terminate_after": 0.05}, -signal.SIGTERM),
        (False, {"kill_after": 0}, -signal.SIGKILL),
        (True, {"kill_after": 0.1}, -signal.SIGKILL),
    ],
)
def test_stop(zygote: Zygote, ignore: bool, options: dict[str, float], returncode: int) -> None:
    async def main() -> None:
        async with open_launcher(zygote=zygote) as launcher:
            with Reports(launcher) as reports:
                kwargs = {"path": reports.path, "grandchildren": 1, "ignore_sigterm": ignore}
                async with launcher.open_child("child", "process_entries:run_for_ever", kwargs) as child:
                    told = await reports.next()
                    with watching(*told["grandchildren"]) as (grandchild,):
                        assert await child.stop(**options) == returncode
                        assert grandchild.ended(0)
                    child.signal(signal.SIGTERM)  # does nothing any more
                    assert await child.stop() == returncode

    run(main)


def test_a_cancelled_stop_kills_at_once(zygote: Zygote) -> None:
    async def main() -> None:
        async with open_launcher(zygote=zygote) as launcher:
            with Reports(launcher) as reports:
                kwargs = {"path": reports.path, "ignore_sigterm": True}
                async with launcher.open_child("child", "process_entries:run_for_ever", kwargs) as child:
                    await reports.next()
                    with trio.move_on_after(0.1) as scope:
                        await child.stop(kill_after=1000)
                    assert scope.cancelled_caught
                    assert child.returncode == -signal.SIGKILL

    run(main)


@pytest.mark.parametrize("options", [{"kill_after": -1}, {"terminate_after": float("inf")}])
def test_stop_checks_its_times(zygote: Zygote, options: dict[str, float]) -> None:
    async def main() -> None:
        async with (
            open_launcher(zygote=zygote) as launcher,
            launcher.open_child("child", "process_entries:return_normally", {}) as child,
        ):
            with pytest.raises(ValueError, match="finite number of seconds"):
                await child.stop(**options)

    run(main)


def test_cancelling_the_body_ends_everything(zygote: Zygote) -> None:
    async def main() -> None:
        with trio.CancelScope() as scope:
            async with open_launcher(zygote=zygote) as launcher:
                with Reports(launcher) as reports:
                    entry = "process_entries:run_for_ever"
                    async with launcher.open_child("child", entry, {"path": reports.path}) as child:
                        await reports.next()
                        scope.cancel()
                        await trio.sleep_forever()
        assert scope.cancelled_caught
        assert child.returncode == -signal.SIGKILL
        assert not launcher.directory.exists()

    run(main)


def test_an_exception_of_the_body_comes_out_as_it_is(zygote: Zygote) -> None:
    cause = KeyError("cause")

    async def main() -> None:
        async with (
            open_launcher(zygote=zygote) as launcher,
            launcher.open_child("child", "process_entries:run_for_ever", {"path": str(launcher.directory)}),
        ):
            raise ValueError("body") from cause

    with pytest.raises(ValueError, match="body") as info:
        run(main)
    assert info.value.__cause__ is cause


# -- many, and leaks


def test_many_at_once_leak_nothing(zygote: Zygote) -> None:
    async def one(launcher: Launcher, number: int) -> None:
        async with launcher.open_child(f"c{number}", "process_entries:exit_with", {"code": number}) as child:
            assert await child.wait() == number

    async def main() -> None:
        before = None
        for _ in range(2):
            async with open_launcher(zygote=zygote) as launcher, trio.open_nursery() as nursery:
                for number in range(40):
                    nursery.start_soon(one, launcher, number)
            now = (fds_of("self"), fds_of(zygote.pid))
            assert before in (None, now)
            before = now
            # The only child that the zygote keeps is the resource tracker.
            assert len(children_of(zygote.pid)) == 1

    run(main, seconds=60)


def test_no_threads_are_left_to_work_in_the_head(zygote: Zygote) -> None:
    before = set(threading.enumerate())

    async def main() -> None:
        async with (
            open_launcher(zygote=zygote) as launcher,
            launcher.open_child("child", "process_entries:return_normally", {}) as child,
        ):
            await child.wait()
            # trio keeps idle worker threads for a while, for short blocking calls.
            assert not [t.name for t in set(threading.enumerate()) - before if "trio" not in t.name.lower()]

    run(main)


def test_launchers_share_a_zygote_and_are_apart(zygote: Zygote) -> None:
    async def main() -> None:
        async with open_launcher(zygote=zygote) as first, open_launcher(zygote=zygote) as second:
            assert first.directory != second.directory
            with Reports(first) as reports:
                entry = "process_entries:run_for_ever"
                async with first.open_child("child", entry, {"path": reports.path}) as child:
                    await reports.next()
                    async with (
                        open_launcher(zygote=zygote) as third,
                        third.open_child("other", "process_entries:return_normally", {}) as other,
                    ):
                        assert await other.wait() == 0
                    assert not third.directory.exists()
                    assert child.returncode is None
            async with second.open_child("last", "process_entries:return_normally", {}) as last:
                assert await last.wait() == 0

    run(main)


# -- the zygote


def test_own_zygote_ends_with_the_launcher() -> None:
    async def main() -> None:
        before = fds_of("self")
        async with open_launcher(preload=["json"]) as launcher:
            async with launcher.open_child("child", "process_entries:return_normally", {}) as child:
                assert await child.wait() == 0
            pid = launcher._zygote.pid
            assert pid is not None
            with_tracker = children_of(pid)
            with watching(pid, *with_tracker) as watched:
                pass
            watched = [Watched(one) for one in (pid, *with_tracker)]
        for one in watched:
            assert one.ended(0)
            one.close()
        assert fds_of("self") == before

    run(main)


def test_zygote_killed() -> None:
    async def main() -> None:
        with Zygote() as zygote:
            async with open_launcher(zygote=zygote) as launcher:
                with Reports(launcher) as reports:
                    kwargs = {"path": reports.path, "grandchildren": 1}
                    entry = "process_entries:run_for_ever"
                    async with launcher.open_child("child", entry, kwargs) as child:
                        told = await reports.next()
                        with watching(*told["grandchildren"]) as (grandchild,):
                            os.kill(zygote.pid or 0, signal.SIGKILL)
                            with pytest.raises(LaunchFailed, match="was killed by SIGKILL"):
                                async with launcher.open_child("new", "process_entries:return_normally", {}):
                                    pytest.fail("started")
                            assert child.returncode is None
                            os.kill(child.pid, signal.SIGTERM)
                            assert await child.wait() == UNKNOWN_RETURNCODE
                            await trio.lowlevel.wait_readable(grandchild.pidfd)
                        async with trio.open_nursery() as nursery:
                            nursery.start_soon(child.wait)
            assert not launcher.directory.exists()
            with pytest.raises(LaunchFailed, match="takes no sessions"):
                async with open_launcher(zygote=zygote):
                    pytest.fail("opened")

    run(main)


def test_zygote_killed_while_its_child_lives_on_to_the_end_of_the_block() -> None:
    async def main() -> None:
        async with open_launcher() as launcher:
            with Reports(launcher) as reports:
                kwargs = {"path": reports.path, "grandchildren": 1}
                async with launcher.open_child("child", "process_entries:run_for_ever", kwargs) as child:
                    await reports.next()
                    os.kill(launcher._zygote.pid or 0, signal.SIGKILL)
                assert child.returncode == UNKNOWN_RETURNCODE

    run(main)


def test_zygote_that_was_never_opened() -> None:
    async def main() -> None:
        async with open_launcher(zygote=Zygote()):
            pytest.fail("opened")

    with pytest.raises(LaunchFailed, match="inside its 'with' block"):
        run(main)


def test_preload_and_zygote_exclude_each_other(zygote: Zygote) -> None:
    async def main() -> None:
        async with open_launcher(zygote=zygote, preload=["json"]):
            pytest.fail("opened")

    with pytest.raises(ValueError, match="has a preload already"):
        run(main)


def test_preload_is_a_sequence_of_names() -> None:
    with pytest.raises(TypeError, match="not the string 'json'"):
        Zygote("json")


def test_preload_that_fails_is_told_at_each_spawn() -> None:
    async def main() -> None:
        async with open_launcher(preload=["json", "preload_fails"]) as launcher:
            for _ in range(2):
                text = "preloading 'preload_fails' failed: RuntimeError: no such luck"
                with pytest.raises(LaunchFailed, match=text) as info:
                    async with launcher.open_child("child", "process_entries:return_normally", {}):
                        pytest.fail("started")
                assert "RuntimeError: no such luck" in info.value.log_tail

    run(main)


def test_spawns_during_a_preload_are_cancelled_at_once_and_never_forked() -> None:
    async def main() -> None:
        async with open_launcher(preload=["preload_sleeps"]) as launcher:
            before = fds_of("self")
            cancelled = 0
            start = trio.current_time()
            for _ in range(10):
                with trio.move_on_after(0.02) as scope:
                    async with launcher.open_child("child", "process_entries:return_normally", {}):
                        pytest.fail("started")
                cancelled += scope.cancelled_caught
            assert cancelled == 10
            assert trio.current_time() - start < 5
            assert fds_of("self") == before
            pid = launcher._zygote.pid
        with pytest.raises(ProcessLookupError):
            os.kill(pid or 0, 0)

    run(main, seconds=20)


def test_a_child_forked_for_a_cancelled_spawn_is_killed(zygote: Zygote) -> None:
    async def main() -> None:
        async with open_launcher(zygote=zygote) as launcher:
            with Reports(launcher) as reports:
                # Stopped, the zygote answers after the cancellation.
                os.kill(zygote.pid or 0, signal.SIGSTOP)
                try:
                    with trio.move_on_after(0.05) as scope:
                        entry = "process_entries:run_for_ever"
                        async with launcher.open_child("child", entry, {"path": reports.path}):
                            pytest.fail("started")
                finally:
                    os.kill(zygote.pid or 0, signal.SIGCONT)
                assert scope.cancelled_caught
                async with launcher.open_child("next", "process_entries:return_normally", {}) as child:
                    assert await child.wait() == 0
        assert len(children_of(zygote.pid or 0)) == 1

    run(main)


def test_zygote_outlives_runs_of_trio() -> None:
    with Zygote() as zygote:
        for _ in range(2):

            async def main() -> None:
                async with (
                    open_launcher(zygote=zygote) as launcher,
                    launcher.open_child("child", "process_entries:return_normally", {}) as child,
                ):
                    assert await child.wait() == 0

            run(main)
        with pytest.raises(RuntimeError, match="open already"):
            zygote.__enter__()
    assert zygote.pid is None
    zygote.close()


# -- the head


@pytest.mark.parametrize("what", ["main", "preloading"])
def test_nothing_is_left_when_the_head_is_killed(tmp_path: Path, what: str) -> None:
    env = {**os.environ, "PYTHONPATH": str(HERE)}
    path = str(tmp_path / "reports")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.bind(path)
        sock.settimeout(30)
        with subprocess.Popen([sys.executable, str(HERE / "process_head.py"), what, path], env=env) as head:
            try:
                told = msgspec.msgpack.decode(sock.recv(65536))
            finally:
                pids = [] if "told" not in locals() else [told["zygote"], *children_of(told["zygote"]), *told["pids"]]
                watched = [Watched(pid) for pid in pids]
                head.kill()
    assert len(watched) >= (7 if what == "main" else 1)
    assert all(one.ended() for one in watched)
    for one in watched:
        one.close()
    assert not Path(told["directory"]).exists()
    for name in told["shm"]:
        assert not Path("/dev/shm", name).exists()


# -- small things


def test_describe_exit() -> None:
    assert describe_exit(None) == "still runs"
    assert describe_exit(3) == "exited with code 3"
    assert describe_exit(-signal.SIGSEGV) == "was killed by SIGSEGV"
    assert describe_exit(-signal.SIGKILL) == "was killed by SIGKILL (the out-of-memory killer does that)"
    assert describe_exit(-99) == "was killed by signal 99"
    assert "not known" in describe_exit(UNKNOWN_RETURNCODE)


def test_services_outlive_a_cancelled_body_and_a_crash_cancels_it() -> None:
    async def main() -> None:
        with trio.CancelScope() as scope:
            async with open_service_nursery() as services:
                event, answered = trio.Event(), trio.Event()

                async def answer() -> None:
                    await event.wait()
                    answered.set()

                services.start_soon(answer)
                services.start_soon(trio.sleep_forever)
                try:
                    scope.cancel()
                    await trio.sleep_forever()
                finally:
                    with trio.move_on_after(5, shield=True) as cleanup:
                        event.set()
                        await answered.wait()
                    assert not cleanup.cancelled_caught
        with pytest.raises(RuntimeError, match="services have ended"):
            services.start_soon(trio.sleep_forever)

        async def crash() -> None:
            await trio.lowlevel.checkpoint()
            raise ValueError("crash")

        with pytest.raises(ValueError, match="crash"):
            async with open_service_nursery() as services:
                services.start_soon(crash)
                await trio.sleep_forever()

    run(main)
