"""The finish rule, as a table."""

from __future__ import annotations

import pytest

from pdmesh.engine.outputs import FinishReason
from pdmesh.engine.request import finish_reason
from pdmesh.sampling_params import SamplingParams

EOS, STOP, OTHER = 3, 5, 7


@pytest.mark.parametrize(
    ("output", "params", "expected"),
    [
        ([], {}, None),
        ([OTHER], {}, None),
        ([EOS], {}, FinishReason.STOP),
        ([EOS], {"ignore_eos": True}, None),
        ([EOS], {"ignore_eos": True, "stop_token_ids": (EOS,)}, FinishReason.STOP),
        ([STOP], {"stop_token_ids": (STOP,)}, FinishReason.STOP),
        ([STOP], {"stop_token_ids": (STOP,), "min_tokens": 1}, None),
        ([OTHER, STOP], {"stop_token_ids": (STOP,), "min_tokens": 1}, FinishReason.STOP),
        ([STOP, OTHER], {"stop_token_ids": (STOP,)}, None),
        ([OTHER] * 4, {}, FinishReason.LENGTH),
        ([OTHER, OTHER, OTHER, EOS], {}, FinishReason.STOP),
        ([OTHER, OTHER, OTHER, EOS], {"min_tokens": 4}, FinishReason.LENGTH),
        ([OTHER] * 6, {"max_tokens": 100}, FinishReason.LENGTH),
        ([OTHER] * 5, {"max_tokens": 100}, None),
    ],
)
def test_finish_reason(output: list[int], params: dict[str, object], expected: FinishReason | None) -> None:
    """A prompt of 4 in a context of 10."""
    sampling = SamplingParams(**{"max_tokens": 4, **params})  # type: ignore[arg-type]
    assert finish_reason(sampling, prompt_length=4, output=output, eos_token_ids={EOS}, max_context=10) is expected
