"""What travels: inputs and requests towards a stage, outputs from it, events to the user.

These are `msgspec` structs rather than attrs classes, for two reasons: one of them is made per token and
request (a struct is made several times faster than a frozen attrs instance), and the same classes are what
worker processes exchange with us on the wire. All are frozen: an object handed to one request or stage is
never changed by another (I14). Most are not tracked by the garbage collector (``gc=False``): none of them can be part
of a cycle by itself, and there is one per token.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal, TypeAlias

import msgspec

__all__ = [
    "FinishReason",
    "KvTransfer",
    "Modality",
    "Output",
    "Progress",
    "Prompt",
    "StageInput",
    "StageMetrics",
    "StageOutput",
    "StageRequest",
    "TraceEvent",
]

Modality: TypeAlias = Literal["text", "tokens", "audio", "image", "video", "embedding", "latent", "data"]
"""What a final output is: names the field of `Output` that `Output.delta` returns."""

FinishReason: TypeAlias = str
"""Why a stage ended with a request: ``stop``, ``length``, ``abort``, ``error`` or a stage's own word."""


class StageInput(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What one stage gets to work on: the user's prompt, or what a bridge made of the previous stage's output.

    Exactly one of `text`, `token_ids`, `messages` and `embeds` says what to work on, except for worker stages,
    which may be given `data` alone or any mixture.
    """

    text: str | None = None
    """A prompt in words; the stage tokenizes it."""
    token_ids: tuple[int, ...] | None = None
    """A prompt in token ids of the receiving stage's vocabulary."""
    messages: tuple[Mapping[str, Any], ...] | None = None
    """A conversation for the stage's chat template: mappings with ``role`` and ``content``."""
    embeds: Any = None
    """Prompt embeddings: an array or tensor of shape [tokens, hidden]."""
    data: Mapping[str, Any] = {}
    """Everything else by name: multimodal data, arrays, numbers, strings."""
    batch: tuple[StageInput, ...] | None = None
    """diffusion stages: several inputs that are worked on as one request and give one combined output."""


Prompt: TypeAlias = str | Sequence[int] | Sequence[str] | Sequence[StageInput] | StageInput
"""What a caller may hand in as a prompt: words, token ids, or a `StageInput` for all else. A sequence of words or of
`StageInput` is a batch, for pipelines whose first stage is of kind ``diffusion``."""


class KvTransfer(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """What one half of a prefill/decode pair has to know of the other. Keys of `params` are those of vLLM."""

    role: Literal["prefill", "decode"]
    transfer_id: str
    """Names the transfer: the same for both halves."""
    params: Mapping[str, Any] | None = None
    """decode: the ``kv_transfer_params`` that the prefill ended with. None where the connector finds the KV cache by
    its content."""


class StageRequest(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One request as one stage sees it: a new one (`StageClient.submit`) or more input (`StageClient.update`)."""

    request_id: str
    """The runtime's internal id: unique over the life of the runtime, never reused."""
    input: StageInput
    params: Any = None
    """What `StageClient.resolve_params` returned for this request: sampling, pooling or worker parameters."""
    last: bool = True
    """False while more input of this request will follow as updates."""
    segment_end: bool = False
    """Whether this input completes a segment of a session: once all input so far is worked off, the stage answers
    with an output whose own `segment_end` is set (or with its last output, if this was the `last` input)."""
    want_text: bool = True
    """False where nobody reads the stage's text, so that it need not be detokenized."""
    priority: int = 0
    """Lower is sooner, as in vLLM."""
    deadline: float = math.inf
    """Absolute time on trio's clock after which the result is of no use."""
    kv_transfer: KvTransfer | None = None
    """Set for the stages of a prefill/decode pair."""
    kv_senders: Mapping[str, Mapping[str, Any]] = {}
    """By stage name: where a stage that feeds this one offers the request's KV cache (`SendsKv.kv_sender_info`)."""


class StageOutput(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """What one stage produced for one request in one step: always a delta, never a repetition."""

    request_id: str
    index: int = 0
    """Which of several completions (``n`` of the sampling params) this belongs to."""
    token_ids: Sequence[int] = ()
    text: str = ""
    data: Mapping[str, Any] | None = None
    """Arrays and other values by name (see `omni_trio.merging` for how successive ones add up)."""
    finish_reason: FinishReason | None = None
    """Set on the last output of this request at this stage, and only there."""
    completion_finish_reason: FinishReason | None = None
    """Set on the last output of the completion `index`, where other completions of the request go on."""
    segment_end: bool = False
    """All input so far is worked off: a segment of a session has ended, the request has not."""
    progress: tuple[int, int] | None = None
    """Steps done and steps in all, from stages that work in steps (denoising)."""
    stop_reason: int | str | None = None
    error: str | None = None
    """What went wrong, in words; implies that the stage has ended with the request."""
    prompt_tokens: int = 0
    """Length of the prompt in tokens; 0 where this output does not tell."""
    cached_tokens: int = 0
    kv_transfer_params: Mapping[str, Any] | None = None
    """What the next stage needs to get at the request's KV cache; with a true ``kv_ready`` it tells that the cache can
    be had already, while the stage goes on."""
    logprobs: Any = None

    @property
    def finished(self) -> bool:
        """Whether the stage has ended with this request."""
        return self.finish_reason is not None or self.error is not None

    @property
    def kv_ready(self) -> bool:
        """Whether this tells that the KV cache can be had, though the stage has not ended with the request."""
        params = self.kv_transfer_params
        return params is not None and bool(params.get("kv_ready"))


class StageMetrics(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """What one stage's work on one request cost. All durations in milliseconds of a monotonic clock.

    As an event in a request's stream it tells that a stage whose outputs are not final has finished.
    """

    delta: ClassVar[None] = None
    """Nothing: lets a loop over events read ``event.delta`` without asking for the event's type."""

    request_id: str
    stage: str
    stage_id: int
    replica_id: int
    num_tokens_in: int
    """Tokens of the prompt; the seed counts them at stage 0 only, we do at each stage that knows."""
    num_tokens_out: int
    num_cached_tokens: int
    stage_gen_time_ms: float
    """From the submission to this stage until its last output."""
    time_to_first_output_ms: float
    """From the submission to this stage until its first non-empty output; 0 if there was none."""
    inter_output_latency_ms: float
    """Mean time between successive outputs; 0 with fewer than two."""
    num_outputs: int
    batch_id: int
    """Counts the requests finished by this replica, from 1."""
    batch_size: int
    output_unit_type: str
    """``text``, ``audio``, ...: what `output_unit_count` counts (frames for audio, else tokens or items)."""
    output_unit_count: int
    audio_sample_rate: int
    """Hz; 0 where the output is not audio."""
    audio_duration_s: float
    replica_total_tokens: int
    """Running sum of `num_tokens_out` for the replica."""
    replica_total_gen_time_ms: float
    """Running sum of `stage_gen_time_ms` for the replica."""
    queue_wait_ms: float
    """From the call of `Runtime.request` until the submission to the first stage began."""
    preprocess_ms: float
    """What submitting to this stage took: tokenizing, encoding, sending."""
    bridge_ms: float
    """What the bridge in front of this stage took, waits included; 0 at a stage without one."""

    @property
    def tokens_per_s(self) -> float:
        """Output tokens per second of this stage for this request; 0 where it took no time."""
        return self.num_tokens_out * 1000 / self.stage_gen_time_ms if self.stage_gen_time_ms > 0 else 0.0

    @property
    def replica_tokens_per_s(self) -> float:
        """Output tokens per second of work of the replica so far; 0 where it has done none."""
        total = self.replica_total_gen_time_ms
        return self.replica_total_tokens * 1000 / total if total > 0 else 0.0

    @property
    def audio_rtf(self) -> float:
        """Seconds of work per second of audio; 0 where the output is not audio."""
        return self.stage_gen_time_ms / 1000 / self.audio_duration_s if self.audio_duration_s > 0 else 0.0


class Output(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """What a final-output stage produced since the previous event of that stage: a delta.

    A consumer that is slower than the stage gets fewer, larger deltas: they are merged, never lost.
    """

    request_id: str
    stage: str
    stage_id: int
    replica_id: int
    modality: Modality
    index: int = 0
    """Which of several completions (``n`` of the sampling params) this belongs to."""
    turn: int = 0
    """In a session: counts the caller's barge-ins."""
    segment: int = 0
    """In a session: which of the turn's segments this answers, from 0."""
    token_ids: Sequence[int] = ()
    text: str = ""
    data: Mapping[str, Any] = {}
    segment_end: bool = False
    """In a session: whether the stage has worked off the segment."""
    finished: bool = False
    """True on the last output of this stage for this request; other stages may still be at work."""
    finish_reason: FinishReason | None = None
    """Why the stage, or the completion `index`, ended."""
    stop_reason: int | str | None = None
    logprobs: Any = None
    metrics: StageMetrics | None = None
    """Set when `finished`."""

    @property
    def delta(self) -> Any:
        """What is new, in the stage's modality: text, token ids, or the value in `data` named as the modality."""
        if self.modality == "text":
            return self.text
        if self.modality == "tokens":
            return self.token_ids
        if self.modality == "data":
            return self.data
        return self.data.get(self.modality)


class Progress(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """How far a stage that works in steps has come with a request. Only the newest one waits for a slow consumer."""

    delta: ClassVar[None] = None
    """Nothing: lets a loop over events read ``event.delta`` without asking for the event's type."""

    request_id: str
    stage: str
    stage_id: int
    replica_id: int
    step: int
    """Steps done."""
    total: int
    """Steps in all."""


class TraceEvent(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One thing that happened, for instruments: timeline, trace file, progress bar, test.

    Names come in families: ``runtime.*``, ``replica.*`` (life of a replica), ``request.*`` (life of a request),
    ``leg.*`` (a request at one stage), ``bridge.*``.
    """

    time: float
    """trio's clock, in seconds."""
    name: str
    request_id: str | None = None
    stage: str | None = None
    stage_id: int | None = None
    replica_id: int | None = None
    detail: str = ""
    """The phase, the reason, the error's text: whatever the name asks for."""
    value: float = 0.0
    """A count or a size, where the name asks for one."""
