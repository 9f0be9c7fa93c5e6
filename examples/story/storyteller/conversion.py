"""From the GGUF file of a Llama model to a folder that vLLM loads: weights, config and tokenizer."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from gguf import GGUFReader
from gguf.quants import dequantize
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

__all__ = ["WEIGHTS", "convert", "halves_from_pairs"]

WEIGHTS = "model.safetensors"

# What llama.cpp calls a layer's tensors, and what transformers does.
LAYER_NAMES: Mapping[str, str] = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
OTHER_NAMES: Mapping[str, str] = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}

CONTROL_TOKEN = 3  # a GGUF token type: never made from text, never shown


def convert(source: Path, folder: Path) -> None:
    """Write weights (bfloat16), config and tokenizer of the GGUF file `source` into `folder`, which exists.

    Raises:
        ValueError: `source` is not a Llama model with a byte-level BPE vocabulary.
    """
    reader = GGUFReader(source)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    if (fields["general.architecture"], fields["tokenizer.ggml.model"]) != ("llama", "gpt2"):
        raise ValueError(f"{source} is not a Llama model with a byte-level BPE vocabulary")
    names = {tensor.name for tensor in reader.tensors}
    config = _config(fields, tied="output.weight" not in names)
    weights = {
        name: torch.from_numpy(array).to(torch.bfloat16)
        for name, array in _weights(reader, config["num_attention_heads"], config["num_key_value_heads"])
    }
    _write_tokenizer(fields, folder)
    _write_json(folder / "config.json", config)
    _write_json(
        folder / "generation_config.json",
        {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")},
    )
    save_file(weights, folder / WEIGHTS, metadata={"format": "pt"})


def _config(fields: Mapping[str, Any], *, tied: bool) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "torch_dtype": "bfloat16",
        "vocab_size": len(fields["tokenizer.ggml.tokens"]),
        "hidden_size": fields["llama.embedding_length"],
        "intermediate_size": fields["llama.feed_forward_length"],
        "num_hidden_layers": fields["llama.block_count"],
        "num_attention_heads": fields["llama.attention.head_count"],
        "num_key_value_heads": fields["llama.attention.head_count_kv"],
        "max_position_embeddings": fields["llama.context_length"],
        "rms_norm_eps": round(float(fields["llama.attention.layer_norm_rms_epsilon"]), 12),
        "rope_theta": float(fields["llama.rope.freq_base"]),
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": tied,
        "bos_token_id": fields["tokenizer.ggml.bos_token_id"],
        "eos_token_id": fields["tokenizer.ggml.eos_token_id"],
        "pad_token_id": fields["tokenizer.ggml.padding_token_id"],
    }


def _weights(reader: Any, heads: int, kv_heads: int) -> Iterator[tuple[str, npt.NDArray[np.float32]]]:
    for tensor in reader.tensors:
        array = dequantize(tensor.data, tensor.tensor_type).astype(np.float32, copy=False)
        stem = tensor.name.removesuffix(".weight")
        if stem in OTHER_NAMES:
            yield f"{OTHER_NAMES[stem]}.weight", np.array(array)  # a copy: the file is mapped read-only
            continue
        _, layer, part = stem.split(".")
        if part in ("attn_q", "attn_k"):
            array = halves_from_pairs(array, heads if part == "attn_q" else kv_heads)
        yield f"model.layers.{layer}.{LAYER_NAMES[part]}.weight", np.array(array)


def halves_from_pairs(rows: npt.NDArray[np.float32], heads: int) -> npt.NDArray[np.float32]:
    """Reorder the rows of a query or key projection from llama.cpp's rotary order to that of transformers.

    llama.cpp turns neighbouring rows of a head together, transformers a row of the first half with its
    counterpart in the second.

    Args:
        rows: shape [heads * width, hidden].
        heads: number of heads that the rows belong to.
    """
    pairs = rows.reshape(heads, -1, 2, rows.shape[1])
    return pairs.transpose(0, 2, 1, 3).reshape(rows.shape)


def _write_tokenizer(fields: Mapping[str, Any], folder: Path) -> None:
    tokens: list[str] = fields["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    # What the vocabulary's "smollm" pre-tokenizer stands for: each digit alone, then the words of GPT-2.
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    kinds = zip(tokens, fields["tokenizer.ggml.token_type"], strict=True)
    tokenizer.add_special_tokens(
        [AddedToken(token, normalized=False, special=True) for token, kind in kinds if kind == CONTROL_TOKEN]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    _write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": tokens[fields["tokenizer.ggml.bos_token_id"]],
            "eos_token": tokens[fields["tokenizer.ggml.eos_token_id"]],
            "pad_token": tokens[fields["tokenizer.ggml.padding_token_id"]],
            "unk_token": tokens[fields["tokenizer.ggml.unknown_token_id"]],
            "clean_up_tokenization_spaces": False,
            "model_max_length": fields["llama.context_length"],
            "chat_template": fields["tokenizer.chat_template"],
        },
    )


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
