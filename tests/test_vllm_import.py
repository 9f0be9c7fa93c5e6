"""What importing vLLM into the user's own process says."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytestmark = pytest.mark.engine


def test_the_import_is_silent():
    program = "from omni_trio.engines.vllm._frontends import _compat_module; _compat_module()"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
