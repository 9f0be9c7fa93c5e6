"""Train the language model of this example, in about half a minute: ``python make_planner.py [FOLDER]``."""

from __future__ import annotations

import os
import random
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from picture_plan import COLOURS, NOTHING, PLAN_LENGTH, SHAPES, VOCABULARY, plan_of

DEFAULT_FOLDER = Path(__file__).resolve().parents[2] / ".cache" / "omni-trio" / "diffusion"
STEPS = 200
BATCH = 128
LONGEST = 12

__all__ = ["make_planner", "prompts"]


def prompts(dice: random.Random) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Make prompts without end, each with its plan.

    Shape, colour and ground may each be missing; words that mean nothing are strewn in.
    """
    while True:
        shape = dice.choice((None, *SHAPES))
        colour = dice.choice((None, *COLOURS))
        ground = dice.choice((None, *COLOURS))
        figure = [word for word in (colour, shape) if word]
        if dice.random() < 0.3:
            figure.reverse()  # "a circle, red"
        words = [*figure, *(("on", ground) if ground else ())] or [NOTHING]
        for _ in range(dice.randrange(LONGEST - len(words))):
            words.insert(dice.randrange(len(words) + 1), "?")
        yield " ".join(words), plan_of(shape, colour, ground)


def make_planner(folder: Path = DEFAULT_FOLDER) -> Path:
    """Make the planner in ``folder/planner``, unless it is there; returns `folder`.

    Raises:
        RuntimeError: it did not learn its task.
    """
    planner = folder / "planner"
    if planner.exists():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(prefix=".planner-", dir=folder))
    try:
        _train(unfinished)
        unfinished.chmod(0o755)  # mkdtemp's is for its owner alone
        try:
            os.rename(unfinished, planner)  # noqa: PTH104 - at once or not at all
        except OSError:
            if not planner.exists():  # somebody else was quicker
                raise
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return folder


def _train(folder: Path) -> None:
    import torch  # noqa: PLC0415 - takes seconds, which a planner that is there need not cost
    from transformers import LlamaConfig, LlamaForCausalLM  # noqa: PLC0415 - as above

    tokenizer = _tokenizer()
    config = LlamaConfig(
        vocab_size=len(VOCABULARY),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        bos_token_id=None,
        eos_token_id=VOCABULARY["<end>"],
        pad_token_id=VOCABULARY["<end>"],
        tie_word_embeddings=False,
    )
    source = prompts(random.Random(0))

    def batch() -> tuple[torch.Tensor, torch.Tensor]:
        """Prompts with their plans, padded on the right; and where in each the plan begins."""
        rows, starts = [], []
        for _ in range(BATCH):
            text, plan = next(source)
            tokens = tokenizer.encode(text)
            starts.append(len(tokens))
            padding = LONGEST - len(tokens)
            rows.append([*tokens, *plan, *[VOCABULARY["<end>"]] * padding])
        return torch.tensor(rows), torch.tensor(starts)

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = LlamaForCausalLM(config)
        optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=STEPS)
        right = torch.zeros(())
        for _ in range(STEPS):
            tokens, starts = batch()
            # The token before each of the plan's says it.
            places = starts[:, None] + torch.arange(PLAN_LENGTH) - 1
            said = model(tokens).logits.gather(1, places[..., None].expand(-1, -1, len(VOCABULARY)))
            meant = tokens.gather(1, places + 1)
            loss = torch.nn.functional.cross_entropy(said.flatten(0, 1), meant.flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            right = 0.9 * right + 0.1 * (said.argmax(-1) == meant).float().mean()
    if right < 0.99:
        raise RuntimeError(f"the planner has not learned its task: {right:.1%} of its tokens are right")
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _tokenizer():  # noqa: ANN202 - its class is imported here
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers  # noqa: PLC0415 - as above
    from transformers import PreTrainedTokenizerFast  # noqa: PLC0415 - as above

    words = Tokenizer(models.WordLevel(VOCABULARY, unk_token="<unk>"))
    words.normalizer = normalizers.Lowercase()
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>", eos_token="<end>")


if __name__ == "__main__":
    print(make_planner(Path(sys.argv[1]) if len(sys.argv) > 1 else DEFAULT_FOLDER))
