"""An engine of two ranks with a pool each, and the way to and from their pools."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from torch import Tensor

from pdmesh.engine.config import EngineConfig
from pdmesh.engine.engine import Engine
from pdmesh.engine.kv_cache.copies import Piece
from pdmesh.engine.kv_cache.staging import Marks, Staging, StagingSizes
from pdmesh.engine.kv_cache.streams import streams_of
from pdmesh.engine.parallel.model import ParallelModel
from pdmesh.engine.parallel.staging import RanksCopies, stage_ranks
from pdmesh.engine.request import EngineRequest
from pdmesh.sampling_params import SamplingParams
from tests.engine.parallel.conftest import running
from tests.support.mock_engine import run_to_end


@dataclass
class Staged:
    engine: Engine
    model: ParallelModel
    marks: Marks
    staging: Staging

    def taken(self) -> Piece:
        piece = self.staging.take()
        assert piece is not None
        return piece

    def numbers(self, piece: Piece, num_layers: int, num_blocks: int) -> Tensor:
        """What it holds: [layers, 2, blocks, block_size, all heads, head_dim], a view."""
        own, heads = self.engine.kv.shape, self.engine.model_config.num_kv_heads
        size = self.staging.num_bytes(range(num_layers), num_blocks)
        return piece.host[:size].view(own.dtype).view(num_layers, 2, num_blocks, own.block_size, heads, own.head_dim)

    def fetched(self, block_ids: list[int]) -> Tensor:
        """Of all layers, as they are behind all that was told."""
        layers = range(self.engine.kv.num_layers)
        piece = self.taken()
        self.staging.fetch(piece, layers, block_ids, self.marks.now()).result(20)
        found = self.numbers(piece, len(layers), len(block_ids)).clone()
        self.staging.give_back(piece)
        return found


@contextmanager
def staged_ranks(config: EngineConfig) -> Iterator[Staged]:
    """In the end no thread and no socket of the copies is left. Their memory goes with the last piece."""
    with running(config) as engine:
        model, pool = engine.ranks_with_pools, engine.kv.tensor
        assert model is not None and engine.kv.shape.num_kv_heads < engine.model_config.num_kv_heads
        threads, streams = set(threading.enumerate()), streams_of(pool.device)
        marks, [staging] = stage_ranks(model, pool, streams, [StagingSizes(2, 1 << 20)])
        engine.exports.signal.marks = marks
        staging.warm()
        try:
            yield Staged(engine, model, marks, staging)
        finally:
            staging.close()
            marks.close()
            assert all(sock.fileno() == -1 for sock in sockets_of(staging))
            assert not [each for each in set(threading.enumerate()) - threads if each.name == "kv-answers"]


def sockets_of(staging: Staging) -> list[socket.socket]:
    copies = staging._copies
    assert isinstance(copies, RanksCopies)
    channel = copies._channel
    return [*channel._socks.values(), channel._wakes, channel._woken]


def prefilled(engine: Engine, name: str, prompt: tuple[int, ...]) -> list[int]:
    """The blocks of its prompt, which stay until it is released. A longer one than 64 tokens takes two steps."""
    sampling = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    assert engine.add(EngineRequest(name, prompt, sampling, prefill_only=True))
    run_to_end(engine)
    return list(engine.held_blocks(name))


def handed_off(source: Staged, target: Staged, request: EngineRequest) -> tuple[int, ...]:
    """Its tokens: prefilled by one, which may be the other as well, and block by block brought to the other, which decodes."""
    name = f"{request.request_id}-prefill"
    assert source.engine.add(replace(request, request_id=name, prefill_only=True))
    [first] = run_to_end(source.engine).answer(name).token_ids
    granted = target.engine.reserve(request)
    assert granted is not None
    session, layers = target.marks.now(), range(source.engine.kv.num_layers)
    skip = granted.num_cached_tokens // target.engine.config.block_size
    for theirs, ours in zip(source.engine.held_blocks(name)[skip:], granted.block_ids[skip:], strict=True):
        out, back = source.taken(), target.taken()
        source.staging.fetch(out, layers, [theirs], source.marks.behind(layers.stop)).result(60)
        back.host.copy_(out.host)
        target.staging.store(back, layers, [ours], session).result(60)
        source.staging.give_back(out)
        target.staging.give_back(back)
    source.engine.release(name)
    target.engine.start(request.request_id, {0: first})
    return (first, *run_to_end(target.engine).answer(request.request_id).token_ids)
