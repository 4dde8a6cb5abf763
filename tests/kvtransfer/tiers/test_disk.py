"""The tier on disk: what is written comes back, also to another process; what was damaged, cut short or moved never does."""

from __future__ import annotations

import errno
import logging
import os
import shutil
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from kvtransfer.tiers.backends import disk
from kvtransfer.tiers.backends.block_file import HEADER_BYTES, BlockHeader, name_of, relative_path
from kvtransfer.tiers.backends.coding import BlockForm
from kvtransfer.tiers.backends.disk import DiskTier
from pdmesh.engine.kv_cache.published_blocks import BlockName
from tests.kvtransfer.tiers.blocks import FILE, FORM, IDENTITY, SIZE, block, chain, content_of, files_in, opened, path_of


def test_blocks_come_back_also_to_a_later_process(tmp_path: Path) -> None:
    names, tier = chain(3), opened(tmp_path)
    for number, name in enumerate(names):
        tier.write(name, block(number), 0.0)
    assert [content_of(tier, name) for name in names] == [bytes(block(number).content) for number in range(3)]
    assert tier.take_changes() == names and tier.take_changes() == []
    later = opened(tmp_path)
    assert later.num_blocks == 3 and set(later.take_changes()) == set(names)
    assert content_of(later, names[2]) == bytes(block(2).content)
    assert (later.counts.num_read, later.counts.num_corrupt) == (1, 0)


def test_the_bound_is_kept_in_files_too(tmp_path: Path) -> None:
    tier = opened(tmp_path, max_blocks=4)
    names = [*chain(3), *chain(3, b"b"), *chain(3, b"c")]
    for number, name in enumerate(names):
        tier.write(name, block(number), 0.0)
        assert len(files_in(tmp_path)) <= 4
    assert tier.num_bytes == sum(path.stat().st_size for path in files_in(tmp_path)) == 4 * FILE
    assert tier.holds(names) == [True, False, False, True, False, False, True, True, False]


def test_another_worker_of_the_folder_finds_what_this_one_wrote_and_misses_what_it_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, theirs = opened(tmp_path), opened(tmp_path)
    [first, second] = chain(2)
    ours.write(first, block(1), 0.0)
    assert theirs.holds([first]) == [False]
    monkeypatch.setattr(disk, "RESCAN_S", -1.0)
    theirs.write(second, block(2), 0.0)
    assert theirs.holds([first, second]) == [True, True] and set(theirs.take_changes()) == {first, second}
    path_of(tmp_path, first).unlink()
    assert content_of(theirs, first) is None
    assert theirs.holds([first]) == [False] and theirs.counts.num_corrupt == theirs.counts.num_failed == 0
    assert theirs.take_changes() == [first]


def test_files_of_an_older_model_count_and_go_first(tmp_path: Path) -> None:
    older = opened(tmp_path, identity=b"older mo")
    for number, name in enumerate(chain(3)):
        older.write(name, block(number), 0.0)
    tier = opened(tmp_path, max_blocks=4)
    assert tier.num_blocks == 0 and tier.max_bytes == FILE
    for number, name in enumerate(chain(4)):
        tier.write(name, block(number), 0.0)
    assert tier.num_blocks == 4 and len(files_in(tmp_path)) == 4 and tier.max_bytes == 4 * FILE


def overwritten(at: int) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        with path.open("r+b") as file:
            file.seek(at)
            byte = file.read(1)
            file.seek(at)
            file.write(bytes([byte[0] ^ 0x10]))

    return damage


