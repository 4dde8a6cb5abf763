"""When a choice ends. One pure rule, the same wherever a token was drawn."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from pdmesh.engine.outputs import FinishReason
from pdmesh.engine.sampling_params import SamplingParams


def finish_reason(
    params: SamplingParams, *, prompt_length: int, output: Sequence[int], eos_token_ids: Collection[int], max_context: int
) -> FinishReason | None:
    """Why a choice with this output ends with its last token; None if it goes on. `max_context` counts prompt and output.

    Before `min_tokens` tokens nothing stops a choice (the sampler masks end and stop tokens there) but the context's end.
    """
    if not output:
        return None
    if len(output) > params.min_tokens and stops(params, output[-1], eos_token_ids):
        return FinishReason.STOP
    if len(output) >= params.max_tokens or prompt_length + len(output) >= max_context:
        return FinishReason.LENGTH
    return None


def stops(params: SamplingParams, token_id: int, eos_token_ids: Collection[int]) -> bool:
    """Nothing comes behind this token. (Before `min_tokens` no such token is drawn.)"""
    return token_id in params.stop_token_ids or (not params.ignore_eos and token_id in eos_token_ids)


def end_tokens(params: SamplingParams, eos_token_ids: frozenset[int]) -> frozenset[int]:
    """All tokens that stop a choice."""
    ends = frozenset(params.stop_token_ids)
    return ends if params.ignore_eos else ends | eos_token_ids
