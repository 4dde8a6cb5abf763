"""Packed weights are written once and mapped from then on, bit by bit what packing makes; no file is used that is not whole."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, is_dataclass, replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from pdmesh.engine.backend_selection import Numerics
from pdmesh.engine.config import EngineConfig
from pdmesh.engine.kernels.cpu.model import PackedWeights
from pdmesh.engine.loader import packed_cache
from pdmesh.engine.loader.builder import open_checkpoint
from pdmesh.engine.loader.hash import cache_folder
from pdmesh.engine.loader.pack import NativeBuilder
from pdmesh.engine.loader.packed_cache import Name, PackedCache, entries
from pdmesh.platform import huge_pages
from pdmesh.platform.capabilities import HUGE_PAGES
from tests.engine.tiny_gguf import write_gguf
from tests.support.quantized_checkpoints import FORMATS, write_quantized
from tests.support.tiny_families import make_tiny_family
from tests.support.tiny_models import make_tiny_model

INT8 = Numerics("native", "int8", 0, torch.bfloat16, torch.bfloat16)
FORMS = [
    INT8,
    replace(INT8, weights="int4", group=32),
    replace(INT8, weights="float32", dtype=torch.float32),
    replace(INT8, weights="bfloat16"),
]


def leaves(value: object, path: str = "") -> Iterator[tuple[str, object]]:
    """Everything in packed weights, by its place."""
    if is_dataclass(value):
        for part in fields(value):
            yield from leaves(getattr(value, part.name), f"{path}.{part.name}")
    elif isinstance(value, list | tuple):
        yield f"{path}.kind", type(value)
        for number, each in enumerate(value):
            yield from leaves(each, f"{path}[{number}]")
    else:
        yield path, value


def assert_equal(first: PackedWeights, second: PackedWeights) -> None:
    one, other = (dict(leaves(replace(weights, mapped_bytes=0, file=None))) for weights in (first, second))
    assert one.keys() == other.keys()
    for place, value in one.items():
        found = other[place]
        if isinstance(value, Tensor):
            assert isinstance(found, Tensor), place
            assert (value.dtype, value.shape) == (found.dtype, found.shape), place
            assert torch.equal(value.contiguous().view(-1).view(torch.uint8), found.reshape(-1).view(torch.uint8)), place
            assert found.data_ptr() % 64 == 0 or not found.numel(), place
        else:
            assert value == found, place


@dataclass
class Start:
    """A start of a worker with one model, as far as its weights go."""

    model: Path
    cache: PackedCache
    numerics: Numerics = INT8
    digest: str = "0" * 64
    num_packings: int = 0

    def __call__(self) -> PackedWeights:
        builder = NativeBuilder(open_checkpoint(self.model)[0], self.numerics, 64)

        def pack(progress: Callable[[float, str], None]) -> PackedWeights:
            self.num_packings += 1
            return builder.pack(progress)

        return builder.with_tables(self.cache.load(self.name, builder.config, 1, pack, lambda _share, _text: None))

    @property
    def name(self) -> Name:
        return Name.of(self.digest, self.numerics)

    @property
    def file(self) -> Path:
        (path,) = self.cache.folder.glob("*.packed")
        return path

    def packed(self) -> PackedWeights:
        return NativeBuilder(open_checkpoint(self.model)[0], self.numerics, 64).build(lambda _share, _text: None)


HOLDER = """
import fcntl, os, sys
with open(sys.argv[1], "w") as file:
    fcntl.flock(file, fcntl.LOCK_EX)
    file.write(f"{os.getpid()}\\n")
    file.flush()
    print("held", flush=True)
    sys.stdin.read()
