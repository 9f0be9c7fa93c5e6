"""The command line as its tests call it."""

from __future__ import annotations

import json
import sys

from click.testing import CliRunner

from omni_trio import open_runtime
from omni_trio.cli import _run, main

PIPELINE = """
name = "sim"
[[stages]]
name = "thinker"
kind = "simulated"
options = { tokens = 3 }
[[stages]]
name = "talker"
kind = "simulated"
bridge = "tokens"
options = { tokens = 4 }
"""


def enter(folder, monkeypatch):
    """Make a folder with a pipeline file the current one."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (folder / "sim.toml").write_text(PIPELINE)
    return folder


def omni(*arguments, input=None):  # noqa: A002 - as CliRunner calls it
    result = CliRunner().invoke(main, [str(argument) for argument in arguments], input=input)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def scripted(monkeypatch, **stages):
    """Let the command open a runtime whose stages do as the scripts say."""

    def open_scripted(pipeline, **options):
        return open_runtime(pipeline, clients=stages, **options)

    monkeypatch.setattr(_run, "open_runtime", open_scripted)


def lines(text):
    return [json.loads(line) for line in text.splitlines()]
