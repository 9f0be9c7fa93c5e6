"""Pipeline files for the tests of the loader."""

from __future__ import annotations

import sys
import textwrap
from pathlib import Path

import pytest

from omni_trio.config import load_pipeline
from omni_trio.errors import ConfigError

STORY = """\
# A story, told aloud.
name = "story"

[[stages]]
name = "thinker"
kind = "llm"
model = "hub/model"
engine_args = { max_model_len = 1024 }
sampling = { temperature = 0.7, max_tokens = 200 }

[[stages]]
name = "speaker"
kind = "simulated"
bridge = "text"
feed = "output"
modality = "audio"
"""

STORY_YAML = """\
# A story, told aloud.
name: story
stages:
  - name: thinker
    kind: llm
    model: hub/model
    engine_args: {max_model_len: 1024}
    sampling:
      temperature: 0.7
      max_tokens: 200
  - name: speaker
    kind: simulated
    bridge: text
    feed: output
    modality: audio
"""

MODES = """\
expand = "near:expand"
bundle_timeout = 5

[[stages]]
name = "thinker"
kind = "llm"
model = "m"
dispatch_timeout = 2

[[stages]]
name = "painter"
kind = "diffusion"
target = "near:Painter"
feed = "kv"

[[stages]]
name = "poet"
kind = "simulated"
feed = "connector"
placeholder = "near:length"
chunk_timeout = 0.5
"""
PAIR = """\
stages:
- name: prefill
  model: m
  role: prefill
  when_empty: skip
  engine_args: {kv_transfer_config: {kv_connector: NixlConnector, kv_role: kv_both}}
- name: decode
  model: m
  role: decode
  handoff: content
  engine_args:
    tensor_parallel_size: 1
    kv_transfer_config:
      kv_connector: NixlConnector
      kv_role: kv_both
"""
NEAR = "def expand(context): return ()\ndef length(prompt): return 1\nclass Painter: pass\n"


@pytest.fixture(autouse=True)
def own_modules(monkeypatch):
    """Each test gets its own sys.path and imports afresh what its files define."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        del sys.modules[name]


def write(folder: Path, text: str, name: str = "pipeline.toml") -> Path:
    path = folder / name
    path.write_text(textwrap.dedent(text), encoding="utf-8")
    return path


def failure(folder: Path, text: str, name: str = "pipeline.toml") -> ConfigError:
    path = write(folder, text, name)
    with pytest.raises(ConfigError) as caught:
        load_pipeline(path)
    assert caught.value.file == str(path)
    return caught.value