"""


@contextlib.contextmanager
def held_by_another(start: Start) -> Iterator[subprocess.Popen[str]]:
    """Another process that packs the same weights, and comes to no end before it is told to."""
    start.cache.folder.mkdir(exist_ok=True)
    command = [sys.executable, "-c", HOLDER, str(start.cache.folder / f".{start.name.text}.lock")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None and other.stdout.readline() == "held\n"
        yield other
        other.kill()


@pytest.fixture
def cache(tmp_path: Path) -> PackedCache:
    return PackedCache(tmp_path / "packed", min_bytes=0)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("llama"), "llama", attention_bias=True, mlp_bias=True)


@pytest.fixture
def start(llama: Path, cache: PackedCache) -> Start:
    return Start(llama, cache)


EVERY = [("llama", form) for form in FORMS] + [
    (family, form) for family in ("qwen2_moe", "deepseek_v3", "gpt_oss", "gpt2", "gemma2") for form in (INT8, FORMS[2])
]


@pytest.mark.parametrize(("family", "numerics"), EVERY, ids=[f"{family} {form.weights}" for family, form in EVERY])
def test_every_part_of_every_family_comes_back(family: str, numerics: Numerics, cache: PackedCache, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    start = Start(make_tiny_family(tmp_path / "model", family), cache, numerics)
    first, second = start(), start()
    assert start.num_packings == 1
    assert_equal(start.packed(), first)
    assert_equal(first, second)


@pytest.mark.parametrize("form", ["gptq 4 bits g32", "compressed w8a8"])
def test_quantized_checkpoints_come_back(form: str, llama: Path, cache: PackedCache, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    model = write_quantized(make_tiny_family(tmp_path / "plain", "llama"), tmp_path / "model", FORMATS[form])[0]
    start = Start(model, cache, FORMS[1] if "4 bits" in form else INT8)
    start()
    assert_equal(start.packed(), start())
    assert start.num_packings == 1


def test_gguf_files_come_back(llama: Path, cache: PackedCache, tmp_path: Path) -> None:
    write_gguf(make_tiny_model(tmp_path / "plain"), tmp_path / "model.gguf")
    start = Start(tmp_path / "model.gguf", cache, FORMS[1])
    start()
    assert_equal(start.packed(), start())
    assert start.num_packings == 1


def test_a_second_start_does_not_touch_the_checkpoint(llama: Path, cache: PackedCache, tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(llama, model)
    start = Start(model, cache)
    first = start()
    weights = model / "model.safetensors"
    length = int.from_bytes(weights.read_bytes()[:8], "little")
    with weights.open("r+b") as file:  # headers stay
        file.seek(8 + length)
        file.write(b"\xff" * (weights.stat().st_size - 8 - length))
    assert_equal(first, start())


def test_no_start_keeps_the_checkpoint_mapped(llama: Path, cache: PackedCache) -> None:
    """Also without a cache, and where vectors are float32 in the checkpoint, as they are in the weights."""
    numerics = FORMS[2]
    for weights in (Start(llama, cache, numerics).packed(), Start(llama, cache, numerics)(), Start(llama, cache, numerics)()):
        assert str(llama / "model.safetensors") not in Path("/proc/self/maps").read_text(), "a tensor is a view of the file"
        assert weights.layers


# ---- what is never used


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 4096)


def emptied(path: Path) -> None:
    os.truncate(path, 0)


def longer(path: Path) -> None:
    os.truncate(path, path.stat().st_size + 2**21)


def patched(offset: int) -> Callable[[Path], None]:
    def patch(path: Path) -> None:
        content = bytearray(path.read_bytes())
        content[offset] ^= 1
        path.write_bytes(content)

    return patch


def garbage(path: Path) -> None:
    path.write_bytes(os.urandom(path.stat().st_size))


def swapped_silently(path: Path) -> None:
    """A file of the same size in its place, with the times of the other."""
    before = path.stat()
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.unlink()
    path.write_bytes(content)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


@pytest.mark.parametrize(
    "damage",
    [
        cut,
        emptied,
        longer,
        garbage,
        swapped_silently,
        patched(0),
        patched(9),
        patched(20),
        patched(60),
        patched(100),
        patched(-1),
    ],
    ids=["cut", "empty", "longer", "garbage", "swapped", "magic", "length", "hash", "seal", "header", "padding"],
)
def test_damage(damage: Callable[[Path], None], start: Start, caplog: pytest.LogCaptureFixture) -> None:
    expected = start.packed()
    start()  # nothing has it mapped when it is changed: whoever cuts off a mapped file ends the process that reads it
    start.file.chmod(0o600)
    damage(start.file)
    with caplog.at_level(logging.WARNING):
        assert_equal(expected, start())
    assert start.num_packings == 2
    assert len(caplog.records) == 1, caplog.text
    assert "packed anew" in caplog.text
    assert_equal(expected, start())
    assert start.num_packings == 2, "it was not replaced"


def test_a_bit_of_the_weights(start: Start) -> None:
    """The last thing that could be wrong: the header and the size are right."""
    expected = start.packed()
    start()
    start.file.chmod(0o600)
    tensor = next(value for _, value in leaves(expected) if isinstance(value, Tensor) and value.nbytes > 1000)
    position = start.file.read_bytes().index(bytes(tensor.reshape(-1).view(torch.uint8).tolist()))
    patched(position + 500)(start.file)
    assert_equal(expected, start())
    assert start.num_packings == 2


def test_another_models_file_under_this_name(llama: Path, start: Start) -> None:
    start()
    other = Start(llama, start.cache, digest="1" * 64)
    start.file.rename(start.cache.folder / f"{other.name.text}.packed")
    other()
    assert other.num_packings == 1


def test_everything_that_changes_bytes_changes_the_name(monkeypatch: pytest.MonkeyPatch) -> None:
    names = [Name.of(digest * 64, numerics) for digest in "01" for numerics in FORMS]
    names.append(Name.of("0" * 64, replace(FORMS[1], group=64)))
    names.append(Name.of("0" * 64, replace(INT8, dtype=torch.float32)))
    monkeypatch.setattr(packed_cache, "_sources", lambda: "another version's")
    names.append(Name.of("0" * 64, INT8))
    assert len({name.key for name in names}) == len({name.text for name in names}) == len(names)
    assert Name.of("0" * 64, INT8) == Name.of("0" * 64, replace(INT8, kv_dtype=torch.int8)), "KV is no weight"


# ---- the folder


def test_a_folder_that_cannot_be_made_costs_one_warning(llama: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "taken").write_text("a file")
    start = Start(llama, PackedCache(tmp_path / "taken" / "packed", min_bytes=0))
    assert_equal(start.packed(), start())
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "--packed-cache=off" in caplog.text


def test_weights_that_do_not_fit_are_not_written(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    start.cache = replace(start.cache, max_bytes=1000)
    assert_equal(start.packed(), start())
    assert not list(start.cache.folder.glob("*.packed"))
    assert "--packed-cache" in caplog.text


def test_what_was_not_used_for_longest_is_removed(llama: Path, cache: PackedCache) -> None:
    starts = [Start(llama, cache, digest=digest * 64) for digest in "abcd"]
    for start in starts[:3]:
        start()
    size = entries(cache.folder)[0].num_bytes
    for age, start in enumerate(starts[:3]):
        used_at = time.time() - 1000 + age
        os.utime(cache.folder / f"{start.name.text}.json", (used_at, used_at))
    starts[0]()  # a use
    starts[3].cache = replace(cache, max_bytes=3 * size)
    starts[3]()
    kept = {entry.path.name[0] for entry in entries(cache.folder)}
    assert kept == {"a", "c", "d"}
    assert {path.name[0] for path in cache.folder.iterdir() if not path.name.endswith(".lock")} == kept  # others may hold locks


def test_what_was_not_used_for_a_month_is_removed_though_there_is_room(llama: Path, cache: PackedCache) -> None:
    starts = [Start(llama, cache, digest=digest * 64) for digest in "abc"]
    for start, days in zip(starts[:2], (31, 29), strict=True):
        start()
        used_at = time.time() - days * 24 * 3600
        os.utime(cache.folder / f"{start.name.text}.json", (used_at, used_at))
    starts[2]()
    assert {entry.path.name[0] for entry in entries(cache.folder)} == {"b", "c"}


def test_what_a_killed_process_left_is_removed(start: Start) -> None:
    start.cache.folder.mkdir()
    left = start.cache.folder / f".{start.name.text}.writing-xyz"
    left.write_bytes(b"half")
    start()
    assert not left.exists()


def test_no_process_writes_to_the_file_by_mistake(start: Start) -> None:
    start()
    assert start.file.stat().st_mode & 0o222 == 0


def test_a_file_that_others_could_have_written_is_not_trusted(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    start()
    start.file.chmod(0o460)
    start()
    assert start.num_packings == 2 and "can be written by other users" in caplog.text
    if os.geteuid() == 0:  # nobody else can give files away
        os.chown(start.file, 12345, -1)
        start()
        assert start.num_packings == 3 and "belongs to user 12345" in caplog.text


def test_pages_of_the_file_are_counted(start: Start) -> None:
    assert start.packed().mapped_bytes == 0
    start()
    assert start().mapped_bytes in (0, start.file.stat().st_size)  # 0: copied, where files have no large pages


def test_small_weights_are_not_kept(llama: Path, tmp_path: Path) -> None:
    start = Start(llama, PackedCache(tmp_path / "packed"))
    start()
    assert not start.cache.folder.exists()


def test_off() -> None:
    assert PackedCache.configured("off") is None
    assert PackedCache.configured("20") == PackedCache(cache_folder() / "packed", 20 * 10**9)


@pytest.mark.skipif(not HUGE_PAGES.is_there, reason="a copy would not be in large pages either, so all weights are shared")
def test_in_small_pages_weights_are_copied_or_shared_as_is_wanted(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files count as lying in small pages here, as they do on file systems without large ones."""
    monkeypatch.setattr(huge_pages, "_ENOUGH", 1.5)
    own, start.cache = start.cache, replace(start.cache, shares_small=True)
    shared = [start(), start()]  # the one that packs, too
    start.cache = own
    copied = start()
    size = start.file.stat().st_size
    assert [weights.mapped_bytes for weights in (*shared, copied)] == [size, size, 0]
    for weights in (*shared, copied):
        assert_equal(weights, start.packed())
    assert start.num_packings == 1