def cut(path: Path) -> None:
    os.truncate(path, FILE // 2)


def emptied(path: Path) -> None:
    os.truncate(path, 0)


def grown(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"more")


def zeroed(path: Path) -> None:
    """What a lost power supply may leave: the length, and none of the bytes."""
    path.write_bytes(bytes(FILE))


def from_another_model(path: Path) -> None:
    shutil.copy(path_with(b"other mo", chain(1)[0]), path)


def another_block(path: Path) -> None:
    shutil.copy(path_with(IDENTITY, chain(2)[1]), path)


def path_with(identity: bytes, name: BlockName) -> Path:
    folder = Path(os.environ["PYTEST_TIER_FOLDER"]) / identity.hex()
    path = folder / relative_path(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    tier = DiskTier(folder.parent, 10 * FILE, BlockForm(identity, SIZE))
    tier.write(name, block(77), 0.0)
    return path


@pytest.mark.parametrize(
    "damage",
    [
        *(overwritten(at) for at in (0, 9, 20, 40, 60, 90, HEADER_BYTES - 1)),
        cut,
        emptied,
        grown,
        zeroed,
        from_another_model,
        another_block,
    ],
)
def test_a_damaged_or_foreign_file_is_never_lent_and_is_counted_and_removed(
    tmp_path: Path, damage: Callable[[Path], None], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PYTEST_TIER_FOLDER", str(tmp_path / "elsewhere"))
    folder = tmp_path / "kv"
    name, tier = chain(1)[0], opened(folder)
    tier.write(name, block(1), 0.0)
    damage(path_of(folder, name))
    with caplog.at_level(logging.WARNING):
        assert tier.lend(name) is None
    assert tier.counts.num_corrupt == 1 and "is not used and is removed" in caplog.text
    assert tier.holds([name]) == [False] and files_in(folder) == []
    tier.write(name, block(1), 0.0)
    assert content_of(tier, name) == bytes(block(1).content)


def test_a_damaged_content_is_lent_with_the_sum_that_it_should_have(tmp_path: Path) -> None:
    name, tier = chain(1)[0], opened(tmp_path)
    tier.write(name, block(1), 0.0)
    overwritten(HEADER_BYTES + 17)(path_of(tmp_path, name))
    lent = tier.lend(name)
    assert lent is not None and lent.crc == block(1).crc and bytes(lent.content) != bytes(block(1).content)
    tier.give_back(name, is_damaged=True)
    assert tier.counts.num_corrupt == 1 and tier.holds([name]) == [False] and files_in(tmp_path) == []


def test_half_written_files_are_not_found_and_are_removed_later(tmp_path: Path) -> None:
    name, tier = chain(1)[0], opened(tmp_path)
    tier.write(name, block(1), 0.0)
    path = path_of(tmp_path, name)
    partial = path.with_name(".half.17-0.partial")
    shutil.copy(path, partial)
    path.unlink()
    assert opened(tmp_path).num_blocks == 0 and partial.exists()  # its writer may be at work
    os.utime(partial, (0, 0))
    assert opened(tmp_path).num_blocks == 0 and files_in(tmp_path) == []


def test_a_file_cut_short_before_the_start_is_removed_at_the_start(tmp_path: Path) -> None:
    name, tier = chain(1)[0], opened(tmp_path)
    tier.write(name, block(1), 0.0)
    cut(path_of(tmp_path, name))
    later = opened(tmp_path)
    assert later.num_blocks == 0 and later.counts.num_corrupt == 1 and files_in(tmp_path) == []


def test_strange_files_are_left_alone(tmp_path: Path) -> None:
    tier = opened(tmp_path)
    tier.write(chain(1)[0], block(1), 0.0)
    strange = [tmp_path / "notes.txt", tmp_path / IDENTITY.hex() / "zz" / "x.kv", tmp_path / IDENTITY.hex() / "README"]
    for path in strange:
        path.parent.mkdir(exist_ok=True)
        path.write_text("mine")
    later = opened(tmp_path, max_blocks=1)
    later.write(chain(3)[2], block(2), 0.0)
    assert all(path.read_text() == "mine" for path in strange)
    assert later.num_blocks == 1


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS, errno.EIO, errno.EACCES])
def test_a_disk_that_refuses_is_a_smaller_cache_and_one_warning(
    tmp_path: Path, code: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tier, names = opened(tmp_path), chain(6)
    for number, name in enumerate(names[:4]):
        tier.write(name, block(number), 0.0)

    def refuse(file: int, parts: Sequence[memoryview]) -> int:
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING):
        patch.setattr(os, "writev", refuse)
        tier.write(names[4], block(4), 0.0)
        assert tier.lacks(names[4:]) == []  # nothing is tried for a while
    assert len(caplog.records) == 1 and os.strerror(code) in caplog.text and str(tmp_path) in caplog.text
    assert tier.counts.num_failed == 1 and len(files_in(tmp_path)) == 4
    assert content_of(tier, names[0]) == bytes(block(0).content)
    monkeypatch.setattr(tier, "_not_before", time.monotonic() - 1)
    assert tier.lacks(names[4:]) == names[4:]
    tier.write(names[5], block(5), 0.0)
    assert tier.holds([names[5]]) == [True]
    assert len(files_in(tmp_path)) == (3 if code == errno.ENOSPC else 5)


def test_a_file_that_cannot_be_read_is_a_miss(tmp_path: Path) -> None:
    name, tier = chain(1)[0], opened(tmp_path)
    tier.write(name, block(1), 0.0)
    path = path_of(tmp_path, name)
    path.unlink()
    path.mkdir()
    assert tier.lend(name) is None and tier.counts.num_failed + tier.counts.num_corrupt == 1


def test_what_was_used_is_known_to_later_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "TOUCH_S", 0.0)
    (used, *_), (unused, *_) = chain(1), chain(1, b"other root")
    tier = opened(tmp_path)
    for name in (used, unused):
        tier.write(name, block(1), 0.0)
        os.utime(path_of(tmp_path, name), (1_000_000, 1_000_000 if name is unused else 999_000))
    content_of(tier, used)
    later = opened(tmp_path, max_blocks=2)
    later.write(chain(2)[1], block(2), 0.0)
    assert later.holds([used, unused]) == [True, False]


