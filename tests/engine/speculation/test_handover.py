"""The state that a first token was drawn from goes from engine to engine, and what does not fit is nobody's."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from pdmesh.engine.scheduler.sequence import Sequence
from pdmesh.engine.speculation.cost_curve import CostCurve
from pdmesh.engine.speculation.handover import packed, unpacked
from pdmesh.engine.speculation.speculator import Bounds, Speculator
from tests.engine.speculation.copying import decoding
from tests.support.engine_requests import PROMPT, request
from tests.support.guesser import Guesser
from tests.support.mock_engine import make_engine

HIDDEN_SIZE = 4  # of the mock model, whose states hold the token's position


class Restored(Guesser):
    """Remembers what it was to go on from."""

    def __init__(self) -> None:
        super().__init__(1.0, wants_hidden=True)
        self.states: list[tuple[int, list[float]]] = []

    def restore(self, sequence: Sequence, hidden: Tensor) -> None:
        self.states.append((sequence.output[-1], hidden.tolist()))


def test_what_is_packed_is_what_is_unpacked_to_eight_bits() -> None:
    hidden = torch.randn(64, generator=torch.Generator().manual_seed(1)) * 100
    state = packed(hidden)
    assert len(state) == 128
    again = unpacked(state, 64)
    assert again is not None and again.dtype == torch.float32
    assert torch.equal(again, hidden.bfloat16().float())


@pytest.mark.parametrize("state", [b"", b"\1\2", bytes(9), bytes(2 * 4096), packed(torch.tensor([1.0, float("nan"), 0.0, 0.0]))])
def test_what_does_not_fit_is_ignored(state: bytes) -> None:
    assert unpacked(state, HIDDEN_SIZE) is None


def prefilled(state_of: str, **sampling: object) -> tuple[int, bytes]:
    """The first token of a request on an engine that keeps states, and what it gives along."""
    engine = make_engine(proposers=[Guesser(1.0, wants_hidden=state_of == "guessing")])
    assert engine.add(request("p", PROMPT[:7], prefill_only=True, **sampling))  # type: ignore[arg-type]
    result = engine.step()
    assert result is not None
    update = result.updates[0]
    engine.release("p")
    return update.token_ids[0], update.draft_state


def test_it_travels_with_the_first_token() -> None:
    token, state = prefilled("guessing", max_tokens=9)
    assert unpacked(state, HIDDEN_SIZE).tolist() == [6.0] * HIDDEN_SIZE  # type: ignore[union-attr]
    assert prefilled("plain", max_tokens=9) == (token, b"")
    assert prefilled("guessing", max_tokens=9, n=2)[1] == b""


def test_requests_that_stay_give_nothing_along() -> None:
    engine = make_engine(proposers=[Guesser(1.0, wants_hidden=True)])
    assert engine.add(request("r", PROMPT[:7], max_tokens=4))
    while result := engine.step():
        assert not any(update.draft_state for update in result.updates)


@pytest.mark.parametrize("state", [packed(torch.full((HIDDEN_SIZE,), 6.0)), b"nonsense!", b""])
def test_decode_goes_on_from_it_or_without(state: bytes) -> None:
    proposer = Restored()
    engine = make_engine(proposers=[proposer])
    assert engine.reserve(request("r", PROMPT[:7], max_tokens=5)) is not None
    engine.start("r", {0: 11}, draft_states={0: state, 3: state})
    engine.step()  # drafts belong to steps: what was handed over waits for one
    assert proposer.states == ([(11, [6.0] * HIDDEN_SIZE)] if len(state) == 2 * HIDDEN_SIZE else [])
    engine.release("r")
    engine.check_integrity()


def test_who_does_not_want_it_is_not_asked() -> None:
    proposer = Restored()
    proposer.wants_hidden = False
    engine = make_engine(proposers=[proposer])
    assert engine.reserve(request("r", PROMPT[:7], max_tokens=5)) is not None
    engine.start("r", {0: 11}, draft_states={0: packed(torch.zeros(HIDDEN_SIZE))})
    engine.step()
    assert proposer.states == []
    engine.release("r")


def test_it_goes_where_the_model_s_own_states_are() -> None:
    """Learned states lie on the model's device; one that comes from elsewhere is to lie beside them."""

    devices: list[str] = []

    class OnDevice(Restored):
        def restore(self, sequence: Sequence, hidden: Tensor) -> None:
            devices.append(hidden.device.type)

    speculator = Speculator([OnDevice()], CostCurve((1,), (1.0,)), Bounds(4, 64, 64), device=torch.device("meta"))
    speculator.take_over(decoding(PROMPT, [3]), torch.ones(HIDDEN_SIZE))
    assert devices == ["meta"]
