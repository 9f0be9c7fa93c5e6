"""A vocoder for tokens that mean nothing: each token is a note of 20 ms."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from omni_trio.worker import Reply, Worker, WorkItem

SAMPLE_RATE = 16_000
SAMPLES_PER_TOKEN = 320
PARTIALS = 4

__all__ = ["SAMPLES_PER_TOKEN", "SAMPLE_RATE", "Notes", "Vocoder"]


class Notes(nn.Module):
    """Token ids to sound: per token a pitch and the loudness of four partials, gliding from one to the next.

    The sound does not depend on the pieces in which the tokens come: phase and loudness are carried over.
    """

    def __init__(self, vocabulary: int, *, seed: int = 0) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        # Two octaves, in cycles per sample; the highest partial stays far below half the sample rate.
        octaves = 2 * torch.rand(vocabulary, 1, generator=generator)
        loudness = torch.rand(vocabulary, PARTIALS, generator=generator) / torch.arange(1, PARTIALS + 1)
        self.frequency = nn.Embedding.from_pretrained((220 / SAMPLE_RATE * 2**octaves).double())
        self.loudness = nn.Embedding.from_pretrained(loudness.double())
        self.register_buffer("partials", torch.arange(1, PARTIALS + 1, dtype=torch.double))
        self.register_buffer("glide", torch.arange(1, SAMPLES_PER_TOKEN + 1, dtype=torch.double) / SAMPLES_PER_TOKEN)

    def start(self) -> tuple[Tensor, Tensor]:
        """Return what to carry into the first piece: phase 0, silence."""
        return torch.zeros((), dtype=torch.double), torch.zeros(PARTIALS, dtype=torch.double)

    def forward(self, tokens: Tensor, carried: tuple[Tensor, Tensor]) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Sound one piece.

        Args:
            tokens: ids, shape [tokens], at least one.
            carried: what the piece before returned, or `start`.

        Returns:
            Samples between -1 and 1, float32 of shape [tokens * SAMPLES_PER_TOKEN]; and what to carry on.
        """
        phase, before = carried
        after = self.loudness(tokens)
        from_level = torch.cat((before[None], after[:-1]))
        # [tokens, samples of one token, partials]
        level = from_level[:, None] + (after - from_level)[:, None] * self.glide[:, None]
        steps = self.frequency(tokens).expand(-1, SAMPLES_PER_TOKEN).reshape(-1)
        turns = phase + torch.cumsum(steps, 0)
        waves = torch.sin(2 * torch.pi * turns[:, None] * self.partials)
        samples = (waves * level.reshape(-1, PARTIALS)).sum(-1) / PARTIALS
        return samples.float(), (turns[-1] % 1, after[-1])


class Vocoder(Worker):
    """The stage: carries each request's phase and loudness from piece to piece.

    Args:
        vocabulary: number of token ids; others are taken modulo it.
    """

    def __init__(self, vocabulary: int) -> None:
        torch.set_num_threads(1)
        self._vocabulary = vocabulary
        self._notes = Notes(vocabulary)

    @torch.inference_mode()
    def process(self, batch: Sequence[WorkItem]) -> Iterable[tuple[WorkItem, Reply]]:
        """Answer each piece of tokens with its sound."""
        answers = []
        for item in batch:
            if not item.input.token_ids:
                continue
            tokens = torch.tensor(item.input.token_ids) % self._vocabulary
            samples, item.state["carried"] = self._notes(tokens, item.state.get("carried") or self._notes.start())
            answers.append((item, Reply(data={"audio": samples.numpy(), "sample_rate": SAMPLE_RATE})))
        return answers
