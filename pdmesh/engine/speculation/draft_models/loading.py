"""Loading of a draft model for an engine: the check whether it fits this target, its weights, its pool, its proposer."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from pdmesh.engine.config import EngineConfig
from pdmesh.engine.kv_cache.pool import KVShape
from pdmesh.engine.loader.builder import open_checkpoint
from pdmesh.engine.loader.loader import LoadedModel, load_model
from pdmesh.engine.memory import DoesNotFit, effective_max_context
from pdmesh.engine.models.config import ModelConfig
from pdmesh.engine.runner.model_runner import TokenSampler
from pdmesh.engine.speculation.draft_models.kv import ParallelKV, Room, TargetKV
from pdmesh.engine.speculation.draft_models.proposer import CATCH_UP_TOKENS, ModelDraft
from pdmesh.engine.speculation.proposer import Proposer
from pdmesh.engine.weight_versions import ForwardModel


@dataclass(frozen=True)
class Target:
    """Describe the engine for which a draft model is opened: its settings, its model, its KV pool."""

    config: EngineConfig
    model: ModelConfig
    kv: KVShape

    @property
    def max_context(self) -> int:
        return effective_max_context(self.config, self.model)


def draft_config(config: EngineConfig, target: ModelConfig) -> EngineConfig:
    """Return the config of a draft model, from that of the target's engine. A step of it computes some missing tokens, and of
    each sequence the last token and the draft tokens ahead of it."""
    num_tokens = CATCH_UP_TOKENS + config.max_num_seqs * config.max_draft_tokens
    most = effective_max_context(config, target)
    # The process is in its host's table of cores once, with the target's threads; the draft computes between their steps.
    return replace(config, max_context=most, max_num_batched_tokens=num_tokens, core_table="", shared_cores=0)


def load_draft_model(path: str, config: EngineConfig, target: ModelConfig) -> LoadedModel:
    """Load in the formats and on the device of the target's engine, whose `config` it is.

    Raises ValueError, naming `draft_model` and what to do, for one that cannot draft for this target, before its weights are
    read, and for one that cannot be loaded (DoesNotFit where there is no memory).
    """
    check_draft_model(path, config, target)
    with _told_of(path):
        return load_model(replace(draft_config(config, target), model=path))


def open_draft_model(
    loaded: LoadedModel,
    target: Target,
    room: Room,
    *,
    sampler: TokenSampler | None = None,
    name: str = "draft_model",
    inner: Proposer | None = None,
    catch_up_tokens: int = CATCH_UP_TOKENS,
) -> ModelDraft:
    """Open a draft model. `sampler`: the target's, whose buffers then serve both; None: one of its own.

    Raises ValueError for a model of another vocabulary, DoesNotFit where there is no memory for its KV pool."""
    _check_vocabulary_size(loaded.config, target.model)
    return ModelDraft(
        name,
        loaded.model,
        ParallelKV(loaded, target.kv, target.config.device),
        sampler or loaded.sampler(),
        room,
        eos_token_ids=target.model.eos_token_ids,
        max_context=min(target.max_context, loaded.config.max_context),
        inner=inner,
        catch_up_tokens=catch_up_tokens,
    )


def check_draft_model(path: str, config: EngineConfig, target: ModelConfig) -> None:
    """Raise ValueError unless the draft model has the target's tokens and sees as many of them. `config` is the target engine's.
    No weights are read."""
    max_context = effective_max_context(config, target)
    with _told_of(path):
        model = open_checkpoint(Path(path))[0].config
    _check_vocabulary_size(model, target)
    own, others = vocabulary_hash(path), vocabulary_hash(config.model)
    if own is not None and others is not None and own != others:
        raise ValueError(
            f"draft_model: the tokens of {path} are not those of {config.model} (tokenizer.json differs); "
            "give a model with the same tokenizer"
        )
    if model.max_context < max_context:
        raise ValueError(
            f"draft_model: it sees {model.max_context} tokens, max_context is {max_context}; "
            f"give max_context={model.max_context}, or a draft model with a longer context"
        )


def vocabulary_hash(path: str) -> str | None:
    """Return a hash of the tokens and their ids in a model folder's tokenizer.json; None where there is none. What does not
    change ids, such as a template or how texts are normalized, may differ. Raises ValueError for a file that lists none."""
    file = Path(path) / "tokenizer.json"
    if not file.is_file():
        return None
    try:
        ids = _ids(json.loads(file.read_text(encoding="utf-8")))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ValueError(f"draft_model: {file} lists no tokens ({error!r}); get it again") from error
    return hashlib.sha256(json.dumps(sorted(ids.items())).encode()).hexdigest()


def _ids(content: Any) -> dict[str, int]:
    """Return the ids of a tokenizer.json."""
    vocabulary = content["model"]["vocab"]
    if isinstance(vocabulary, list):  # a Unigram model's: [token, score] in the order of their ids
        vocabulary = {token: index for index, (token, _) in enumerate(vocabulary)}
    return {**vocabulary, **{token["content"]: token["id"] for token in content.get("added_tokens", ())}}


def _check_vocabulary_size(model: ModelConfig, target: ModelConfig) -> None:
    if model.vocab_size != target.vocab_size:
        raise ValueError(
            f"draft_model: it has {model.vocab_size} tokens, the model has {target.vocab_size}; "
            "give a model with the same vocabulary"
        )


@contextlib.contextmanager
def _told_of(path: str) -> Iterator[None]:
    """Name the draft model in errors, so that they do not seem to be about the target."""
    try:
        yield
    except (ValueError, OSError) as error:
        kind = DoesNotFit if isinstance(error, DoesNotFit) else ValueError
        problem = str(error).removeprefix("model: ")
        raise kind(f"draft_model: {problem if path in problem else f'{path}: {problem}'}") from error


# Self-drafting: the first layers of a model predict what all of them draw, by early exit with the model's own norm and head
#
# No second weights and no second pool: the keys and values of the first layers are the model's own, for everything it has
# computed. Drafted tokens are written after those, into the slots where the next tokens go; verification then writes the same
# there, for all layers. (Zhang et al., Draft & Verify, 2023; Elhoushi et al., LayerSkip, 2024.)


class LayeredModel(Protocol):
    """Describe a target that can stop after its first layers."""

    @property
    def config(self) -> ModelConfig: ...

    def first_layers(self, num_layers: int) -> ForwardModel:
        """Return a model of the first layers, with the same norm, head and weights."""
        ...


def first_layers(model: LayeredModel, num_layers: int) -> ForwardModel:
    """Return the first layers, without weights of their own. Raises ValueError unless `num_layers` is less than the model's."""
    check_num_layers(num_layers, model.config)
    return model.first_layers(num_layers)


def self_draft(
    model: LayeredModel,
    num_layers: int,
    kv: Tensor,
    sampler: TokenSampler,
    room: Room,
    *,
    eos_token_ids: Collection[int],
    max_context: int,
    name: str = "self_draft",
    inner: Proposer | None = None,
) -> ModelDraft:
    """Return a proposer. `kv`: the target's pool, whose owner `room` gives slots. Raises ValueError like `first_layers`."""
    return ModelDraft(
        name,
        first_layers(model, num_layers),
        TargetKV(kv),
        sampler,
        room,
        eos_token_ids=eos_token_ids,
        max_context=max_context,
        inner=inner,
    )


def check_num_layers(num_layers: int, model: ModelConfig) -> None:
    """Raise ValueError unless the number is less than the model's."""
    most = model.num_layers - 1
    if most < 1:
        raise ValueError("self_draft_layers: the model has one layer, which is all of it; use another proposer")
    if not 1 <= num_layers <= most:
        raise ValueError(f"self_draft_layers: {num_layers} is not allowed; give 1 to {most}: the model has {most + 1} layers")
