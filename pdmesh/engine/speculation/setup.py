"""Setup of the proposers that an engine's configuration names, and of the models that they run. Their names: `registry.py`."""

from __future__ import annotations

import logging
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from pdmesh.engine.config import EngineConfig, named_proposers
from pdmesh.engine.kernels.cpu.model import NativeModel
from pdmesh.engine.kv_cache.block_manager import BlockManager
from pdmesh.engine.kv_cache.pool import KVPool
from pdmesh.engine.loader.builder import open_checkpoint
from pdmesh.engine.loader.loader import LoadedModel
from pdmesh.engine.memory import effective_max_context
from pdmesh.engine.runner.model_runner import TokenSampler
from pdmesh.engine.speculation.draft_heads.native import NativeHeads, why_not_native
from pdmesh.engine.speculation.draft_heads.proposer import HeadProposer
from pdmesh.engine.speculation.draft_heads.reference import HeadMaths, TorchHeads
from pdmesh.engine.speculation.draft_heads.weights import FILE, load_heads
from pdmesh.engine.speculation.draft_models.kv import Room, draft_shape, room_in
from pdmesh.engine.speculation.draft_models.loading import (
    Target,
    check_draft_model,
    check_num_layers,
    draft_config,
    first_layers,
    load_draft_model,
    open_draft_model,
    self_draft,
)
from pdmesh.engine.speculation.ngrams.prompt_lookup import PromptLookup
from pdmesh.engine.speculation.proposer import Proposer
from pdmesh.engine.speculation.registry import PROPOSERS

NONE = "none"
AUTO = "auto"

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Drafts:
    """Hold the models for drafting, which are loaded before the KV pool is sized; None: there are none. Of the device's memory,
    `step_bytes` are for their steps and graphs, and `block_bytes` for their own pool, for each block of the target's."""

    heads: HeadMaths | None = None
    model: LoadedModel | None = None
    step_bytes: int = 0
    block_bytes: int = 0

    @property
    def mapped_bytes(self) -> int:
        """Return the bytes of weights that are pages of a file: the system counts them as free, and each draft reads them."""
        return 0 if self.model is None else self.model.mapped_bytes


@dataclass(frozen=True)
class Parts:
    """Hold the parts of an engine that proposers are made from. `num_running`: the present number of sequences."""

    config: EngineConfig
    loaded: LoadedModel
    drafts: Drafts
    kv: KVPool
    allocator: BlockManager
    sampler: TokenSampler
    num_running: Callable[[], int]

    @property
    def room(self) -> Room:
        return room_in(self.allocator, self.num_running)


def load_drafts(config: EngineConfig, loaded: LoadedModel) -> Drafts:
    """Load the models of the configured proposers. Raises ValueError naming the field for impossible settings."""
    names = names_for(config, loaded)
    heads = _maths(config, loaded) if "heads" in names else None
    model, models, block_bytes = None, list[object](), 0
    if "draft_model" in names:
        model = load_draft_model(given_draft_model(config), config, loaded.config)
        block_bytes = draft_shape(model, 1, config.block_size).bytes_per_block
        models.append(model.model)
    if "self_draft" in names:
        models.append(first_layers(loaded.model, config.self_draft_layers))
    needs = [own for each in models if (own := getattr(each, "draft_bytes", None)) is not None]
    return Drafts(heads, model, sum(own(draft_config(config, loaded.config)) for own in needs), block_bytes)


def make_proposers(parts: Parts) -> list[Proposer]:
    """Return the proposers in the order of the configuration, ready for the first request. Raises ValueError naming the field."""
    names = names_for(parts.config, parts.loaded)
    if names != proposer_names(parts.config):
        logger.info("speculation: auto drafts nothing without the native kernels, where it may lose; name proposers to use them")
    return [_maker(name)(parts) for name in names]


def _maker(name: str) -> Callable[[Parts], Proposer]:
    maker: Callable[[Parts], Proposer] = pkgutil.resolve_name(PROPOSERS[name])
    return maker


def names_for(config: EngineConfig, loaded: LoadedModel) -> tuple[str, ...]:
    """Return the names of the proposers for this model. Auto has none for the other backends unless a draft source or a length is
    configured: with a few sequences prompt lookup was seen to slow torch (docs/speculation.md)."""
    if config.speculation == AUTO and not (config.names_drafts or isinstance(loaded.model, NativeModel)):
        return ()
    names = proposer_names(config)
    if "heads" in names and config.speculation == AUTO and not config.draft_heads:
        path, sizes = given_heads(config), (loaded.config.hidden_size, loaded.config.vocab_size)
        if not _fit(path, path.stat().st_mtime_ns, *sizes):
            return tuple(name for name in names if name != "heads")
    return names


@lru_cache(maxsize=8)
def _fit(path: Path, changed_ns: int, hidden_size: int, vocab_size: int) -> bool:
    """Return whether the heads beside a model, as last changed then, can be used for these sizes; warn once if not."""
    try:
        why = load_heads(path).why_not(hidden_size, vocab_size)
    except (OSError, ValueError) as error:
        why = str(error)
    if why:
        logger.warning("draft_heads: %s lies beside the model and is not used: %s", path, why)
    return not why


