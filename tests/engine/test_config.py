"""What an engine is told is checked before anything is loaded, and every error names the field."""

from __future__ import annotations

from typing import Any

import pytest

from pdmesh.engine.config import MAX_DRAFT_TOKENS, EngineConfig, named_proposers
from pdmesh.engine.speculation.registry import PROPOSERS


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"speculation": "oracle"}, "speculation: 'oracle' is not known; give auto or none alone, or some of prompt_lookup, "),
        ({"speculation": "prompt_lookup,auto"}, "speculation: 'auto' is not known; give auto or none alone"),
        ({"speculation": "heads, ,retrieval"}, "speculation: '' is not known"),
        ({"speculation": ""}, "speculation: '' is not known"),
        ({"max_draft_tokens": 0}, "max_draft_tokens: 0 is less than 1"),
        ({"max_draft_tokens": 65}, "max_draft_tokens: 65 is more than 64; give at most that"),
        ({"self_draft_layers": -1}, "self_draft_layers: -1 is less than 0"),
        ({"draft_length": -1}, "draft_length: -1 is less than 0"),
        (
            {"draft_length": 17},
            "draft_length: 17 is more than max_draft_tokens, 16; give at most that, or raise max_draft_tokens",
        ),
        ({"tensor_parallel": 0}, "tensor_parallel: 0 is less than 1; give at least 1"),
        (
            {"tensor_parallel": 2},
            "tensor_parallel: 2 does not go with the native backend for now; give backend=torch, or tensor_parallel=1",
        ),
        ({"tensor_parallel": 2, "backend": "native"}, "tensor_parallel: 2 does not go with the native backend for now"),
        ({"tensor_parallel": 2, "backend": "native", "device": "cuda"}, "tensor_parallel: 2 does not go with the native backend"),
        (
            {"tensor_parallel": 2, "backend": "torch", "speculation": "prompt_lookup,self_draft"},
            "tensor_parallel: 2 does not go with speculation=self_draft for now; give other proposers",
        ),
        (
            {"tensor_parallel": 2, "backend": "torch", "draft_model": "small"},
            "tensor_parallel: 2 does not go with draft_model and self_draft_layers for now; leave them out",
        ),
        ({"tensor_parallel_timeout_s": 0.0}, "tensor_parallel_timeout_s: 0.0 is no time to wait; give seconds"),
    ],
)
def test_settings_that_cannot_be(settings: dict[str, object], message: str) -> None:
    config = EngineConfig("model", **settings)  # type: ignore[arg-type]
    with pytest.raises(ValueError) as raised:
        config.validate()
        config.check_own_ranks()
    assert str(raised.value).startswith(message)


@pytest.mark.parametrize(
    ("given", "drafts"),
    [({}, False), ({"speculation": "none"}, False), ({"speculation": "prompt_lookup"}, True), ({"draft_length": 2}, True)],
)
def test_auto_by_itself_names_no_drafts(given: dict[str, Any], drafts: bool) -> None:
    """It drafts where the native backend computes; others make no room in their steps for rows that never come."""
    assert EngineConfig("model", **given).names_drafts is drafts


@pytest.mark.parametrize("speculation", ["auto", "none", *PROPOSERS, ",".join(PROPOSERS)])
def test_settings_that_can(speculation: str) -> None:
    EngineConfig("model", speculation=speculation).validate()
    EngineConfig("model", speculation=speculation, max_draft_tokens=MAX_DRAFT_TOKENS, draft_length=MAX_DRAFT_TOKENS).validate()


def test_ranks_compute_with_torch() -> None:
    EngineConfig("model", tensor_parallel=2, backend="torch", speculation="prompt_lookup").check_own_ranks()
    EngineConfig("model", tensor_parallel=8, device="cuda").check_own_ranks()
    EngineConfig("model", tensor_parallel=2, backend="triton").check_own_ranks()


def test_each_name_counts_once() -> None:
    assert named_proposers("heads, retrieval ,heads") == ("heads", "retrieval")
    assert named_proposers("auto") == named_proposers("none") == ()