@pytest.mark.parametrize("text", ["x", "abc.kv", "ab.cd.kvx", "ab.c.kv", "AB.CD.kv", ".ab.cd.kv", "ab.cd.kv.partial"])
def test_names_that_are_no_blocks(text: str) -> None:
    assert name_of("ab", text) is None
    assert name_of("ab", "ab.cd.kv") == BlockName(b"\xab", b"\xcd", b"\xab") and name_of("x", "ab.cd.kv") is None


def test_a_header_says_all_that_it_was_made_of() -> None:
    for width, num_stored in ((0, 12), (2, 7)):
        header = BlockHeader(IDENTITY, b"r", b"h" * 32, 12, 0xFFFFFFFF, width, num_stored)
        assert BlockHeader.unpack(header.pack()) == header and len(header.pack()) == HEADER_BYTES


def test_a_bound_below_one_block_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="kv_disk_gb: 100 bytes"):
        DiskTier(tmp_path, 100, FORM)


def test_workers_that_share_a_folder_write_the_same_block_at_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Also those of one process, or of containers in which process ids are equal."""
    tiers, names = [opened(tmp_path, max_blocks=100) for _ in range(2)], chain(40)

    def write(tier: DiskTier) -> None:
        for number, name in enumerate(names):
            tier.write(name, block(number), 0.0)

    threads = [threading.Thread(target=write, args=(tier,)) for tier in tiers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not caplog.records and [tier.counts.num_written for tier in tiers] == [40, 40]
    assert [content_of(tiers[0], name) for name in names] == [bytes(block(number).content) for number in range(40)]
    assert len(files_in(tmp_path)) == 40


def test_a_worker_that_writes_nothing_learns_what_others_wrote(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs, [name] = opened(tmp_path), opened(tmp_path), chain(1)
    ours.write(name, block(1), 0.0)
    theirs.refresh()
    assert theirs.holds([name]) == [False]  # it has just looked
    monkeypatch.setattr(disk, "RESCAN_S", -1.0)
    theirs.refresh()
    assert theirs.holds([name]) == [True] and theirs.take_changes() == [name]


def test_what_another_worker_has_written_is_not_written_again(tmp_path: Path) -> None:
    ours, theirs, names = opened(tmp_path), opened(tmp_path), chain(3)
    ours.write(names[0], block(0), 0.0)
    ours.write(names[2], block(2), 0.0)
    overwritten(20)(path_of(tmp_path, names[2]))
    theirs.look(names)
    assert theirs.lacks(names) == [names[1]] and theirs.take_changes() == [names[0], names[2]]
    assert content_of(theirs, names[0]) == bytes(block(0).content)
    assert content_of(theirs, names[2]) is None  # its header is looked at when it is read