def proposer_names(config: EngineConfig) -> tuple[str, ...]:
    """Return the configured names. Auto: prompt lookup, and the proposers for which other settings, or a file beside the model,
    provide.

    Raises ValueError for unknown names.
    """
    if config.speculation != AUTO:
        return named_proposers(config.speculation)
    given = {"heads": heads_path(config), "draft_model": config.draft_model, "self_draft": config.self_draft_layers}
    return ("prompt_lookup", *(name for name, value in given.items() if value))


def heads_path(config: EngineConfig) -> Path | None:
    """Return the path of the draft heads: as configured, else beside the model; None where there are none."""
    if config.draft_heads:
        return Path(config.draft_heads)
    beside = Path(config.model) / FILE
    return beside if beside.is_file() else None


def given_heads(config: EngineConfig) -> Path:
    """Return the path of the draft heads. Raises ValueError where there are none."""
    path = heads_path(config)
    if path is None:
        raise ValueError(f"draft_heads: no {FILE} is in the model's folder; give the path of one, or train it (make train-heads)")
    if not path.is_file():
        raise ValueError(f"draft_heads: {path} is no file; give one that was trained for the model (make train-heads)")
    return path


def given_draft_model(config: EngineConfig) -> str:
    """Return the draft model. Raises ValueError where there is none."""
    if not config.draft_model:
        raise ValueError("draft_model: empty; give the folder or .gguf file of a smaller model with the same vocabulary")
    return config.draft_model


def make_heads(parts: Parts) -> HeadProposer:
    config = parts.loaded.config
    assert parts.drafts.heads is not None, "load_drafts loads what is named"
    device = parts.kv.tensor.device
    return HeadProposer(parts.drafts.heads, parts.sampler, config.vocab_size, config.eos_token_ids, device)


def _maths(config: EngineConfig, loaded: LoadedModel) -> HeadMaths:
    path, model = given_heads(config), loaded.model
    heads = load_heads(path)
    if why := heads.why_not(loaded.config.hidden_size, loaded.config.vocab_size):
        raise ValueError(f"draft_heads: {path}: {why}")
    if not heads.is_for(loaded.weights_hash):
        others = (
            "draft_heads: %s was trained for other weights (%.12s) than the model's (%.12s): few of their tokens may be accepted"
        )
        logger.warning(others, path, heads.trained_for, loaded.weights_hash)
    if not isinstance(model, NativeModel):
        return TorchHeads(heads, model.embedding)
    if why_not_native(heads, model.weights.embedding):
        return TorchHeads(heads, model.weights.embedding)
    return NativeHeads(heads, model.weights.embedding, model.library, model.team, model)


def make_draft_model(parts: Parts) -> Proposer:
    target = Target(parts.config, parts.loaded.config, parts.kv.shape)
    assert parts.drafts.model is not None, "load_drafts loads what is named"
    draft = open_draft_model(parts.drafts.model, target, parts.room, sampler=parts.sampler, inner=PromptLookup())
    draft.prepare()
    return draft


def make_self_draft(parts: Parts) -> Proposer:
    config = parts.loaded.config
    draft = self_draft(
        parts.loaded.model,
        parts.config.self_draft_layers,
        parts.kv.tensor,
        parts.sampler,
        parts.room,
        eos_token_ids=config.eos_token_ids,
        max_context=effective_max_context(parts.config, config),
        inner=PromptLookup(),
    )
    draft.prepare()
    return draft


# Checks before any weights are read that the configured proposers have what they need: a large model takes minutes to load


_USED_BY = {"draft_heads": "heads", "draft_model": "draft_model", "self_draft_layers": "self_draft"}


def check_speculation(config: EngineConfig) -> None:
    """Raise ValueError, naming the field and what to do, for settings that no proposer would use and for files that are missing
    or not for this model. Settings that only the chosen proposers leave unused cause a warning."""
    names = proposer_names(config)
    _check_unused(config, names)
    if "heads" in names:
        given_heads(config)
    if "draft_model" in names:
        draft_model = given_draft_model(config)
        check_draft_model(draft_model, config, open_checkpoint(Path(config.model), config.override)[0].config)
    if "self_draft" in names:
        check_num_layers(config.self_draft_layers, open_checkpoint(Path(config.model), config.override)[0].config)


def _check_unused(config: EngineConfig, names: tuple[str, ...]) -> None:
    if config.speculation == NONE:
        for name in (*_USED_BY, "draft_length"):
            if value := getattr(config, name):
                raise ValueError(f"{name}: {value} is given, but speculation is {NONE}; give speculation=auto, or leave this out")
    for name, proposer in _USED_BY.items():
        if getattr(config, name) and proposer not in names:
            logger.warning("%s is given, but not used: speculation is %s, without %s", name, config.speculation, proposer)
