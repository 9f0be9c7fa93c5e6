"""What a user gets by installing the package alone."""

from __future__ import annotations

import importlib.metadata
import inspect
import subprocess
import sys

import omni_trio
from omni_trio import errors


def python(program: str) -> str:
    process = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stderr
    return process.stdout


def test_importing_it_imports_nothing_heavy():
    loaded = python("import sys, omni_trio; print(*sys.modules)").split()
    for heavy in ("torch", "vllm", "transformers", "numpy", "zmq", "rich", "click", "asyncio", "hypothesis"):
        assert heavy not in loaded, heavy


def test_a_pipeline_of_simulated_stages_needs_no_engine_libraries():
    program = (
        "import sys, trio, omni_trio\n"
        "from omni_trio import Pipeline, StageSpec\n"
        "async def main():\n"
        "    async with omni_trio.open_runtime(Pipeline([StageSpec(name='a', kind='simulated')])) as runtime:\n"
        "        print((await runtime.generate('one two')).text)\n"
        "trio.run(main)\n"
        "print(*(name for name in ('torch', 'vllm', 'numpy', 'zmq') if name in sys.modules))\n"
    )
    assert python(program).splitlines() == ["w2 w3 w4 w5 w6 w7 w8 w9 ", ""]


def test_every_public_name_is_there_once_and_documented():
    assert omni_trio.__all__ == sorted(set(omni_trio.__all__))
    for name in omni_trio.__all__:
        assert inspect.getdoc(getattr(omni_trio, name)), name


def test_every_error_is_public():
    for name in errors.__all__:
        assert getattr(omni_trio, name) is getattr(errors, name)


def test_the_version_is_that_of_the_package():
    assert omni_trio.__version__ == importlib.metadata.version("omni-trio")
