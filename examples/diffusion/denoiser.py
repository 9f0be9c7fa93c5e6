"""The denoiser: for a small world of pictures, the best one that there can be."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import product

import torch
from picture_plan import COLOURS, SHAPES, read_plan
from torch import Tensor, nn

from omni_trio.worker import DiffusionWorker, Sample

SIDE = 32
"""Pixels along a side of the model's pictures."""

ENLARGE = 8
"""Pixels of the image that goes out, along a side of each of the model's."""

NOISIEST, CLEANEST = 100.0, 0.05
"""Standard deviation of the noise at the first and at the last step; colours go from -1 to 1."""

PALETTE = {
    "red": (0.9, -0.8, -0.8),
    "green": (-0.8, 0.6, -0.7),
    "blue": (-0.8, -0.5, 0.9),
    "yellow": (1.0, 0.8, -0.8),
    "white": (1.0, 1.0, 1.0),
    "black": (-1.0, -1.0, -1.0),
}

__all__ = ["ENLARGE", "SIDE", "Denoiser", "Pictures"]


class Pictures(nn.Module):
    """The exact denoiser of a world of pictures: one shape of one colour, somewhere on a ground of another.

    Given a picture with noise added, the guess with the least squared error is the mean of all pictures of this
    world, each weighted by how probable it makes what is seen. A trained network comes near such a function; where
    the world is this small it can be written down. Going down the noise along these guesses, as any sampler of a
    diffusion model does, ends at one picture, and the seed decides which.
    """

    masks: Tensor
    """Figures: float32 of 0 and 1, shape [figures, pixels]."""
    shapes: Tensor
    """Which of `SHAPES` each figure is, shape [figures]."""
    palette: Tensor
    """Colours, shape [colours, 3]."""

    def __init__(self) -> None:
        super().__init__()
        figures = list(_figures())
        self.register_buffer("masks", torch.stack([mask.flatten() for _, mask in figures]).float())
        self.register_buffer("shapes", torch.tensor([shape for shape, _ in figures]))
        self.register_buffer("palette", torch.tensor([PALETTE[colour] for colour in COLOURS]))

    def allowed(self, plan: tuple[int, ...]) -> Tensor:
        """Return the logarithm of each picture's weight under a plan: 0 or -inf, shape [figures, colours, colours]."""
        shape, colour, ground = read_plan(plan)
        count = len(self.palette)
        keep = torch.ones(len(self.masks), count, count, dtype=torch.bool)
        keep &= ~torch.eye(count, dtype=torch.bool)  # what has its ground's colour can not be seen
        if shape is not None:
            keep &= (self.shapes == shape)[:, None, None]
        if colour is not None:
            keep &= (torch.arange(count) == colour)[None, :, None]
        if ground is not None:
            keep &= (torch.arange(count) == ground)[None, None, :]
        if not keep.any():
            raise ValueError(f"there is no such picture: {COLOURS[ground or 0]} on {COLOURS[ground or 0]}")
        return torch.zeros(keep.shape).masked_fill(~keep, -torch.inf)

    def forward(self, noisy: Tensor, sigma: float, allowed: Tensor) -> Tensor:
        """Guess what picture is under the noise.

        Args:
            noisy: shape [pixels, 3].
            sigma: standard deviation of the noise in each number.
            allowed: from `allowed`, for several plans at once: [plans, figures, colours, colours].

        Returns:
            One guess per plan, shape [plans, pixels, 3].
        """
        # How far each pixel is from each colour, and so each picture from what is seen.
        distance = (noisy[:, None] - self.palette).square().sum(-1)
        as_figure, as_ground = self.masks @ distance, (1 - self.masks) @ distance
        evidence = -(as_figure[:, :, None] + as_ground[:, None, :]) / (2 * sigma**2)
        weights = torch.softmax((evidence + allowed).flatten(1), -1).view(allowed.shape)
        figure = torch.einsum("fp,qfc,ck->qpk", self.masks, weights.sum(3), self.palette)
        ground = torch.einsum("fp,qfc,ck->qpk", 1 - self.masks, weights.sum(2), self.palette)
        return figure + ground


