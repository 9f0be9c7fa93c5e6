"""What one request costs at one stage: the running count of a leg, and the record it ends in."""

from __future__ import annotations

import math
from typing import Any

from omni_trio.messages import Modality, StageMetrics, StageOutput

__all__ = ["LegMeter", "ReplicaTotals"]

_RATE_KEYS = ("sample_rate", "audio_sample_rate", "sampling_rate", "sr")


class ReplicaTotals:
    """Sums over all requests that a replica has finished."""

    __slots__ = ("gen_time_ms", "requests", "tokens")

    def __init__(self) -> None:
        self.requests = 0
        self.tokens = 0
        self.gen_time_ms = 0.0


class LegMeter:
    """Counts what a stage gives for one request. Times are seconds of trio's (monotonic) clock."""

    __slots__ = (
        "bridge_s",
        "cached_tokens",
        "first",
        "frames",
        "last",
        "outputs",
        "preprocess_s",
        "prompt_tokens",
        "queue_wait_s",
        "sample_rate",
        "submitted",
        "tokens",
    )

    def __init__(self) -> None:
        self.submitted = 0.0
        self.first = -1.0
        self.last = 0.0
        self.outputs = 0
        self.tokens = 0
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.frames = 0
        self.sample_rate = 0
        self.queue_wait_s = 0.0
        self.preprocess_s = 0.0
        self.bridge_s = 0.0

    def last_sign(self) -> float:
        """When the stage last showed that it is at work."""
        return max(self.last, self.submitted)

    def count(self, output: StageOutput, now: float) -> None:
        """Take note of one output, which arrived at `now`."""
        tokens = len(output.token_ids)
        if tokens or output.text or output.data:
            if self.first < 0:
                self.first = now
            self.last = now
            self.outputs += 1
            self.tokens += tokens
        if output.prompt_tokens:
            self.prompt_tokens = output.prompt_tokens
            self.cached_tokens = output.cached_tokens
        if output.data:
            self._count_audio(output)

    def _count_audio(self, output: StageOutput) -> None:
        data: Any = output.data
        shape = getattr(data.get("audio"), "shape", None)
        if shape:
            self.frames += int(shape[-1])
        for key in _RATE_KEYS:
            rate = data.get(key)
            if isinstance(rate, int | float) and 0 < rate < math.inf:
                self.sample_rate = int(rate)
                break

    def finish(
        self,
        now: float,
        totals: ReplicaTotals,
        *,
        request_id: str,
        stage: str,
        stage_id: int,
        replica_id: int,
        modality: Modality,
    ) -> StageMetrics:
        """Close the count: add it to the replica's sums and return the record."""
        gen_time_ms = max(0.0, now - self.submitted) * 1000
        totals.requests += 1
        totals.tokens += self.tokens
        totals.gen_time_ms += gen_time_ms
        is_audio = self.frames > 0
        return StageMetrics(
            request_id=request_id,
            stage=stage,
            stage_id=stage_id,
            replica_id=replica_id,
            num_tokens_in=self.prompt_tokens,
            num_tokens_out=self.tokens,
            num_cached_tokens=self.cached_tokens,
            stage_gen_time_ms=gen_time_ms,
            time_to_first_output_ms=max(0.0, self.first - self.submitted) * 1000 if self.first >= 0 else 0.0,
            inter_output_latency_ms=(self.last - self.first) * 1000 / (self.outputs - 1) if self.outputs > 1 else 0.0,
            num_outputs=self.outputs,
            batch_id=totals.requests,
            batch_size=1,
            output_unit_type="audio" if is_audio else modality,
            output_unit_count=self.frames if is_audio else self.tokens or self.outputs,
            audio_sample_rate=self.sample_rate if is_audio else 0,
            audio_duration_s=self.frames / self.sample_rate if is_audio and self.sample_rate else 0.0,
            replica_total_tokens=totals.tokens,
            replica_total_gen_time_ms=totals.gen_time_ms,
            queue_wait_ms=self.queue_wait_s * 1000,
            preprocess_ms=self.preprocess_s * 1000,
            bridge_ms=self.bridge_s * 1000,
        )
