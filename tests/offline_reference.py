"""What vLLM's own offline `LLM` makes of prompts, stage after stage: run in a process of its own.

Reads ``{"models": [path, ...], "max_tokens": [n, ...], "prompts": [[id, ...], ...]}`` from stdin and prints, per
model, the token ids and the text of each answer; each model's answers are the next one's prompts.
"""

from __future__ import annotations

import json
import os
import sys

os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
}


def main() -> None:
    from vllm import LLM, SamplingParams

    task = json.load(sys.stdin)
    prompts, answers = task["prompts"], []
    for model, max_tokens in zip(task["models"], task["max_tokens"], strict=True):
        llm = LLM(
            model,
            dtype="bfloat16",
            max_model_len=1024,
            enforce_eager=True,
            kv_cache_memory_bytes=32 << 20,
            disable_log_stats=True,
        )
        params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
        outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
        prompts = [list(output.outputs[0].token_ids) for output in outputs]
        answers.append([prompts, [output.outputs[0].text for output in outputs]])
        del llm
    print("\n" + json.dumps(answers))


if __name__ == "__main__":
    main()
