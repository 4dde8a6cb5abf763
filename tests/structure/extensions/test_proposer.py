"""A draft proposer is one module and one line of `pdmesh/engine/speculation/registry.py`: settings, engine and counts know it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence as Sequence_
from pathlib import Path

import pytest
from torch import Tensor

from pdmesh.engine.config import EngineConfig
from pdmesh.engine.engine import Engine
from pdmesh.engine.loader.loader import load_model
from pdmesh.engine.scheduler.sequence import Sequence
from pdmesh.engine.speculation.draft import Draft, Verified
from pdmesh.engine.speculation.proposer import Ask
from pdmesh.engine.speculation.registry import PROPOSERS
from pdmesh.engine.speculation.setup import Parts
from tests.engine.speculation.models.driver import request
from tests.support.mock_engine import open_engine, run_to_end
from tests.support.tiny_models import make_tiny_model

NAME = "repeat"


class Repeat:
    """Guesses that the latest token comes again."""

    name = NAME
    is_free = True
    wants_hidden = False
    learns = False

    def propose(self, asks: Sequence_[Ask]) -> list[Draft]:
        return [Draft.chain((ask.sequence.output or [0])[-1:], (0.5,), NAME) for ask in asks]

    def learn(self, sequence: Sequence, verified: Verified, hidden: Tensor | None) -> None:
        """Nothing to learn."""


def make(_parts: Parts) -> Repeat:
    return Repeat()


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    """The one line of the registry."""
    monkeypatch.setitem(PROPOSERS, NAME, f"{__name__}:make")


def test_an_unknown_proposer_is_refused_and_the_known_ones_are_named() -> None:
    with pytest.raises(
        ValueError, match=f"speculation: '{NAME}' is not known; give auto or none alone, or some of prompt_lookup"
    ):
        EngineConfig("model", speculation=NAME).validate()


@pytest.mark.usefixtures("registered")
def test_an_engine_drafts_with_it_and_no_token_changes(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path, initializer_range=0.05)  # its output soon repeats itself
    loaded = load_model(EngineConfig(str(folder), num_threads=1))

    def engine_of(**settings: object) -> Engine:
        config = EngineConfig(str(folder), num_blocks=64, max_context=512, num_threads=1, **settings)  # type: ignore[arg-type]
        config.validate()
        return open_engine(config, loaded)

    def output(engine: Engine) -> tuple[int, ...]:
        assert engine.add(request("r", (5, 9, 9, 31, 200, 7), max_tokens=60))
        return tuple(run_to_end(engine).answer("r").token_ids)

    drafting = engine_of(speculation=NAME, draft_length=1)
    assert output(drafting) == output(engine_of(speculation="none"))
    assert drafting.speculator is not None
    stats = drafting.speculator.tally.stats()
    assert list(stats.by_proposer) == [NAME] and sum(stats.by_proposer[NAME].verified) > 10


def test_the_table_of_names_needs_no_torch() -> None:
    """`pdmesh up` checks the names of proposers in a process that never computes."""
    program = (
        "import sys; from pdmesh.engine.config import named_proposers; named_proposers('heads'); print('torch' in sys.modules)"
    )
    shown = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert shown.stdout.strip() == "False"
