"""transformers' own Llama of the same shape with random weights, and its two ways to generate fast. Nothing stops early."""

from __future__ import annotations

import importlib
import inspect
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.gpu.context import wall_s

_OURS_ALONE = ("model_type", "dtype", "rope_theta")


def make_peer(values: Mapping[str, object], device: str, dtype: torch.dtype) -> Any:
    """A LlamaForCausalLM made on the device."""
    transformers = importlib.import_module("transformers")
    fields = {name: value for name, value in values.items() if name not in _OURS_ALONE}
    rope = {"rope_type": "default", "rope_theta": values["rope_theta"]}
    config = transformers.LlamaConfig(**fields, rope_parameters=rope)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            model = transformers.LlamaForCausalLM(config).eval()
    finally:
        torch.set_default_dtype(before)
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = None, 0
    return model


def peer_version() -> str:
    return f"transformers {importlib.import_module('transformers').__version__}"


@dataclass(frozen=True)
class Window:
    """Of a run of several sequences: from the time at which all have a token until the last token of all."""

    seconds: float
    num_tokens: int

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.seconds


def window_of(stamps: Sequence[Sequence[float]]) -> Window:
    """From the times of every sequence's tokens. Raises ValueError where there is no time between first tokens and last ones."""
    begin, end = max(times[0] for times in stamps), max(times[-1] for times in stamps)
    if end <= begin:
        raise ValueError("stamps: no token comes after everybody's first one")
    return Window(end - begin, sum(stamp > begin for times in stamps for stamp in times))


def continuous_batching(model: Any, prompts: Sequence[Sequence[int]], output: int) -> Window:
    """Greedy, all prompts at once. Its own clock where it tells the times of tokens, so that its set-up counts for nothing."""
    transformers = importlib.import_module("transformers")
    settings = transformers.GenerationConfig(max_new_tokens=output, do_sample=False, eos_token_id=None, pad_token_id=0)
    wanted = {
        "inputs": [list(p) for p in prompts],
        "generation_config": settings,
        "record_timestamps": True,
        "progress_bar": False,
    }
    if hasattr(transformers, "ContinuousBatchingConfig"):  # half of what is free: the rest is for what else lies on the device
        wanted["continuous_batching_config"] = transformers.ContinuousBatchingConfig(max_memory_percent=0.5)
    known = inspect.signature(model.generate_batch).parameters
    began = time.perf_counter()
    results = model.generate_batch(**{name: value for name, value in wanted.items() if name in known})
    took = time.perf_counter() - began
    found = list(results.values())
    counts = [len(result.generated_tokens) for result in found]
    if counts != [output] * len(prompts):
        raise RuntimeError(f"continuous batching gave {counts} tokens instead of {len(prompts)} times {output}")
    stamps: list[list[float]] = [getattr(result, "timestamps", None) or [] for result in found]
    return window_of(stamps) if all(stamps) else Window(took, sum(counts))


def affordable_output(wanted: int, batch: int, tokens_per_s: float, left_s: float) -> int:
    """Tokens of each sequence: the slower side takes two thirds of the time at most; no less than a tenth of what is wanted."""
    return max(wanted // 10, 2, min(wanted, int(left_s * 2 / 3 * tokens_per_s / batch)))


def static_step_s(model: Any, prompt: Sequence[int], device: str, *, short: int, output: int) -> float:
    """Seconds of a step of `generate` with a static cache, which compiles itself on a GPU: a long run less a short one.

    Both have the same cache, so that one compilation serves both: the short one is stopped by a criterion."""
    ids = torch.tensor([list(prompt)], device=device)

    def generate(count: int) -> None:
        def is_over(tokens: torch.Tensor, _scores: object, **_: object) -> torch.Tensor:
            return torch.full((len(tokens),), tokens.shape[1] >= len(prompt) + count, device=tokens.device)

        options = {"max_new_tokens": output, "do_sample": False, "cache_implementation": "static", "stopping_criteria": [is_over]}
        found = model.generate(ids, attention_mask=torch.ones_like(ids), **options)
        if found.shape[1] != len(prompt) + count:
            raise RuntimeError(f"generate gave {found.shape[1] - len(prompt)} tokens instead of {count}")

    return (wall_s(lambda: generate(output), device) - wall_s(lambda: generate(short), device)) / (output - short)
