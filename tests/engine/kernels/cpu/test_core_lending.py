"""Workers lend each other cores: no result depends on it, nobody waits for a core that is its own, and nothing is left behind."""

from __future__ import annotations

import mmap
import os
import random
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from pdmesh.engine.kernels.cpu import build, core_table
from pdmesh.engine.kernels.cpu.core_table import MAGIC, MAX_SLOTS, NUM_BYTES, SLOT_BYTES, VERSION, CoreTable
from tests.engine.kernels.cpu.native_models import native, prompt
from tests.support.tiny_families import make_tiny_family
from tests.support.tiny_models import make_tiny_model

SOURCE = Path(__file__).with_name("team_check.cpp")
SLOT = struct.Struct("=QqQQqQQ")
FOREIGN = (4, 5)  # slots of nobody's here, which the test lends


@pytest.mark.parametrize(("options", "regions"), [((), 60), (("-fsanitize=thread", "-g"), 8)], ids=["plain", "tsan"])
def test_guests_come_and_go(options: tuple[str, ...], regions: int, tmp_path: Path) -> None:
    program = tmp_path / "team"
    command = [*build.Compiler.find().command, "-O2", "-std=c++20", "-pthread", *options, f"-I{build.SOURCES}", str(SOURCE)]
    compiled = subprocess.run([*command, "-o", str(program)], capture_output=True, text=True, check=False)
    if "tsan" in compiled.stderr and compiled.returncode:
        pytest.skip("the compiler has no library of the thread sanitizer")
    assert compiled.returncode == 0, compiled.stderr
    done = subprocess.run([program, str(regions)], capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    _, joined, _, late = done.stdout.split()
    assert int(joined) > int(late) > 0


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "cores")


