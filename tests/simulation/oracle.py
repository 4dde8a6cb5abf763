"""What each request must get: one token at a time, on the whole history."""

from __future__ import annotations

from functools import cache

import torch

from pdmesh.engine.request import finish_reason
from pdmesh.engine.sampling.sampler import Sampler, SampleRow
from pdmesh.sampling_params import SamplingParams
from tests.simulation.engine import CONFIG, checksum_after, logits_of
from tests.simulation.scenario import Ask

EOS = frozenset({300})


@cache
def answer(ask: Ask, choice: int) -> tuple[int, ...]:
    """Return the tokens of one choice."""
    prompt = ask.prompt
    params = SamplingParams(max_tokens=ask.max_tokens, seed=ask.seed, temperature=ask.temperature, ignore_eos=ask.ignores_eos)
    checksum, output = 0, list[int]()
    for token_id in prompt:
        checksum = checksum_after(checksum, token_id)
    while True:
        row = SampleRow(params, choice, len(output), prompt, tuple(output), EOS)
        logits = torch.from_numpy(logits_of(checksum, len(prompt) + len(output)))[None]
        [drawn] = Sampler().sample(logits, [row])
        output.append(drawn.token_id)
        checksum = checksum_after(checksum, drawn.token_id)
        context = CONFIG["max_position_embeddings"]
        assert isinstance(context, int)
        if finish_reason(params, prompt_length=len(prompt), output=output, eos_token_ids=EOS, max_context=context) is not None:
            return tuple(output)
