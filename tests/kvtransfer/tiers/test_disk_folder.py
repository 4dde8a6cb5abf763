"""The folder of the tier on disk, as the world leaves it: full, shared with strangers, older and later versions, unreadable."""

from __future__ import annotations

import errno
import logging
import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from kvtransfer.tiers.backends import disk, index
from kvtransfer.tiers.backends.block_file import relative_path
from tests.kvtransfer.tiers.blocks import FILE, IDENTITY, block, chain, content_of, files_in, opened, path_of


def test_no_file_is_removed_while_the_event_loop_may_want_the_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    older, names = opened(tmp_path, identity=b"older mo"), chain(4)
    for number, name in enumerate(names):
        older.write(name, block(number), 0.0)
    tier, unlink = opened(tmp_path, max_blocks=2), Path.unlink
    was_locked: list[bool] = []

    def watched(path: Path, missing_ok: bool = False) -> None:
        was_locked.append(tier._lock.locked())
        unlink(path, missing_ok)

    monkeypatch.setattr(Path, "unlink", watched)
    for number, name in enumerate([*names, *chain(2, b"b")]):
        tier.write(name, block(number), 0.0)
    assert len(was_locked) > 4 and not any(was_locked)


def test_older_models_with_more_than_the_bound_go_until_it_holds(tmp_path: Path) -> None:
    older = opened(tmp_path, identity=b"older mo")
    for number, name in enumerate(chain(9)):
        older.write(name, block(number), 0.0)
    tier, names = opened(tmp_path, max_blocks=4), chain(5)
    assert tier.max_bytes == 0 and tier.lacks(names) == names
    tier.write(names[0], block(0), 0.0)
    assert len(files_in(tmp_path)) == 4 and tier.holds(names[:1]) == [True] and tier.max_bytes == FILE


def test_many_files_that_are_given_up_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """More than one hold of the lock gives up, both of others and of its own."""
    monkeypatch.setattr(disk, "MOST_VICTIMS", 2)
    monkeypatch.setattr(index, "MOST_VICTIMS", 2)
    older = opened(tmp_path, identity=b"older mo", max_blocks=30)
    before = opened(tmp_path, max_blocks=30)
    for number, name in enumerate(chain(7)):
        older.write(name, block(number), 0.0)
        before.write(name, block(number), 0.0)
    tier = opened(tmp_path, max_blocks=2)
    tier.write(chain(1, b"b")[0], block(9), 0.0)
    tier.check()
    assert len(files_in(tmp_path)) == 2 and tier.num_bytes == 2 * FILE == tier.max_bytes


def test_what_cannot_be_read_is_passed_over_with_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    older, names = opened(tmp_path, identity=b"older mo"), chain(2)
    older.write(names[0], block(0), 0.0)
    closed = [tmp_path / "lost+found", tmp_path / b"closed i".hex(), tmp_path / IDENTITY.hex() / "ab"]
    for folder in closed:
        folder.mkdir(parents=True)
    for loop in (tmp_path / "loop", tmp_path / b"loop ide".hex(), path_of(tmp_path, chain(1, b"c")[0])):
        loop.parent.mkdir(exist_ok=True)
        loop.symlink_to(loop.name)
    scandir = os.scandir

    def refusing(path: str | Path) -> Iterator[os.DirEntry[str]]:  # root, as whom tests may run, reads everything
        if Path(path) in closed:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refusing)
    monkeypatch.setattr(disk, "RESCAN_S", -1.0)
    with caplog.at_level(logging.WARNING):
        tier = opened(tmp_path, max_blocks=3)
        for number, name in enumerate(names):
            tier.write(name, block(number), 0.0)
    assert tier.holds(names) == [True, True] and tier.max_bytes == 2 * FILE and tier.counts.num_failed == 0
    assert len(caplog.records) == 1 and "is passed over" in caplog.text and os.strerror(errno.EACCES) in caplog.text


def test_an_own_folder_that_cannot_be_listed_is_an_error(tmp_path: Path) -> None:
    (tmp_path / IDENTITY.hex()).write_text("a file")
    with pytest.raises(FileExistsError):
        opened(tmp_path)


