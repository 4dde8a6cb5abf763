"""What an engine is asked for: a prompt, how to sample, and what was already answered elsewhere."""

from __future__ import annotations

from dataclasses import dataclass, field

from pdmesh.engine.sampling.grammar import Grammar, Matcher
from pdmesh.engine.sampling_params import SamplingParams


@dataclass(frozen=True)
class EngineRequest:
    """A request in token ids. It restates its history, so that any engine can go on where another stopped."""

    request_id: str
    prompt: tuple[int, ...]
    sampling: SamplingParams
    emitted: tuple[tuple[int, ...], ...] = ()  # () or one tuple per choice: tokens already given to the client
    finished: tuple[bool, ...] = ()  # () or one per choice: that choice needs no more tokens
    cache_root: bytes = b""  # root of the block hash chain: identity and tenant salt
    tpot_goal_s: float = 0.0  # its tokens are wanted this far apart at most, on average; 0: nobody said
    prefill_only: bool = False  # stop after each choice's first new token and hold the blocks until release()
    grammar: Grammar | None = None  # each choice's output is one of its sentences, or the beginning of one
    # () or one per choice: of the grammar, behind `emitted`, which follows it; None for a choice that has finished. Who gives
    # them has replayed the history where nobody waits; else the engine does, and a long one holds up its step.
    matchers: tuple[Matcher | None, ...] = field(default=(), compare=False)