def _figures() -> Iterator[tuple[int, Tensor]]:
    """All figures: which of `SHAPES`, and a mask of shape [SIDE, SIDE]."""
    line = torch.arange(SIDE) + 0.5
    for radius, down, right in product((6, 8, 10), range(12, 22, 2), range(12, 22, 2)):
        y, x = (line[:, None] - down).expand(SIDE, SIDE), (line - right).expand(SIDE, SIDE)
        farther, nearer = torch.maximum(x.abs(), y.abs()), torch.minimum(x.abs(), y.abs())
        yield SHAPES.index("circle"), x.square() + y.square() < radius**2
        yield SHAPES.index("square"), farther < 0.85 * radius
        yield SHAPES.index("triangle"), (y.abs() < radius) & (2 * x.abs() < y + radius)
        yield SHAPES.index("cross"), (farther < radius) & (nearer < radius / 3)


class _State:
    """A picture in the making. Never changed."""

    def __init__(self, noisy: Tensor, allowed: Tensor, pull: Tensor) -> None:
        self.noisy = noisy
        """[pixels, 3]."""
        self.allowed = allowed
        """See `Pictures.forward`: the prompt's own plan first, then those that it is compared with."""
        self.pull = pull
        """How far to go beyond each of these, shape [plans - 1]."""


class Denoiser(DiffusionWorker):
    """The stage: a plan in, an image out.

    Its input has the plan in `token_ids`, and in `data` under ``cfg_text`` and ``cfg_img`` what the plan would be
    without the prompt's figure, or ground. Parameters: ``guidance_scale`` and ``guidance_scale_img`` say how far to go
    from those towards the plan and beyond; 1 is not beyond.

    Args:
        threads: how many torch may use.
    """

    max_batch_size = 8
    default_steps = 20

    def __init__(self, threads: int = 1) -> None:
        torch.set_num_threads(threads)
        self._pictures = Pictures()

    @torch.inference_mode()
    def prepare(self, sample: Sample) -> _State:
        """Draw noise, and look up what the plan allows."""
        plans, pull = [tuple(sample.input.token_ids or ())], []
        for role, name in (("cfg_text", "guidance_scale"), ("cfg_img", "guidance_scale_img")):
            if (plan := sample.input.data.get(role)) is not None:
                plans.append(tuple(int(token) for token in plan))
                pull.append(_number(sample.params, name, 1.5) - 1)
        noise = torch.randn(SIDE * SIDE, 3, generator=torch.Generator().manual_seed(sample.seed))
        allowed = torch.stack([self._pictures.allowed(plan) for plan in plans])
        return _State(NOISIEST * noise, allowed, torch.tensor(pull))

    @torch.inference_mode()
    def step(self, samples: Sequence[Sample]) -> list[_State]:
        """Go down to the next level of noise, for each sample along its own guess."""
        # One by one: in a product of larger matrices the same numbers may be added up in another order, and then a
        # seed would not always make the same image to the last bit.
        return [self._step(sample.state, sample.step, sample.steps) for sample in samples]

    def _step(self, state: _State, step: int, steps: int) -> _State:
        sigma = _sigma(step, steps)
        guess, *others = self._pictures(state.noisy, sigma, state.allowed)
        guided = guess + sum(pull * (guess - other) for pull, other in zip(state.pull, others, strict=True))
        after = 0.0 if step + 1 == steps else _sigma(step + 1, steps)
        noisy = guided + (after / sigma) * (state.noisy - guided)
        return _State(noisy, state.allowed, state.pull)

    def finish(self, sample: Sample) -> Mapping[str, object]:
        """Make an image of it: uint8 of shape [height, width, 3]."""
        small = (sample.state.noisy.view(SIDE, SIDE, 3).clamp(-1, 1) + 1) * 127.5
        image = small.round().to(torch.uint8).repeat_interleave(ENLARGE, 0).repeat_interleave(ENLARGE, 1)
        return {"image": image.numpy(), "seed": sample.seed}


def _sigma(step: int, steps: int) -> float:
    """Return the noise before a step: evenly spaced in its logarithm."""
    return float(NOISIEST * (CLEANEST / NOISIEST) ** (step / max(1, steps - 1)))


def _number(params: Mapping[str, object], name: str, default: float) -> float:
    value = params.get(name)
    if value is None:
        return default
    if not isinstance(value, int | float):
        raise TypeError(f"{name} must be a number, not {value!r}")
    return float(value)
