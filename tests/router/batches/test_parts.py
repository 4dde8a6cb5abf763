"""The parts of batch files alone: multipart bodies, files of results, the folder."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import BinaryIO

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.api.batches.records import FORMAT, BatchRecord, FileRecord, new_id
from router.api.batches.results import BrokenResults, Result, Results
from router.api.batches.store import ABANDONED_S, KEPT_S, Store, now_s
from router.api.http.errors import HttpError
from router.api.http.multipart import MAX_HEADER_BYTES, MAX_PARTS, MultipartParser, PartBegun, boundary_of

BOUNDARY = b"xyz"
Parts = list[tuple[str, str | None, bytes]]


def encoded(parts: Parts) -> bytes:
    body = b""
    for name, filename, data in parts:
        more = "" if filename is None else f'; filename="{filename}"'
        body += b'--%b\r\ncontent-disposition: form-data; name="%b"%b\r\n\r\n%b\r\n' % (
            BOUNDARY,
            name.encode(),
            more.encode(),
            data,
        )
    return body + b"--%b--\r\n" % BOUNDARY


def pieces(data: bytes, cuts: list[int]) -> Iterator[bytes]:
    edges = sorted({0, len(data), *(cut % (len(data) + 1) for cut in cuts)})
    return (data[begin:end] for begin, end in pairwise(edges))


def parsed(data: Iterator[bytes] | list[bytes]) -> Parts:
    parser, found = MultipartParser(BOUNDARY), Parts()
    for piece in data:
        for event in parser.feed(piece):
            if isinstance(event, PartBegun):
                found.append((event.name, event.filename, b""))
            else:
                name, filename, before = found[-1]
                found[-1] = (name, filename, before + event)
    parser.finish()
    return found


NEAR = st.lists(st.sampled_from([b"\r", b"\n", b"-", b"--", b"xyz", b"\r\n--xy", b"\r\n--", b"a", b"\0"]), max_size=12).map(
    b"".join
)
NAMES = st.text("abc[]_", min_size=1, max_size=5)
PARTS = st.lists(st.tuples(NAMES, st.none() | NAMES, NEAR.filter(lambda data: b"\r\n--xyz" not in b"\r\n" + data)), max_size=4)


@given(PARTS, st.lists(st.integers(0, 10_000), max_size=20))
def test_a_multipart_body_reads_the_same_however_it_is_cut(parts: Parts, cuts: list[int]) -> None:
    assert parsed(pieces(encoded(parts), cuts)) == parts


def test_a_large_part_is_passed_on_as_it_comes() -> None:
    parser = MultipartParser(BOUNDARY)
    body = encoded([("file", "f", b"x" * 100_000)])
    most = 0
    for start in range(0, len(body), 1000):
        list(parser.feed(body[start : start + 1000]))
        most = max(most, len(parser._buffer))
    assert parser.is_complete and most < 1100


HEAD = b'--xyz\r\ncontent-disposition: form-data; name="a"'
WRONG = {
    b"": "ends before",
    HEAD: "ends before",
    HEAD + b"\r\n\r\nabc": "ends before",
    b"--xyz\r\n\r\n\r\nabc\r\n--xyz--": "no content-disposition",
    b"--xyz\r\ncontent-disposition: attachment; name=a\r\n\r\nabc\r\n--xyz--": "no content-disposition",
    b"--xyz and more\r\n": "followed by other text",
    HEAD + b"\r\ncontent-transfer-encoding: base64\r\n\r\n": "content-transfer-encoding",
    HEAD + b"\r\nx: " + b"y" * MAX_HEADER_BYTES: "headers of a part",
    b"--xyz" + b" " * (MAX_HEADER_BYTES + 1): "not followed by a line end",
    encoded([("a", None, b"")] * (MAX_PARTS + 1)): "parts",
}


@pytest.mark.parametrize("body", WRONG, ids=WRONG.values())
def test_a_wrong_multipart_body_is_refused_in_words(body: bytes) -> None:
    with pytest.raises(HttpError, match=WRONG[body]) as refused:
        parsed([body])
    assert refused.value.status == 400


@pytest.mark.parametrize(
    ("content_type", "status"),
    [("application/json", 415), ("multipart/form-data", 400), ("", 415), ("multipart/form-data; boundary=" + "x" * 71, 400)],
)
def test_a_wrong_content_type_is_refused(content_type: str, status: int) -> None:
    with pytest.raises(HttpError) as refused:
        boundary_of(content_type)
    assert refused.value.status == status


def good(custom_id: str) -> Result:
    return Result(
        custom_id, new_id("batch_req_"), {"status_code": 200, "request_id": "r", "body": {"usage": {"prompt_tokens": 3}}}
    )


def bad(custom_id: str) -> Result:
    return Result(custom_id, new_id("batch_req_"), None, {"code": "c", "message": "m"})


async def test_results_are_read_again_and_a_torn_line_is_dropped(tmp_path: Path) -> None:
    output, errors = tmp_path / "o", tmp_path / "e"
    results = Results(output, errors)
    await results.add([good("a"), bad("b")])
    await results.add([good("c")])
    await results.close()
    whole = output.read_bytes()
    for torn in (b'{"custom_id": "d", "resp', b'{"custom_id": "d", "response": null}'):  # the second lacks its line end only
        output.write_bytes(whole + torn)
        again = Results(output, errors)
        assert again.done == {"a", "b", "c"} and again.usage.input_tokens == 6
        assert again.counts(4).model_dump() == {"total": 4, "completed": 2, "failed": 1}
        await again.close()
        assert output.read_bytes() == whole
    again = Results(output, errors)
    await again.add([good("d")])
    await again.close()
    assert [json.loads(each)["custom_id"] for each in output.read_bytes().splitlines()] == ["a", "c", "d"]


@pytest.mark.parametrize("damaged", [b"{}\n", b"\0\0\0\n", b"[]\n", b'{"custom_id": 1, "response": null}\n'])
def test_a_damaged_line_of_results_is_named(tmp_path: Path, damaged: bytes) -> None:
    (tmp_path / "o").write_bytes(good("a").encoded() + damaged + good("b").encoded())
    with pytest.raises(BrokenResults, match="line 2 of the file of results o"):
        Results(tmp_path / "o", tmp_path / "e")


def on_a_full_disk() -> BinaryIO:
    return os.fdopen(os.open("/dev/full", os.O_WRONLY), "wb", buffering=0)


async def test_a_failed_write_leaves_whole_lines_and_fails_all_further_ones(tmp_path: Path) -> None:
    results = Results(tmp_path / "o", tmp_path / "e")
    results._output = on_a_full_disk()
    for _ in range(2):
        with pytest.raises(OSError, match="No space left"):
            await results.add([good("a")])
    await results.close()
    assert not results.done


def file_record(store: Store, **changed: object) -> FileRecord:
    record = FileRecord(
        format=FORMAT,
        id=new_id("file-"),
        tenant="t",
        filename="f",
        purpose="batch",
        bytes=1,
        created_at=now_s(),
        expires_at=now_s() + 60,
    ).model_copy(update=changed)
    upload = store.new_upload()
    upload.write_bytes(b"x")
    store.take_upload(upload, record)
    return record


def batch_record(store: Store, **changed: object) -> BatchRecord:
    record = BatchRecord(
        format=FORMAT, id=new_id("batch_"), tenant="t", endpoint="/v1/completions", input_file_id="", completion_window="1h",
        status="in_progress", created_at=now_s(), expires_at=now_s() + 3600, files_expire_after_s=60,
    ).model_copy(update=changed)  # fmt: skip
    store.write_batch(record)
    return record


def test_the_sweep_deletes_what_is_over_and_nothing_else(tmp_path: Path) -> None:
    store = Store(str(tmp_path))
    store.open()
    later = now_s() + KEPT_S + ABANDONED_S + 10
    used, over, kept = file_record(store), file_record(store), file_record(store, expires_at=later + 60)
    orphan, results = store.data_path("t", new_id("file-")), store.data_path("t", new_id("file-"))
    for path in (orphan, results, store.new_upload()):
        path.write_bytes(b"x")
    running = batch_record(store, input_file_id=used.id, output_file_id=results.stem)
    ended = batch_record(store, status="completed", completed_at=now_s())
    store.sweep(now_s() + 30)
    assert store.file_ids("t") == sorted([used.id, over.id, kept.id]) and orphan.exists() and len(store.batch_ids("t")) == 2
    store.sweep(later)
    assert store.file_ids("t") == sorted([used.id, kept.id]) and not store.data_path("t", over.id).exists()
    assert store.batch_ids("t") == [running.id] and ended.id not in store.batch_ids("t")
    assert results.exists() and not orphan.exists() and not list((tmp_path / "uploads").iterdir())


def test_the_lock_ends_with_its_holder(tmp_path: Path) -> None:
    store = Store(str(tmp_path))
    store.open()
    record = batch_record(store)
    held = store.lock(record)
    assert held is not None and store.lock(record) is None
    os.close(held)
    again = store.lock(record)
    assert again is not None
    os.close(again)


def test_files_belong_to_their_user_alone(tmp_path: Path) -> None:
    store = Store(str(tmp_path))
    store.open()
    record = file_record(store)
    state = next(tmp_path.glob(f"*/files/{record.id}.json"))
    assert state.stat().st_mode & 0o077 == 0 and state.parent.stat().st_mode & 0o077 == 0
