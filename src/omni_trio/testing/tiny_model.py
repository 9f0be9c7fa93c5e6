"""A language model of a few hundred kilobytes, made on the spot: for tests, demos and examples without downloads.

It is a Qwen2 with random weights and a byte-level tokenizer, so every text can be tokenized and every token
below 256 is one byte. What it writes is nonsense, but it is the same nonsense each time for one seed.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from pathlib import Path

__all__ = ["EOS_TOKEN_ID", "make_tiny_model"]

EOS_TOKEN_ID = 256
"""The id of ``<|end|>``; the ids below it are the 256 bytes, those above are never made by the tokenizer."""

_CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)

_END = "<|end|>"
_MARK = "tiny_model.json"


def make_tiny_model(
    directory: Path,
    *,
    vocab_size: int = 320,
    hidden_size: int = 128,
    layers: int = 2,
    context: int = 4096,
    seed: int = 0,
) -> Path:
    """Make a tiny model in `directory`, unless the same one is already there.

    Needs torch and transformers, which come with vLLM.

    Args:
        directory: where config, weights and tokenizer go; made if missing. The model appears there as a whole
            or not at all, so several processes may make it at once.
        vocab_size: number of token ids, at least 257; two models that exchange tokens need the same.
        hidden_size: width of the model, a multiple of 32: the last dimension of prompt embeddings.
        layers: number of transformer layers.
        context: longest prompt and answer together, in tokens.
        seed: decides the weights: models with different seeds say different things.

    Returns:
        The directory, as vLLM takes it for a model's path.

    Raises:
        ValueError: a size that can not be; or another model is in the directory.
    """
    if vocab_size <= EOS_TOKEN_ID:
        raise ValueError(f"vocab_size must be above {EOS_TOKEN_ID} (256 bytes and the end token), not {vocab_size}")
    if hidden_size < 32 or hidden_size % 32:
        raise ValueError(f"hidden_size must be a multiple of 32 (4 heads of an even width), not {hidden_size}")
    recipe = {
        "vocab_size": vocab_size,
        "hidden_size": hidden_size,
        "layers": layers,
        "context": context,
        "seed": seed,
    }
    if (present := _recipe_in(directory)) is not None:
        if present != recipe:
            raise ValueError(f"{directory} holds another tiny model, made from {present}; use another directory")
        return directory
    if directory.is_dir() and any(directory.iterdir()):
        raise ValueError(f"{directory} is not empty and holds no tiny model; use another directory")
    directory.parent.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(prefix=f".{directory.name}-", dir=directory.parent))
    try:
        _save_weights(unfinished, recipe)
        _save_tokenizer(unfinished)
        unfinished.chmod(0o755)  # mkdtemp's is for its owner alone
        (unfinished / _MARK).write_text(json.dumps(recipe), encoding="utf-8")
        try:
            os.replace(unfinished, directory)  # noqa: PTH105 - replaces an empty directory, which rename may not
        except OSError:
            # Somebody else was quicker; theirs is as good as ours if it is made from the same recipe.
            if _recipe_in(directory) != recipe:
                raise
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return directory


def _recipe_in(directory: Path) -> dict[str, int] | None:
    try:
        recipe: dict[str, int] = json.loads((directory / _MARK).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    return recipe


def _save_weights(directory: Path, recipe: dict[str, int]) -> None:
    import torch  # noqa: PLC0415 - optional, and heavy
    from transformers import Qwen2Config, Qwen2ForCausalLM  # noqa: PLC0415 - optional, and heavy

    config = Qwen2Config(
        vocab_size=recipe["vocab_size"],
        hidden_size=recipe["hidden_size"],
        intermediate_size=2 * recipe["hidden_size"],
        num_hidden_layers=recipe["layers"],
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=recipe["context"],
        bos_token_id=None,
        eos_token_id=EOS_TOKEN_ID,
        # Far above the usual 0.02, with which a random model says one token for ever.
        initializer_range=0.25,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(recipe["seed"])
        model = Qwen2ForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(directory, safe_serialization=True)


def _save_tokenizer(directory: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers  # noqa: PLC0415 - optional
    from transformers import PreTrainedTokenizerFast  # noqa: PLC0415 - optional, and heavy

    vocabulary = {symbol: index for index, symbol in enumerate(_byte_symbols())}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([_END])
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, clean_up_tokenization_spaces=False)
    wrapped.eos_token = _END
    wrapped.chat_template = _CHAT_TEMPLATE
    wrapped.save_pretrained(directory)


def _byte_symbols() -> list[str]:
    """Return, for each byte, the printable character by which byte-level BPE writes it."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    symbols = []
    stand_ins = 0
    for byte in range(256):
        if byte in printable:
            symbols.append(chr(byte))
        else:
            symbols.append(chr(256 + stand_ins))
            stand_ins += 1
    return symbols
