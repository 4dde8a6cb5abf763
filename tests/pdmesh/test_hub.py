"""Models by their name on a hub: `pdmesh models fetch OWNER/NAME` in a process of its own, against a hub on this machine."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from pdmesh.engine.loader.headers import check_model
from pdmesh.models.hub import HubName
from pdmesh.models.registry import model_name
from pdmesh.text.tokenizer import Tokenizer
from tests.pdmesh.hub_server import COMMIT, Hub, running
from tests.support.tiny_models import make_tiny_model

FETCHED = {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hub]:
    folder = make_tiny_model(tmp_path_factory.mktemp("tiny"))
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    whole = {
        **files, "README.md": b"# Tiny", "modeling_tiny.py": b"raise SystemExit", "pytorch_model.bin": b"pickle",
        "original/consolidated.safetensors": b"x", "onnx/model.json": b"{}",
    }  # fmt: skip
    bins = {"config.json": files["config.json"], "pytorch_model.bin": b"pickle", "tokenizer.json": files["tokenizer.json"]}
    repositories = {"org/Tiny-1": whole, "org/bins": bins, "org/gguf": {"tiny.Q8_0.gguf": b"GGUF"}, "org/closed": whole}
    with running(Hub(repositories, gated=frozenset({"org/closed"}))) as hub:
        yield hub


def fetch(hub: Hub | str, home: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    url = hub if isinstance(hub, str) else hub.url
    env = {**os.environ, "HF_ENDPOINT": url, "HF_HOME": str(home), "HF_HUB_DISABLE_TELEMETRY": "1", "NO_PROXY": "127.0.0.1"}
    command = [sys.executable, "-c", "from pdmesh.cli import main; main()", "models", "fetch", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env=env)


def refusal(done: subprocess.CompletedProcess[str]) -> str:
    assert done.returncode == 1 and not done.stdout
    [line] = done.stderr.splitlines()
    assert line.startswith("pdmesh models: ")
    return line


def test_it_is_fetched_once_with_its_licence_and_runs(hub: Hub, tmp_path: Path) -> None:
    hub.seen.clear()
    done = fetch(hub, tmp_path, "org/Tiny-1")
    assert done.returncode == 0, done.stderr
    assert f"org/Tiny-1 at {COMMIT[:12]}: 5 files, 0 MB, licence apache-2.0" in done.stderr
    folder = Path(done.stdout.strip())
    assert folder.is_relative_to(tmp_path) and {path.name for path in folder.iterdir()} == FETCHED == hub.fetched
    check_model(folder)
    assert Tokenizer.load(folder).encode("a")
    hub.seen.clear()
    again = fetch(hub, tmp_path, "org/Tiny-1@v1")
    assert again.stdout == done.stdout and hub.fetched == set()


def test_offline_takes_what_is_there_and_nothing_else(hub: Hub, tmp_path: Path) -> None:
    assert "org/Tiny-1 is not in the hub's cache, and --offline fetches nothing" in refusal(
        fetch(hub, tmp_path, "org/Tiny-1", "--offline")
    )
    folder = fetch(hub, tmp_path, "org/Tiny-1@main").stdout
    hub.seen.clear()
    for name in ("org/Tiny-1", f"org/Tiny-1@{COMMIT}"):
        done = fetch(hub, tmp_path, name, "--offline")
        assert done.stdout == folder != "", done.stderr
    assert hub.seen == []


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("org/none", "org/none is neither a folder here nor a model at http"),
        ("org/Tiny-1@v9", "org/Tiny-1 has no revision 'v9'"),
        ("org/closed", "org/closed is gated: accept its licence at http"),
        (
            "org/bins",
            "it has no safetensors, only pickled weights (.bin, .pth), which are not read because they may hold code; convert",
        ),
        ("org/gguf", "it holds GGUF files; download one, such as tiny.Q8_0.gguf"),
        ("a b/c", "'a b/c' is neither a known name"),
    ],
)
def test_what_cannot_be_fetched_is_said_in_one_line(hub: Hub, tmp_path: Path, name: str, said: str) -> None:
    hub.seen.clear()
    assert said in refusal(fetch(hub, tmp_path, name))
    assert hub.fetched == set()


def test_a_hub_that_cannot_be_reached(tmp_path: Path) -> None:
    line = refusal(fetch("http://127.0.0.1:9", tmp_path, "org/Tiny-1"))
    assert "org/Tiny-1 is no folder here, and the hub at http://127.0.0.1:9 cannot be reached (" in line
    assert "--offline" in line and "HF_ENDPOINT" in line


def test_a_hub_that_is_ill(hub: Hub, tmp_path: Path) -> None:
    hub.refuse = 500
    try:
        assert "answered 500 for org/Tiny-1" in refusal(fetch(hub, tmp_path, "org/Tiny-1"))
    finally:
        hub.refuse = 0


def test_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert HubName.of("Qwen/Qwen3-0.6B") == HubName("Qwen/Qwen3-0.6B")
    assert HubName.of("Qwen/Qwen3-0.6B@refs/pr/1") == HubName("Qwen/Qwen3-0.6B", "refs/pr/1")
    for other in ("smollm2", "/models/qwen", "./models/qwen", "a/b/c", "../a", "a/b@"):
        assert HubName.of(other) is None
    assert model_name("Qwen/Qwen3-0.6B@v1") == "Qwen3-0.6B"
    monkeypatch.chdir(tmp_path)
    (tmp_path / "Qwen" / "local").mkdir(parents=True)
    assert model_name("Qwen/local") == "local"
