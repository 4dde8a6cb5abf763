"""A request that one engine has prefilled, handed over to another without a network."""

from __future__ import annotations

from pdmesh.engine.engine import Engine
from pdmesh.engine.request import EngineRequest


def hand_over(prefill: Engine, decode: Engine, each: EngineRequest, first_tokens: dict[int, int]) -> None:
    """What `decode` lacks of the KV that `prefill` holds for it; `decode` goes on behind `first_tokens`, by choice."""
    granted = decode.reserve(each)
    assert granted is not None
    skip = granted.num_cached_tokens // decode.config.block_size
    source, target = prefill.held_blocks(each.request_id)[skip:], granted.block_ids[skip:]
    decode.kv.tensor[:, :, list(target)] = prefill.kv.tensor[:, :, list(source)]
    prefill.release(each.request_id)
    decode.start(each.request_id, first_tokens)