def test_symlinks_are_not_followed(tmp_path: Path) -> None:
    elsewhere, folder, [name] = tmp_path / "elsewhere", tmp_path / "kv", chain(1)
    opened(elsewhere).write(name, block(1), 0.0)
    tier = opened(folder)
    path_of(folder, name).parent.mkdir()
    path_of(folder, name).symlink_to(path_of(elsewhere, name))
    (folder / b"other mo".hex()).symlink_to(elsewhere / IDENTITY.hex())
    tier.rescan()
    assert tier.holds([name]) == [False] and tier.max_bytes == 10 * FILE
    tier.write(name, block(2), 0.0)
    assert content_of(tier, name) == bytes(block(2).content) and content_of(opened(elsewhere), name) == bytes(block(1).content)
    path_of(folder, name).unlink()
    path_of(folder, name).symlink_to(path_of(elsewhere, name))
    assert tier.lend(name) is None and tier.counts.num_failed == 1
    shutil.rmtree(folder / IDENTITY.hex())
    (folder / IDENTITY.hex()).symlink_to(elsewhere / IDENTITY.hex())
    with pytest.raises(NotADirectoryError, match="is a symlink"):
        opened(folder)


def test_a_pipe_in_place_of_a_file_is_a_miss(tmp_path: Path) -> None:
    tier, [name] = opened(tmp_path), chain(1)
    tier.write(name, block(1), 0.0)
    path_of(tmp_path, name).unlink()
    os.mkfifo(path_of(tmp_path, name))
    assert tier.lend(name) is None and tier.counts.num_corrupt == 1


def test_a_file_of_others_that_cannot_be_removed_counts_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    older = opened(tmp_path, identity=b"older mo")
    for number, name in enumerate(chain(3)):
        older.write(name, block(number), 0.0)
    tier, names, unlink = opened(tmp_path, max_blocks=4), chain(4), Path.unlink

    def refusing(path: Path, missing_ok: bool = False) -> None:
        if b"older mo".hex() in str(path):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        unlink(path, missing_ok)

    monkeypatch.setattr(Path, "unlink", refusing)
    with caplog.at_level(logging.WARNING):
        for number, name in enumerate(names):
            tier.write(name, block(number), 0.0)
        tier.rescan()
        tier.write(chain(1, b"b")[0], block(5), 0.0)
    assert len(files_in(tmp_path)) == 4 and tier.max_bytes == FILE == tier.num_bytes and tier.counts.num_failed == 0
    assert len(caplog.records) == 1 and "cannot be removed" in caplog.text
    full = opened(tmp_path, max_blocks=3)
    full.write(names[0], block(0), 0.0)
    assert full.lacks(chain(1, b"c")) == [] and full.max_bytes == 0


