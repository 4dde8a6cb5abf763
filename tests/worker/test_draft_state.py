"""Heads on decode guess behind the first token, which was drawn elsewhere: its hidden state comes with the commit."""

from __future__ import annotations

from pathlib import Path

import pytest

from pdmesh.engine.speculation.draft_heads.weights import save_heads
from pdmesh.v1 import prefill_pb2
from tests.engine.speculation.heads.tiny_heads import make_heads
from tests.support.mini_router import MiniRouter
from tests.support.tiny_models import VOCAB_SIZE
from tests.support.worker_mesh import Model, Peer, reference, running_worker, token_request

PROMPT = [10 + (7 * i) % 200 for i in range(53)]
REQUEST = token_request(PROMPT, max_tokens=3)
"""Of its tokens only the second can have a guess behind it: the first comes from prefill, the third is the last."""


@pytest.fixture
def guessing(model: Model, tmp_path: Path) -> dict[str, object]:
    save_heads(make_heads(hidden_size=model.loaded.config.hidden_size, vocab_size=VOCAB_SIZE), tmp_path / "heads.safetensors")
    return {"speculation": "heads", "draft_heads": str(tmp_path / "heads.safetensors"), "draft_length": 2}


async def num_guessed(model: Model, router: MiniRouter, prefiller: Peer, decoder: Peer) -> int:
    """Tokens that decode has guessed for the request."""
    await router.attach(decoder)
    reservation = await router.submit(decoder, "r1", REQUEST)
    _, outcome = await router.prefill(prefiller, decoder, "r1", REQUEST, reservation)
    assert outcome.status == prefill_pb2.HANDOFF_STATUS_COMMITTED, outcome
    await router.until_finished("r1", 1)
    assert [router.of("r1").output()] == reference(model, REQUEST)
    outputs = [output for frame in router.frames for output in frame.outputs]
    await router.detach()
    return max(output.num_drafted for output in outputs)


@pytest.mark.parametrize("prefill_guesses", [True, False])
async def test_the_first_step_guesses_if_prefill_gave_the_state(
    model: Model, guessing: dict[str, object], prefill_guesses: bool
) -> None:
    """Both ends guess alike, or prefill does not: then decode guesses from its own first state, which is too late here."""
    on_prefill = guessing if prefill_guesses else {}
    async with (
        running_worker(model, engine=on_prefill, roles=("prefill",), worker_id="p") as prefiller,
        running_worker(model, engine=guessing, roles=("decode",), worker_id="d") as decoder,
    ):
        assert await num_guessed(model, MiniRouter(), prefiller, decoder) == prefill_guesses


async def test_who_guesses_otherwise_ignores_it(model: Model, guessing: dict[str, object]) -> None:
    async with (
        running_worker(model, engine=guessing, roles=("prefill",), worker_id="p") as prefiller,
        running_worker(model, roles=("decode",), worker_id="d") as decoder,
    ):
        assert await num_guessed(model, MiniRouter(), prefiller, decoder) == 0