def test_settings_say_whether_small_pages_are_shared() -> None:
    for pages in ("large", "shared"):
        config = EngineConfig(model="m", packed_pages=pages)
        cache = PackedCache.configured(config.packed_cache, config.packed_pages)
        assert cache is not None and cache.shares_small == (pages == "shared")
    with pytest.raises(ValueError, match="packed_pages: 'small' is not known; give one of large, shared"):
        EngineConfig(model="m", packed_pages="small").validate()


def test_another_process_that_never_ends_packing_is_not_waited_for_longer_than_allowed(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    """This one packs for itself and writes nothing; the next one, when the other has gone, does."""
    patient, start.cache = start.cache, replace(start.cache, wait_s=0.3)
    with held_by_another(start) as other, caplog.at_level(logging.INFO):
        assert_equal(start(), start.packed())
        waiting, given_up = (record.message for record in caplog.records)
        assert f"process {other.pid} packs the same weights" in waiting and "after 0 s they are packed here" in waiting
        assert f"process {other.pid} has packed the same weights" in given_up and "--packed-cache=off" in given_up
        assert entries(start.cache.folder) == [] and start.num_packings == 1
    start.cache = patient
    assert_equal(start(), start.packed())
    assert start.file.exists() and start.num_packings == 2


def test_another_process_that_ends_in_time_is_waited_for(
    start: Start, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    with held_by_another(start) as other, caplog.at_level(logging.INFO):

        def end_other(_seconds: float) -> None:
            other.kill()
            other.wait()

        monkeypatch.setattr(time, "sleep", end_other)
        assert_equal(start(), start.packed())
    assert start.file.exists() and start.num_packings == 1
    assert f"process {other.pid} packs the same weights" in caplog.text and "not kept" not in caplog.text
