"""What workers with packed weights hold, by mapping, in processes of their own: the weights once for all workers of the host, the
pool, and little else. And what starts do together, and where they cannot write."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from pdmesh.engine.loader.hash import cache_folder
from tests.engine.backends import needs_native
from tests.support.tiny_models import make_tiny_model

MIB = 2**20
POOL = 64 * MIB
OWN = 300 * MIB
"""What a worker may hold besides weights and pool: Python, torch and the pages of libraries."""

pytestmark = [
    needs_native,
    pytest.mark.skipif(sys.platform != "linux", reason="/proc says what a process holds"),
    pytest.mark.timeout(300),
]

CHILD = """
import hashlib, json, logging, resource, sys
settings = json.loads(sys.argv[1])
if (most := settings.pop("file_limit", None)) is not None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
logging.basicConfig(level=logging.INFO, stream=sys.stderr)
from pdmesh.engine.config import EngineConfig
from pdmesh.engine.engine import Engine
from pdmesh.engine.loader.loader import load_model
from pdmesh.engine.memory import return_freed_memory
from pdmesh.text.block_hash import hash_block
config = EngineConfig(kv_memory_mb=64, num_threads=1, **settings)
loaded = load_model(config)
engine = Engine(config, hash_block=hash_block, loaded=loaded)
return_freed_memory()
print("ready", flush=True)
sys.stdin.readline()
held, name = {}, ""
for line in open("/proc/self/smaps"):
    parts = line.split()
    if not parts[0].endswith(":"):
        name = parts[5] if len(parts) > 5 else "anonymous"
    elif parts[0] in ("Rss:", "Pss:"):
        sizes = held.setdefault(name, {"Rss:": 0, "Pss:": 0})
        sizes[parts[0]] += int(parts[1]) << 10
digest = hashlib.sha256(loaded.model.weights.embedding.view(-1).view(__import__("torch").uint8).numpy())
for layer in loaded.model.weights.layers:
    for linear in (layer.qkv, layer.output, *layer.mlp.linears):
        digest.update(linear.packed.numpy())
print(json.dumps({"held": held, "digest": digest.hexdigest()}), flush=True)
sys.stdin.readline()
"""


@dataclass
class Report:
    """What a process holds by mapping, resident (Rss) and in proportion to those that share it (Pss); its weights' hash."""

    held: dict[str, dict[str, int]]
    digest: str
    log: str = ""

    def total(self, kind: str = "Rss:") -> int:
        return sum(sizes[kind] for sizes in self.held.values())

    def of(self, ending: str, kind: str = "Rss:") -> int:
        return sum(sizes[kind] for name, sizes in self.held.items() if name.endswith(ending))


@dataclass
class Idle:
    """A process with an engine that has nothing to do."""

    process: subprocess.Popen[str]
    reports: list[Report] = field(default_factory=list)

    def until_ready(self) -> None:
        assert self.process.stdout is not None
        if self.process.stdout.readline() != "ready\n":
            pytest.fail("the engine did not start: " + self.process.communicate(timeout=60)[1])

    def report(self) -> Report:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        self.reports.append(Report(**json.loads(self.process.stdout.readline())))
        return self.reports[-1]

    def end(self) -> str:
        """Return what it has logged."""
        return self.process.communicate("\n", timeout=60)[1]


@contextmanager
def idle(model: Path, **settings: Any) -> Iterator[Idle]:
    command = [sys.executable, "-c", CHILD, json.dumps({"model": str(model), **settings})]
    pipes: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    with subprocess.Popen(command, text=True, **pipes) as process:
        try:
            yield Idle(process)
        finally:
            process.kill()


def started(model: Path, **settings: Any) -> Report:
    """Start and end a process."""
    with idle(model, **settings) as process:
        process.until_ready()
        report = process.report()
        report.log = process.end()
    return report


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of 27 M weights, 81 MB packed, 107 MB in the checkpoint: small, and seen among what a process holds."""
    folder = tmp_path_factory.mktemp("medium")
    return make_tiny_model(
        folder, vocab_size=48_000, hidden_size=512, intermediate_size=1024, num_hidden_layers=2, tie_word_embeddings=True
    )


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder of the test's own, with the kernels of all."""
    folder = tmp_path / "cache"
    folder.mkdir()
    (folder / "kernels").symlink_to((cache_folder() / "kernels").resolve())
    monkeypatch.setenv("PDMESH_CACHE", str(folder))
    return folder


def files(cache: Path) -> list[Path]:
    return list((cache / "packed").glob("*.packed"))


def is_shared(report: Report) -> bool:
    return "shared with other workers" in report.log


def test_an_idle_worker_holds_weights_and_pool_and_little_else(model: Path, cache: Path) -> None:
    for start in ("packs", "maps"):
        report = started(model)
        (file,) = files(cache)
        assert report.of(".safetensors") == 0, f"{start}: the checkpoint is still mapped"
        assert report.total() <= file.stat().st_size + POOL + OWN, f"{start}: {report.held}"
    without = started(model, packed_cache="off")
    assert without.of(".safetensors") == 0
    assert without.total() <= file.stat().st_size + POOL + OWN


def test_two_workers_share_the_weights(model: Path, cache: Path) -> None:
    first = started(model)
    if not is_shared(first):
        pytest.skip("files have no large pages here: each worker has a copy")
    size = files(cache)[0].stat().st_size
    with idle(model) as one, idle(model) as other:
        for each in (one, other):
            each.until_ready()
        for each in (one, other):
            report = each.report()
            assert report.digest == first.digest
            assert report.of(".packed") >= 0.9 * size
            assert report.of(".packed", "Pss:") == pytest.approx(size / 2, rel=0.1)
            assert report.total("Pss:") <= size / 2 + POOL + OWN


def test_two_workers_that_start_at_once_pack_once(model: Path, cache: Path) -> None:
    with idle(model) as one, idle(model) as other:
        for each in (one, other):
            each.until_ready()
        assert one.report().digest == other.report().digest == started(model, packed_cache="off").digest
    assert len(files(cache)) == 1
    assert not list((cache / "packed").glob("*.writing-*"))


@pytest.mark.parametrize("limit", [4 * MIB, 60 * MIB])
def test_a_full_disk_costs_a_warning(limit: int, model: Path, cache: Path) -> None:
    report = started(model, file_limit=limit)
    assert report.log.count("WARNING") == 1, report.log
    assert "cannot hold" in report.log
    assert list((cache / "packed").iterdir()) == [next((cache / "packed").glob(".*.lock"))], "half a file is left"
    assert report.digest == started(model).digest


def test_a_folder_that_is_read_only_is_read(model: Path, cache: Path) -> None:
    """A container's image may hold the weights packed; nothing can be noted there."""
    expected = started(model).digest
    folder = cache / "packed"
    folder.chmod(0o500)
    try:
        report = started(model)
    finally:
        folder.chmod(0o700)
    assert report.digest == expected
    assert "packed weights from" in report.log
    assert "WARNING" not in report.log


def test_a_cache_that_is_off_writes_nothing(model: Path, cache: Path) -> None:
    started(model, packed_cache="off")
    assert not (cache / "packed").exists()
