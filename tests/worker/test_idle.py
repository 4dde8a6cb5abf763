"""What a worker that has nothing to do has imported and holds, in a process of its own; and what the first constraint adds."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from pdmesh.worker import token_request as worker_token_request
from pdmesh.worker.engines.base import EngineFacts
from pdmesh.worker.engines.builtin import facts_of
from pdmesh.worker.token_request import ModelGrammars, NoTokenizer
from tests.engine.backends import needs_native
from tests.support.tiny_models import make_tiny_model
from tests.support.worker_mesh import Model

ROOT = Path(__file__).parents[2]
MIB = 2**20
OWN = 300 * MIB
"""What an idle worker may hold besides weights and pool; those of the tiny model are among it."""

UNUSED = (
    "redis", "opentelemetry", "psutil",  # without --redis and --kv-store
    "jinja2", "tokenizers", "llguidance", "pdmesh.text.tokenizer", "pdmesh.text.grammar",  # before the first constraint
    "torch._dynamo", "torch._inductor", "sympy", "triton", "transformers", "gguf",
    "cryptography", "starlette", "uvicorn", "fastapi", "pydantic", "kubernetes", "grpc_tools.protoc", "rich", "zmq", "router",
)  # fmt: skip


@dataclass
class Started:
    """A worker that has reported ready. `imported`: all its modules so far; `resident`: bytes, by /proc."""

    imported: frozenset[str]
    resident: int


@contextmanager
def worker(folder: Path, log: Path) -> Iterator[subprocess.Popen[str]]:
    settings = ["--model", str(folder), "--num-blocks", "64", "--num-threads", "1"]
    env = {**os.environ, "PYTHONPROFILEIMPORTTIME": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pdmesh.worker", *settings]
    with (
        log.open("w") as stderr,
        subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=stderr, text=True) as process,
    ):
        try:
            yield process
        finally:
            process.kill()


def started(folder: Path, log: Path) -> Started:
    with worker(folder, log) as process:
        assert process.stdout is not None
        if not any(json.loads(line).get("ready") for line in process.stdout):
            pytest.fail("the worker did not start: " + log.read_text()[-2000:])
        status = Path(f"/proc/{process.pid}/status")
        held = status.read_text() if status.exists() else ""
    resident = next((int(line.split()[1]) << 10 for line in held.splitlines() if line.startswith("VmRSS:")), 0)
    lines = [line for line in log.read_text().splitlines() if line.startswith("import time:")]
    return Started(frozenset(line.rpartition("|")[2].strip() for line in lines), resident)


@needs_native
@pytest.mark.timeout(120)
def test_an_idle_worker_has_imported_and_holds_what_it_needs(tmp_path: Path) -> None:
    it = started(make_tiny_model(tmp_path / "tiny"), tmp_path / "log")
    assert {"torch", "grpc", "pdmesh.worker.assembly", "pdmesh.engine.engine"} <= it.imported
    assert not it.imported.intersection(UNUSED)
    assert it.resident <= OWN


@pytest.fixture
def facts(model: Model) -> Iterator[EngineFacts]:
    engine = model.engine()
    yield facts_of(engine)
    engine.close()


def test_the_first_constraint_makes_the_vocabulary_ready_and_says_so(
    facts: EngineFacts, caplog: pytest.LogCaptureFixture
) -> None:
    grammars = ModelGrammars(facts)
    grammars.prepare_if_large()
    with caplog.at_level(logging.INFO, worker_token_request.__name__):
        assert grammars.known("regex", "[ab]") is None
        compiled = grammars.compile("regex", "[ab]")
        assert grammars.known("regex", "[ab]") is grammars.compile("regex", "[ab]") is compiled
    (record,) = caplog.records
    assert record.getMessage().endswith("requests under way paused for a part of it")


def test_a_large_vocabulary_is_ready_before_requests(
    facts: EngineFacts, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_token_request, "MAX_LATE_VOCABULARY", facts.vocab_size - 1)
    grammars = ModelGrammars(facts)
    with caplog.at_level(logging.INFO, worker_token_request.__name__):
        grammars.prepare_if_large()
        grammars.compile("regex", "[ab]")
    (record,) = caplog.records
    assert "paused" not in record.getMessage()


def test_a_model_without_a_tokenizer_takes_no_constraint(tmp_path: Path, facts: EngineFacts) -> None:
    grammars = ModelGrammars(replace(facts, model=str(tmp_path)))
    for _ in range(2):
        with pytest.raises(NoTokenizer):
            grammars.compile("regex", "[ab]")
