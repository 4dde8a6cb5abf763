"""The oracle: `transformers` in fp32, one prompt at a time, greedy."""

from collections.abc import Sequence
from pathlib import Path

import torch


def greedy(folder: Path, prompts: Sequence[Sequence[int]], num_tokens: int) -> list[list[int]]:
    """Token ids that `generate` appends to each prompt: `num_tokens`, fewer after an end of sequence (included)."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    outputs = []
    with torch.inference_mode():
        for prompt in prompts:
            ids = torch.tensor([list(prompt)])
            out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=num_tokens, do_sample=False)
            outputs.append(out[0, len(prompt) :].tolist())
    return outputs