class Lender:
    """Another worker, which has two cores: it lends them and wants them back at any moment."""

    def __init__(self, path: str) -> None:
        with open(path, "r+b") as file:
            self.memory = mmap.mmap(file.fileno(), NUM_BYTES)
        struct.pack_into("=I", self.memory, len(MAGIC) + 4, max(FOREIGN) + 1)
        for slot in FOREIGN:
            SLOT.pack_into(self.memory, SLOT_BYTES * (1 + slot), 1, 0, 0, 0, slot % 2, 0, 0)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Lender:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        chance = random.Random(3)
        while not self._over.wait(chance.random() / 500):
            for slot in FOREIGN:
                self._write(slot, 1, chance.choice([0, 0, 1]) * (time.monotonic_ns() // 1_000_000 + 5))

    def _write(self, slot: int, is_owned: int, wanted_until: int) -> None:
        struct.pack_into("=Qq", self.memory, SLOT_BYTES * (1 + slot), is_owned, wanted_until)

    @property
    def borrowed(self) -> list[tuple[int, int, int]]:
        """Of each slot: the present borrower's mark, how often it was borrowed, and for how many milliseconds."""
        slots = [SLOT.unpack_from(self.memory, SLOT_BYTES * (1 + slot)) for slot in FOREIGN]
        return [(slot[2], slot[3], slot[5]) for slot in slots]


@pytest.mark.parametrize(
    ("kind", "fields", "weights", "kv_dtype"),
    [
        ("qwen3", {}, "int8", "bfloat16"),
        ("mixtral", {}, "int4", "int8"),
        ("deepseek_v2", {"q_lora_rank": 32, "qk_rope_head_dim": 32, "head_dim": 32}, "int8", "bfloat16"),
    ],
    ids=["dense", "experts", "latent"],
)
def test_borrowed_cores_change_no_bit(
    kind: str, fields: dict[str, int], weights: str, kv_dtype: str, path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CoreTable, "max_guests", 2)
    folder = make_tiny_family(tmp_path, kind, **fields)
    prompts = [prompt(length) for length in (1, 2, 17, 120, 300)]
    alone = native(folder, weights, kv_dtype=kv_dtype)
    expected = [alone.logits(tokens) for tokens in prompts]
    loop = native(folder, weights, kv_dtype=kv_dtype, core_table=path)
    with Lender(path) as lender:
        for _ in range(6):
            for tokens, logits in zip(prompts, expected, strict=True):
                assert torch.equal(loop.logits(tokens), logits)
        borrowed = lender.borrowed
    assert sum(times for _, times, _ in borrowed) > 0
    assert all(mark == 0 for mark, _, _ in borrowed), "a core was not given back after the last step"
    seconds = loop.loaded.core_seconds()
    assert seconds is not None and (seconds.lent, seconds.borrowed) == (0, sum(ms for _, _, ms in borrowed) / 1e3)
    assert alone.loaded.core_seconds() is None


def test_cores_without_an_owner_are_borrowed_as_far_as_there_are_cores(
    path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """As of workers that are yet to start, or that were removed."""
    monkeypatch.setattr(CoreTable, "max_guests", 3)
    folder = make_tiny_model(tmp_path, "llama")
    reference = native(folder)
    loop = native(folder, core_table=path, shared_cores=3)
    file = os.open(path, os.O_RDWR)  # closed at the end: with any descriptor of the file, a process closes its locks
    request.addfinalizer(lambda: os.close(file))

    def times_borrowed(num_tokens: int) -> list[int]:
        """After steps of a size that was not seen before: of these the first two are alone, and the next two ask for cores."""
        expected = reference.logits(prompt(num_tokens))
        for _ in range(4):
            assert torch.equal(loop.logits(prompt(num_tokens)), expected)
        loop.loaded.rest()
        slots = [SLOT.unpack(os.pread(file, SLOT.size, SLOT_BYTES * (1 + slot))) for slot in range(6)]
        assert all(slot[2] == 0 for slot in slots), "a core was not given back after the last step"
        return [slot[3] for slot in slots]

    alone = times_borrowed(300)
    assert alone[0] == 0 < min(alone[1:3]), "three cores, one of which is its own"
    assert alone[3:] == [0, 0, 0]
    other = request.getfixturevalue("other")
    assert other.stdout.readline() == "1\n", "of three cores, a second worker has two"
    for computes, num_tokens, is_borrowed in ((1, 100, False), (0, 40, True)):
        for slot in (1, 2):
            until_ms = computes * (time.monotonic_ns() // 1_000_000 + 600_000)
            os.pwrite(file, struct.pack("=q", until_ms), SLOT_BYTES * (1 + slot) + 8)
        found = times_borrowed(num_tokens)
        assert [times > 0 for times in found[1:3]] == [is_borrowed] * 2, "while its owner computes, a core is not lent"
        assert found[3:] == [0, 0, 0], "three cores, each of which has an owner"


def test_the_most_cores_that_a_worker_names_count_while_there_are_workers(path: str, request: pytest.FixtureRequest) -> None:
    CoreTable(path, 1, 9).close()
    other = request.getfixturevalue("other")  # names none
    assert other.stdout.readline() == "0\n"
    for named, counted in ((4, 4), (2, 4)):
        CoreTable(path, 1, named).close()
        assert struct.unpack_from("=II", Path(path).read_bytes(), len(MAGIC) + 4) == (3, counted), "9 was of those before"


def test_a_table_of_another_version_is_refused_while_it_has_owners_and_else_begun_anew(
    path: str, other: subprocess.Popen[str]
) -> None:
    """As after an update, where a file in /dev/shm outlives all workers."""
    assert other.stdout is not None
    assert other.stdout.readline() == "0\n"
    with open(path, "r+b") as file:
        file.seek(len(MAGIC))
        file.write(struct.pack("=III", VERSION + 1, 4096, 4096))
    with pytest.raises(ValueError, match=f"core_table: .* is no table of cores of version {VERSION}"):
        CoreTable(path, 1)
    other.kill()
    other.wait()
    CoreTable(path, 1).close()
    assert struct.unpack_from("=III", Path(path).read_bytes(), len(MAGIC)) == (VERSION, 1, 0)


@pytest.fixture
def other(path: str) -> Iterator[subprocess.Popen[str]]:
    """A process that has two slots, tells which, and waits."""
    module = CoreTable.__module__
    code = f"from {module} import CoreTable; table = CoreTable({path!r}, 2); print(table.first, flush=True); input()"
    process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    yield process
    process.kill()
    process.wait()


def test_slots_of_a_process_that_was_killed_are_taken_again(other: subprocess.Popen[str], path: str) -> None:
    assert other.stdout is not None
    first = int(other.stdout.readline())
    own = CoreTable(path, 1)
    assert (first, own.first) == (0, 2)
    other.kill()
    other.wait()
    own.close()
    own.close()
    again = CoreTable(path, 3)
    assert again.first == 0
    again.close()


def test_what_was_lent_is_added_up_over_cores_and_begins_at_nothing(path: str) -> None:
    table = CoreTable(path, 2)
    with open(path, "r+b") as file, mmap.mmap(file.fileno(), NUM_BYTES) as memory:
        for slot, lent_ms, borrowed_ms in ((0, 1500, 250), (1, 500, 0)):
            SLOT.pack_into(memory, SLOT_BYTES * (1 + slot), 1, 0, 0, 7, -1, lent_ms, borrowed_ms)
        assert table.seconds() == (2.0, 0.25)
    table.close()
    again = CoreTable(path, 1)
    assert again.seconds() == (0, 0)
    again.close()


@pytest.mark.parametrize("max_guests", [0, 1])
def test_while_an_owner_computes_its_cores_are_wanted(
    max_guests: int, path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CoreTable, "max_guests", max_guests)
    loop = native(make_tiny_model(tmp_path, "llama"), core_table=path)

    def wanted_until() -> int:
        return int(SLOT.unpack_from(Path(path).read_bytes(), SLOT_BYTES)[1])

    assert wanted_until() == 0
    loop.logits(prompt(5))
    assert wanted_until() > time.monotonic_ns() // 1_000_000
    loop.loaded.rest()
    assert wanted_until() == 0


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"x", f"has 1 bytes, a table of cores has {NUM_BYTES}"),
        (b"x" * NUM_BYTES, f"is no table of cores of version {VERSION}"),
    ],
)
def test_a_file_that_is_no_table_is_refused(content: bytes, problem: str, path: str) -> None:
    Path(path).write_bytes(content)
    with pytest.raises(ValueError, match=rf"core_table: .*{problem}"):
        CoreTable(path, 1)


def test_what_cannot_be_had_is_said(path: str) -> None:
    with pytest.raises(ValueError, match=f"core_table: no room for {MAX_SLOTS + 1} threads"):
        CoreTable(path, MAX_SLOTS + 1)
    with pytest.raises(ValueError, match=r"core_table: .*/nowhere/cores: No such file or directory; give one"):
        CoreTable(str(Path(path).parent / "nowhere" / "cores"), 1)


def test_a_table_is_joined_once_and_nobody_else_may_write_it(path: str) -> None:
    table = CoreTable(path, 1)
    with pytest.raises(ValueError, match="core_table: this process has joined"):
        CoreTable(path, 1)
    table.close()
    Path(path).chmod(0o666)
    with pytest.raises(ValueError, match=r"core_table: .* others may write it; give a file of this user's own"):
        CoreTable(path, 1)


def test_guests_are_as_many_as_other_cores(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core_table, "process_cores", lambda: list(range(8)))
    table = CoreTable(path, 3)
    for quota, expected in ((None, 5), (4, 1), (2, 0)):
        monkeypatch.setattr(core_table, "quota_cores", lambda quota=quota: quota)
        assert table.max_guests == expected
    table.close()