def test_a_full_disk_does_not_end_the_tier(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where nothing of its own is stored; it grows back once the disk takes blocks again."""
    tier, names = opened(tmp_path), chain(40)

    def refuse(file: int, parts: Sequence[memoryview]) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "writev", refuse)
        for _ in range(30):
            tier.write(names[0], block(0), 0.0)
    assert tier.max_bytes == 2 * FILE
    monkeypatch.setattr(disk, "AGAIN_S", 0.0)
    monkeypatch.setattr(tier, "_grow_at", 0.0)
    monkeypatch.setattr(tier, "_not_before", 0.0)
    assert tier.lacks(names) == names
    bounds = []
    for number, name in enumerate(names):
        tier.write(name, block(number), 0.0)
        bounds.append(tier.max_bytes)
    assert bounds[0] == int(2.2 * FILE) + FILE and bounds[-1] == 10 * FILE and sorted(bounds) == bounds
    assert len(files_in(tmp_path)) == 10


def test_what_others_have_on_a_full_disk_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    older = opened(tmp_path, identity=b"older mo")
    for number, name in enumerate(chain(5)):
        older.write(name, block(number), 0.0)
    tier, names = opened(tmp_path), chain(20)
    for number, name in enumerate(names[:5]):
        tier.write(name, block(number), 0.0)

    def refuse(file: int, parts: Sequence[memoryview]) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "writev", refuse)
        tier.write(names[5], block(5), 0.0)
    for number, name in enumerate(names[5:], 5):
        tier.write(name, block(number), 0.0)
    assert tier.num_bytes == 8 * FILE and tier.max_bytes == int(0.9 * 9 * FILE)  # nine were there: one had made room


def test_a_block_that_is_written_again_while_it_is_lent_is_held(tmp_path: Path) -> None:
    tier, [name] = opened(tmp_path, max_blocks=1), chain(1)
    tier.write(name, block(1), 0.0)
    assert tier.lend(name) is not None
    path_of(tmp_path, name).unlink()
    tier.rescan()
    tier.write(name, block(1), 0.0)
    tier.give_back(name, is_damaged=False)
    tier.check()
    assert tier.lend(name) is not None
    tier.write(chain(1, b"b")[0], block(2), 0.0)
    assert tier.holds([name]) == [True]
    tier.give_back(name, is_damaged=False)
    tier.check()


@pytest.mark.parametrize(("mode", "owner", "why"), [(0o777, 0, "others"), (0o770, 0, "others"), (0o700, 1234, "user 1234")])
def test_a_folder_that_others_write_to_is_warned_of(
    tmp_path: Path, mode: int, owner: int, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    if owner and os.geteuid():
        pytest.skip("only root can give a folder to another user")
    folder = tmp_path / "kv"
    with caplog.at_level(logging.WARNING):
        opened(folder)
        assert not caplog.records
        folder.chmod(mode)
        if owner:
            os.chown(folder, owner, -1)
        opened(folder)
    assert len(caplog.records) == 1 and why in caplog.text and str(folder) in caplog.text and "not malice" in caplog.text


def test_a_new_folder_is_the_users_alone(tmp_path: Path) -> None:
    opened(tmp_path / "kv").write(chain(1)[0], block(1), 0.0)
    folders = [tmp_path / "kv", *(path for path in (tmp_path / "kv").rglob("*") if path.is_dir())]
    assert len(folders) == 3 and {path.stat().st_mode & 0o777 for path in folders} == {0o700}


@pytest.mark.parametrize("extra", [0, 100])
def test_a_file_of_a_later_version_is_left_alone(tmp_path: Path, extra: int, caplog: pytest.LogCaptureFixture) -> None:
    """It counts, goes before the tier's own, and is replaced where the block is written again."""
    tier, names = opened(tmp_path), chain(3)
    for number, name in enumerate(names[:2]):
        tier.write(name, block(number), 0.0)
    later = path_of(tmp_path, names[1])
    content = later.read_bytes()
    later.write_bytes(content[:8] + b"\x03\x00" + content[10:] + bytes(extra))
    with caplog.at_level(logging.WARNING):
        tier = opened(tmp_path, max_blocks=3)
        assert tier.lend(names[1]) is None
        tier.rescan()
        assert tier.holds(names[:2]) == [True, False] and tier.max_bytes == 2 * FILE - extra and later.exists()
        tier.write(names[1], block(1), 0.0)
        assert tier.max_bytes == 3 * FILE and content_of(tier, names[1]) == bytes(block(1).content)
        tier.write(names[2], block(2), 0.0)
        assert len(files_in(tmp_path)) == 3 and tier.holds(names) == [True] * 3
    assert tier.counts.num_corrupt == tier.counts.num_failed == 0 and not caplog.records


def test_a_file_of_a_later_version_goes_before_the_tiers_own(tmp_path: Path) -> None:
    tier, names = opened(tmp_path), chain(3)
    for number, name in enumerate(names[:2]):
        tier.write(name, block(number), 0.0)
    later = path_of(tmp_path, names[1])
    later.write_bytes(later.read_bytes().replace(b"\x01\x00", b"\x03\x00", 1) + b"more")
    tier = opened(tmp_path, max_blocks=2)
    tier.write(names[2], block(2), 0.0)
    assert not later.exists() and tier.holds(names) == [True, False, True]


def test_what_dead_workers_of_older_models_left_is_removed(tmp_path: Path) -> None:
    older, [name] = opened(tmp_path, identity=b"older mo"), chain(1)
    older.write(name, block(1), 0.0)
    folder = tmp_path / b"older mo".hex()
    partial = (folder / relative_path(name)).with_name(".half.17-0.partial")
    partial.write_bytes(b"half")
    empty = folder / "abcd"
    empty.mkdir()
    opened(tmp_path)
    assert partial.exists() and empty.exists()  # others may be at work
    for path in (partial, empty):
        os.utime(path, (0, 0))
    opened(tmp_path)
    assert not partial.exists() and not empty.exists() and (folder / relative_path(name)).exists()


def test_a_file_of_a_later_version_that_another_worker_replaced_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "is_installed", lambda: False)
    tier, other, [name] = opened(tmp_path), opened(tmp_path), chain(1)
    tier.write(name, block(1), 0.0)
    path, content = path_of(tmp_path, name), path_of(tmp_path, name).read_bytes()
    path.write_bytes(content[:8] + b"\x03\x00" + content[10:])
    assert tier.lend(name) is None
    tier.rescan()
    assert tier.holds([name]) == [False]
    other.write(name, block(1), 0.0)
    tier.rescan()
    assert content_of(tier, name) == bytes(block(1).content) and tier.max_bytes == 10 * FILE
