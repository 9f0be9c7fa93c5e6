"""The command line as a process: signals, streams that are closed, full or narrow, and terminals."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys

import pytest

from cli_support import PIPELINE, enter


@pytest.fixture
def folder(tmp_path, monkeypatch):
    return enter(tmp_path, monkeypatch)


SLOW = PIPELINE.replace("tokens = 3", "token_time = 1000")


def spawn(*arguments, **options):
    command = [sys.executable, "-c", "from omni_trio.cli import main; main()", *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options)


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_it_in_order(folder, number, status):
    (folder / "slow.toml").write_text(SLOW)
    with spawn("run", "slow.toml", "--input", "-", "--timeline", "t.svg", stdin=subprocess.PIPE) as process:
        process.stdin.write('{"prompt": "x"}\n' * 3)
        process.stdin.close()
        for line in process.stderr:
            if line == "thinker #0: ready\n":
                break
        process.send_signal(number)
        process.stdin = None
        out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (status, "")
    assert err.endswith("stopping\n")
    assert "Traceback" not in err
    assert "runtime" not in err
    assert (folder / "t.svg").exists()


def test_a_signal_during_start_up(folder):
    (folder / "slow.toml").write_text(PIPELINE.replace("tokens = 3", "start_time = 1000"))
    with spawn("run", "slow.toml", "x") as process:
        assert "spawn" in process.stderr.readline()
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Traceback" not in err


def test_a_second_signal_does_not_cut_the_closing_short(folder):
    (folder / "slow.toml").write_text(SLOW.replace("token_time = 1000", "token_time = 1000, close_time = 2"))
    with spawn("run", "slow.toml", "x", "--trace", "t.json") as process:
        for line in process.stderr:
            if line == "thinker #0: ready\n":
                break
        process.send_signal(signal.SIGINT)
        assert any(line == "stopping\n" for line in process.stderr)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "still stopping" in err
    assert "Traceback" not in err
    assert (folder / "t.json").exists()


def test_a_reader_who_leaves_is_no_error(folder):
    (folder / "p.jsonl").write_text('{"prompt": "x"}\n' * 2000)
    with spawn("run", "-q", "sim.toml", "--input", "p.jsonl") as process:
        process.stdout.readline()
        process.stdout.close()
        err = process.stderr.read()
        assert process.wait(60) == 141
    assert err == ""


def test_a_reader_of_check_who_has_left(folder):
    ours, theirs = os.pipe()
    os.close(ours)
    with os.fdopen(theirs, "w") as closed:
        done = shell("omni check sim.toml", stdout=closed)
    assert (done.returncode, done.stderr) == (141, "")


def shell(command, **options):
    """Run a command of a shell in which `omni` is the program."""
    program = f'omni() {{ {sys.executable} -c "from omni_trio.cli import main; main()" "$@"; }}\n'
    # Without a buffer stdout fails at other places than it does for most users.
    env = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    defaults = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "env": env}
    return subprocess.run(["sh", "-c", program + command], text=True, check=False, **(defaults | options))


@pytest.mark.parametrize("command", ["check sim.toml", "run -q sim.toml x", "run -q sim.toml --input p.jsonl"])
def test_a_full_stdout(folder, command):
    (folder / "p.jsonl").write_text('{"prompt": "x"}\n' * 3)
    done = shell(f"omni {command} > /dev/full")
    assert (done.returncode, done.stderr) == (1, "can not write to stdout: No space left on device\n")


@pytest.mark.parametrize(
    ("command", "status", "words"),
    [
        ("check sim.toml >&-", 1, "can not write to stdout: it is closed\n"),
        ("run -q sim.toml x --out out >&-", 2, "stdout is closed; it takes the results\n"),
        ("run -q sim.toml --input p.jsonl >&-", 2, "stdout is closed; it takes the results\n"),
        ("run -q sim.toml --input p.jsonl --out out >&-", 0, ""),
        ("run -q sim.toml --input - <&-", 2, "--input: stdin is closed\n"),
        ("run -q sim.toml x 2>&-", 0, ""),
        ("check nothing.toml 2>&-", 2, ""),
    ],
)
def test_closed_streams(folder, command, status, words):
    (folder / "p.jsonl").write_text('{"prompt": "x"}\n')
    done = shell(f"omni {command}")
    assert (done.returncode, done.stderr) == (status, words)


def test_the_number_of_a_closed_stream_goes_to_nobody_else(folder):
    program = "from omni_trio.cli._streams import set_up; set_up(); print(open('sim.toml').fileno())"
    for closed in ("<&-", "2>&-", "<&- 2>&-"):
        done = shell(f'{sys.executable} -c "{program}" {closed}')
        assert int(done.stdout) > 2


def test_what_an_encoding_does_not_have_is_shown_by_its_number(folder):
    (folder / "sim.toml").write_text(PIPELINE.replace('"talker"', '"é"'))
    env = os.environ | {"LC_ALL": "C", "PYTHONIOENCODING": "ascii"}
    done = shell("omni check sim.toml", env=env)
    assert (done.returncode, done.stderr) == (0, "")
    assert "<b>\\xe9</b>" in done.stdout
    done = shell("omni run sim.toml x", env=env)
    assert (done.returncode, done.stdout) == (0, "w3 w4 w5 w6 \n")
    assert "\\xe9 #0: ready" in done.stderr


@pytest.mark.parametrize(("command", "module"), [("check", "_check"), ("run", "_run"), ("run", "_streams")])
def test_a_signal_in_the_imports(folder, command, module):
    program = f"""
import os, signal, sys
from omni_trio.cli import main

class Interrupter:
    @staticmethod
    def find_spec(name, path, target=None):
        if name == "omni_trio.cli.{module}":
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Interrupter)
main(["{command}", "sim.toml", *["x"][:{command == "run":d}]])
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_bars_on_a_terminal(folder):
    (folder / "p.jsonl").write_text('{"prompt": "x"}\nnonsense\n')
    ours, theirs = pty.openpty()
    with os.fdopen(ours, "rb") as terminal:
        command = [sys.executable, "-c", "from omni_trio.cli import main; main()"]
        with subprocess.Popen(
            [*command, "run", "sim.toml", "--input", "p.jsonl"],
            stdout=subprocess.DEVNULL,
            stderr=theirs,
            env=os.environ | {"TERM": "xterm", "COLUMNS": "100"},
        ) as process:
            os.close(theirs)
            shown = b""
            try:
                while piece := terminal.read1(4096):
                    shown += piece
            except OSError:  # how Linux says that the other side of a terminal is closed
                pass
        assert process.returncode == 1
    for words in (b"starting", b"requests", b"1/2", b"2/2", b"1 failed", b"1 of 2 prompts were served"):
        assert words in shown


def test_help_is_there_without_any_engine(folder):
    code = "import sys; from omni_trio.cli import main; main(['run', '--help'], standalone_mode=False); "
    code += "print([m for m in ('torch', 'vllm', 'rich') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "Exit status:\n" in done.stdout
    assert done.stdout.endswith("[]\n")
