"""Which proposers an engine has: names in its configuration, made here, one line for each kind."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from engine.allocator import BlockAllocator
from engine.config import EngineConfig, named_proposers
from engine.kernels.cpu.model import NativeModel
from engine.kv_cache import KVPool
from engine.memory import effective_max_context
from engine.model import DecoderModel
from engine.runner import TokenSampler
from engine.speculation.heads.native import NativeHeads, why_not_native
from engine.speculation.heads.proposer import HeadProposer
from engine.speculation.heads.reference import HeadMaths, TorchHeads
from engine.speculation.heads.weights import FILE, DraftHeads, load_heads
from engine.speculation.models.open import Target, load_draft_model, open_draft_model
from engine.speculation.models.room import Room, room_in
from engine.speculation.models.self_draft import self_draft
from engine.speculation.ngrams.lookahead import Lookahead
from engine.speculation.ngrams.prompt_lookup import PromptLookup
from engine.speculation.ngrams.retrieval import Retrieval
from engine.speculation.proposer import Proposer
from engine.weights.loader import LoadedModel

if TYPE_CHECKING:
    from engine.kernels.triton.model import TritonModel
    from engine.parallel.model import ParallelModel

NONE = "none"
AUTO = "auto"

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Parts:
    """What of an engine proposers are made from. `num_running`: sequences, at the moment."""

    config: EngineConfig
    loaded: LoadedModel
    kv: KVPool
    allocator: BlockAllocator
    sampler: TokenSampler
    num_running: Callable[[], int]

    @property
    def room(self) -> Room:
        return room_in(self.allocator, self.num_running)


def make_proposers(parts: Parts) -> list[Proposer]:
    """In the order of the configuration. Raises ValueError naming the field for what cannot be."""
    names = names_for(parts.config, parts.loaded)
    if names != proposer_names(parts.config):
        logger.info("speculation: auto guesses nothing where torch computes: it may lose there; name who is to guess")
    return [_KINDS[name](parts) for name in names]


def names_for(config: EngineConfig, loaded: LoadedModel) -> tuple[str, ...]:
    """Who guesses for this model. Auto leaves torch's steps alone unless something was given to guess with, or how far to: with a
    few sequences prompt lookup was seen to slow them (docs/speculation.md)."""
    is_given = bool(config.draft_heads or config.draft_model or config.self_draft_layers or config.draft_length)
    if config.speculation == AUTO and not (is_given or isinstance(loaded.model, NativeModel)):
        return ()
    return proposer_names(config)


def proposer_names(config: EngineConfig) -> tuple[str, ...]:
    """Auto: prompt lookup, and whatever the other settings, or a file beside the model, give something for.

    Raises ValueError for names that are not known.
    """
    if config.speculation != AUTO:
        return named_proposers(config.speculation)
    given = {"heads": heads_path(config), "draft_model": config.draft_model, "self_draft": config.self_draft_layers}
    return ("prompt_lookup", *(name for name, value in given.items() if value))


def heads_path(config: EngineConfig) -> Path | None:
    """Of the draft heads: as configured, else beside the model; None where there are none."""
    if config.draft_heads:
        return Path(config.draft_heads)
    beside = Path(config.model) / FILE
    return beside if beside.is_file() else None


def given_heads(config: EngineConfig) -> Path:
    """Raises ValueError where there are none."""
    path = heads_path(config)
    if path is None:
        raise ValueError(f"draft_heads: no {FILE} is in the model's folder; give the path of one, or train it (make train-heads)")
    if not path.is_file():
        raise ValueError(f"draft_heads: {path} is no file; give one that was trained for the model (make train-heads)")
    return path


def given_draft_model(config: EngineConfig) -> str:
    """Raises ValueError where there is none."""
    if not config.draft_model:
        raise ValueError("draft_model: empty; give the folder or .gguf file of a smaller model with the same vocabulary")
    return config.draft_model


def _heads(parts: Parts) -> HeadProposer:
    path, config = given_heads(parts.config), parts.loaded.config
    heads = load_heads(path)
    if why := heads.why_not(config.hidden_size, config.vocab_size):
        raise ValueError(f"draft_heads: {path}: {why}")
    if not heads.is_for(parts.loaded.weights_hash):
        others = "draft_heads: %s was trained for other weights (%.12s) than the model's (%.12s): it may guess badly"
        logger.warning(others, path, heads.trained_for, parts.loaded.weights_hash)
    return HeadProposer(_maths(heads, parts.loaded.model), parts.sampler, config.vocab_size, config.eos_token_ids)


def _maths(heads: DraftHeads, model: NativeModel | DecoderModel | TritonModel | ParallelModel) -> HeadMaths:
    if not isinstance(model, NativeModel):
        return TorchHeads(heads, model.embedding)
    if why_not_native(heads, model.weights.embedding):
        return TorchHeads(heads, model.weights.embedding)
    return NativeHeads(heads, model.weights.embedding, model.library, model.team, model)


def _draft_model(parts: Parts) -> Proposer:
    target = Target(parts.config, parts.loaded.config, parts.kv.shape)
    loaded = load_draft_model(given_draft_model(parts.config), target)
    return open_draft_model(loaded, target, parts.room, inner=PromptLookup())


def _self_draft(parts: Parts) -> Proposer:
    config = parts.loaded.config
    return self_draft(
        parts.loaded.model,
        parts.config.self_draft_layers,
        parts.kv.tensor,
        parts.sampler,
        parts.room,
        eos_token_ids=config.eos_token_ids,
        max_context=effective_max_context(parts.config, config),
        inner=PromptLookup(),
    )


_KINDS: dict[str, Callable[[Parts], Proposer]] = {
    "prompt_lookup": lambda _: PromptLookup(),
    "retrieval": lambda _: Retrieval(),
    "lookahead": lambda _: Lookahead(),
    "heads": _heads,
    "draft_model": _draft_model,
    "self_draft": _self_draft,
}
