"""Is all there that the configured proposers need? Asked before any weights are read: a large model takes minutes to load."""

from __future__ import annotations

import logging
from pathlib import Path

from pdmesh.engine.config import EngineConfig
from pdmesh.engine.loader.loader import open_checkpoint
from pdmesh.engine.speculation.draft_models.loading import check_draft_model
from pdmesh.engine.speculation.draft_models.self_draft import check_num_layers
from pdmesh.engine.speculation.registry import NONE, given_draft_model, given_heads, proposer_names

_USED_BY = {"draft_heads": "heads", "draft_model": "draft_model", "self_draft_layers": "self_draft"}

logger = logging.getLogger(__name__)


def check_speculation(config: EngineConfig) -> None:
    """Raises ValueError, naming the field and what to do, for settings that nobody would use and for what is missing or is not
    for this model. Settings that only the chosen proposers leave unused are warned of."""
    names = proposer_names(config)
    _check_unused(config, names)
    if "heads" in names:
        given_heads(config)
    if "draft_model" in names:
        draft_model = given_draft_model(config)
        check_draft_model(draft_model, config, open_checkpoint(Path(config.model))[0].config)
    if "self_draft" in names:
        check_num_layers(config.self_draft_layers, open_checkpoint(Path(config.model))[0].config)


def _check_unused(config: EngineConfig, names: tuple[str, ...]) -> None:
    if config.speculation == NONE:
        for name in (*_USED_BY, "draft_length"):
            if value := getattr(config, name):
                raise ValueError(f"{name}: {value} is given, but speculation is {NONE}; give speculation=auto, or leave this out")
    for name, proposer in _USED_BY.items():
        if getattr(config, name) and proposer not in names:
            logger.warning("%s is given, but nobody uses it: speculation is %s, without %s", name, config.speculation, proposer)
