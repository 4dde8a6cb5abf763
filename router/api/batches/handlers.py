"""The endpoints of `/v1/files` and `/v1/batches`. A tenant sees what is its own; anything else does not exist for it."""

from __future__ import annotations

import asyncio
import errno
import re
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Collection, Sequence
from functools import partial
from pathlib import Path
from typing import Literal, TypeVar

from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from pdmesh.runtime.errors import MeshError, ResourceExhausted
from router.api.batches import records, upload
from router.api.batches.records import FORMAT, MAX_EXPIRE_S, MIN_EXPIRE_S, BatchRecord, FileRecord, new_id
from router.api.batches.service import Batches
from router.api.batches.store import now_s
from router.api.http.body import HttpSettings, json_response, parsed, read_body
from router.api.http.connection import EventStream
from router.api.http.errors import HttpError
from router.api.http.fields import JsonObject
from router.api.http.headers import TENANT, authorization_of, options_of, request_id_of
from router.api.http.openapi import Endpoint
from router.api.http.types import Body, Text, checked
from router.api.validation import check_options, refuse
from router.auth import identity

DAY_S = 24 * 3600
FILES_EXPIRE_S = 30 * DAY_S
MAX_WINDOW_S = 30 * DAY_S
MAX_FILENAME_CHARS = 255
MAX_METADATA, MAX_KEY_CHARS, MAX_VALUE_CHARS = 16, 64, 512
READ_BYTES = 256 << 10
_WINDOW = re.compile(r"([0-9]{1,6})([smhd])")
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": DAY_S}
R = TypeVar("R", FileRecord, BatchRecord)


class ExpiresAfter(Body):
    """When a file is deleted."""

    anchor: Literal["created_at"]
    seconds: int = Field(ge=MIN_EXPIRE_S, le=MAX_EXPIRE_S)


class BatchBody(Body):
    """The body of POST /v1/batches."""

    input_file_id: Text
    endpoint: Text
    completion_window: Text
    metadata: dict[Text, Text] | None = None
    output_expires_after: ExpiresAfter | None = None


class Handlers:
    """Handle the endpoints of one router."""

    def __init__(self, batches: Batches, settings: HttpSettings) -> None:
        self._batches = batches
        self._store = batches.store
        self._config = batches.config
        self._settings = settings
        self._uploading: Counter[str] = Counter()

    # Files.

    async def create_file(self, request: Request) -> Response:
        """Handle POST /v1/files."""
        tenant = self._tenant_of(request)
        num_files = len(await asyncio.to_thread(self._store.file_ids, tenant)) + self._uploading[tenant]
        if num_files >= self._config.http_batch_files:
            raise ResourceExhausted(f"there are {num_files} files (http_batch_files); delete some")
        self._uploading[tenant] += 1
        path = self._store.new_upload()
        try:
            form = await upload.receive(request, path, self._config.http_batch_file_bytes)
            record = _file_of(tenant, form)
            await asyncio.to_thread(self._store.take_upload, path, record)
        except OSError as error:
            raise _storage_error(error) from error
        finally:
            self._uploading -= Counter({tenant: 1})  # keeps no tenant without uploads
            await asyncio.to_thread(upload.drop, path)
        return json_response(record.view())

    async def list_files(self, request: Request) -> Response:
        """Handle GET /v1/files."""
        tenant = self._tenant_of(request)
        query = _Query(request, ("after", "limit", "order", "purpose"))
        limit, newest_first = query.integer("limit", 10_000), query.one_of("order", ("desc", "asc")) == "desc"
        purpose = query.text("purpose")

        def read() -> JsonObject:
            ids = query.after(self._store.file_ids(tenant), newest_first=newest_first)
            return _page(
                ids, limit, lambda file_id: self._store.file(tenant, file_id), lambda file: purpose in ("", file.purpose)
            )

        return json_response(await asyncio.to_thread(read))

    async def get_file(self, request: Request) -> Response:
        """Handle GET /v1/files/{file_id}."""
        return json_response((await self._file_of(request)).view())

    async def get_content(self, request: Request) -> Response:
        """Handle GET /v1/files/{file_id}/content."""
        file = await self._file_of(request)
        return _Content(_pieces(self._store.data_path(file.tenant, file.id)))

    async def delete_file(self, request: Request) -> Response:
        """Handle DELETE /v1/files/{file_id}: a file that an unfinished batch reads stays."""
        file = await self._file_of(request)
        users = await asyncio.to_thread(
            lambda: [each.id for each in self._store.unfinished(file.tenant, set()) if each.input_file_id == file.id]
        )
        if users:
            raise HttpError(409, f"file_id: batch {users[0]} still reads it; wait for its end, or cancel it", param="file_id")
        await asyncio.to_thread(self._store.delete_file, file.tenant, file.id)
        return json_response({"id": file.id, "object": "file", "deleted": True})

    # Batches.

    async def create_batch(self, request: Request) -> Response:
        """Handle POST /v1/batches."""
        tenant = self._tenant_of(request)
        sent = await read_body(request, self._settings.max_body_bytes)
        record = _batch_of(tenant, await parsed(lambda body: checked(BatchBody, body), sent), self._batches.runner.endpoints)
        file = await asyncio.to_thread(self._named_input, tenant, record.input_file_id)
        if file.purpose != "batch":
            refuse("input_file_id", f'is a file of purpose "{file.purpose}"; upload one of purpose "batch"')
        try:
            await asyncio.to_thread(self._check_room, tenant)
            await asyncio.to_thread(self._store.write_batch, record)
        except OSError as error:
            raise _storage_error(error) from error
        self._batches.wake()
        return json_response(record.view())

    async def list_batches(self, request: Request) -> Response:
        """Handle GET /v1/batches: the newest first."""
        tenant = self._tenant_of(request)
        query = _Query(request, ("after", "limit"))
        limit = query.integer("limit", 100, default=20)

        def read() -> JsonObject:
            ids = query.after(self._store.batch_ids(tenant), newest_first=True)
            return _page(ids, limit, lambda batch_id: self._batches.latest(self._store.batch(tenant, batch_id)))

        return json_response(await asyncio.to_thread(read))

    async def get_batch(self, request: Request) -> Response:
        """Handle GET /v1/batches/{batch_id}."""
        return json_response((await self._batch_of(request)).view())

    async def cancel_batch(self, request: Request) -> Response:
        """Handle POST /v1/batches/{batch_id}/cancel."""
        batch = await self._batch_of(request)
        if batch.has_ended:
            raise HttpError(409, f"batch_id: the batch has ended already: it is {batch.status}", param="batch_id")
        try:
            await asyncio.to_thread(self._store.cancel, batch)
        except OSError as error:
            raise _storage_error(error) from error
        self._batches.wake(batch.id)
        return json_response((await asyncio.to_thread(self._store.seen, batch)).view())

    # What requests have in common.

    def _tenant_of(self, request: Request) -> str:
        """Return the tenant of the caller. Raises Unauthenticated, PermissionDenied, InvalidArgument."""
        identity.authenticate(self._settings.keys, authorization_of(request.headers))
        options = options_of(request.headers, request_id_of(request.scope))
        identity.claim(options)
        check_options(options)
        if not options.tenant.isprintable():
            refuse(TENANT, "is not printable; give the name of a tenant")
        return options.tenant

    async def _file_of(self, request: Request) -> FileRecord:
        return await asyncio.to_thread(self._store.file, self._tenant_of(request), request.path_params["file_id"])

    async def _batch_of(self, request: Request) -> BatchRecord:
        tenant = self._tenant_of(request)
        return self._batches.latest(await asyncio.to_thread(self._store.batch, tenant, request.path_params["batch_id"]))

    def _named_input(self, tenant: str, file_id: str) -> FileRecord:
        try:
            return self._store.file(tenant, file_id)
        except MeshError as error:
            message = f"input_{error.message}" if error.message.startswith("file_id") else error.message
            raise MeshError(message, code=error.code, field="input_file_id") from None

    def _check_room(self, tenant: str) -> None:
        most = self._config.http_batch_unfinished
        if sum(1 for _ in self._store.unfinished(tenant, set())) >= most:
            raise ResourceExhausted(f"{most} batches have not ended (http_batch_unfinished); wait for one, or cancel one")


def _file_of(tenant: str, form: upload.Form) -> FileRecord:
    """Return the record of an upload. Raises InvalidArgument."""
    known = {"purpose", "expires_after[anchor]", "expires_after[seconds]"}
    for name in form.fields:
        if name not in known:
            refuse(name[:40], "is not known here; leave it out")
    if form.filename is None:
        refuse("file", "is missing; send a part of that name, with a filename")
    if form.fields.get("purpose") != "batch":
        refuse("purpose", 'only "batch" is supported: files are the input of batches')
    created = now_s()
    filename = "".join(char for char in form.filename if char.isprintable())[:MAX_FILENAME_CHARS]
    return FileRecord(
        format=FORMAT, id=new_id("file-"), tenant=tenant, filename=filename, purpose="batch", bytes=form.size,
        created_at=created, expires_at=created + _expires_after_s(form.fields),
    )  # fmt: skip


def _expires_after_s(fields: dict[str, str]) -> int:
    anchor, seconds = fields.get("expires_after[anchor]"), fields.get("expires_after[seconds]")
    if anchor is None and seconds is None:
        return FILES_EXPIRE_S
    if anchor != "created_at":
        refuse("expires_after[anchor]", 'only "created_at" is supported')
    if seconds is None or not re.fullmatch(r"[0-9]{1,7}", seconds) or not MIN_EXPIRE_S <= int(seconds) <= MAX_EXPIRE_S:
        refuse("expires_after[seconds]", f"is not a number of seconds from {MIN_EXPIRE_S} to {MAX_EXPIRE_S}")
    return int(seconds)


def _batch_of(tenant: str, wanted: BatchBody, endpoints: Collection[str]) -> BatchRecord:
    """Return a new batch. Raises InvalidArgument."""
    if wanted.endpoint not in endpoints:
        refuse("endpoint", f"{wanted.endpoint[:80]!r} is none of {', '.join(endpoints)}")
    window = _WINDOW.fullmatch(wanted.completion_window)
    window_s = int(window[1]) * _SECONDS[window[2]] if window else 0
    if not 1 <= window_s <= MAX_WINDOW_S:
        refuse("completion_window", f'{wanted.completion_window[:40]!r} is not a time such as "24h" or "30m", at most 30d')
    _check_metadata(wanted.metadata or {})
    created, expires = now_s(), wanted.output_expires_after
    return BatchRecord(
        format=FORMAT, id=new_id("batch_"), tenant=tenant, endpoint=wanted.endpoint, input_file_id=wanted.input_file_id,
        completion_window=wanted.completion_window, status="validating", created_at=created, expires_at=created + window_s,
        files_expire_after_s=FILES_EXPIRE_S if expires is None else expires.seconds, metadata=wanted.metadata,
    )  # fmt: skip


def _check_metadata(metadata: dict[str, str]) -> None:
    if len(metadata) > MAX_METADATA:
        refuse("metadata", f"has {len(metadata)} pairs, {MAX_METADATA} are allowed")
    for key, value in metadata.items():
        if len(key) > MAX_KEY_CHARS or len(value) > MAX_VALUE_CHARS:
            where = f"metadata.{key[:MAX_KEY_CHARS]}"
            refuse(where, f"a key has at most {MAX_KEY_CHARS} characters, a value {MAX_VALUE_CHARS}")


def _storage_error(error: OSError) -> HttpError:
    what = "its disk is full" if error.errno in (errno.ENOSPC, errno.EDQUOT) else (error.strerror or str(error))
    return HttpError(507, f"the batch folder of the router cannot be written: {what}", code="storage_error")


class _Content(EventStream):
    """Send a file in pieces."""

    media_type = "application/jsonl"


async def _pieces(path: Path) -> AsyncGenerator[bytes, None]:
    file = await asyncio.to_thread(open, path, "rb")
    with file:
        while piece := await asyncio.to_thread(file.read, READ_BYTES):
            yield piece


class _Query:
    """The parameters of a list."""

    def __init__(self, request: Request, known: Sequence[str]) -> None:
        self._values = request.query_params
        for name in self._values:
            if name not in known:
                refuse(name[:40], f"is not known here; there are {', '.join(known)}")

    def text(self, name: str) -> str:
        return self._values.get(name, "")

    def integer(self, name: str, most: int, default: int | None = None) -> int:
        text = self._values.get(name)
        if text is None:
            return most if default is None else default
        if not re.fullmatch(r"[0-9]{1,6}", text) or not 1 <= int(text) <= most:
            refuse(name, f"{text[:40]!r} is not a number from 1 to {most}")
        return int(text)

    def one_of(self, name: str, known: Sequence[str]) -> str:
        text = self._values.get(name, known[0])
        if text not in known:
            refuse(name, f"{text[:40]!r} is none of {', '.join(known)}")
        return text

    def after(self, ids: Sequence[str], *, newest_first: bool) -> list[str]:
        """Return the ids behind `after`, in the order that is wanted. They sort by time, so `after` may have been deleted."""
        after = self.text("after")
        if newest_first:
            return [each for each in reversed(ids) if not after or each < after]
        return [each for each in ids if each > after]


def _page(
    ids: Sequence[str], limit: int, read: Callable[[str], R], wanted: Callable[[R], bool] = lambda record: True
) -> JsonObject:
    """Return a page of a list. What has been deleted meanwhile, or is broken, is left out: asked for alone it says why."""
    found: list[R] = []
    for each in ids:
        try:
            record = read(each)
        except MeshError:
            continue
        if wanted(record):
            found.append(record)
        if len(found) > limit:
            break
    shown = [record.view() for record in found[:limit]]
    first, last = (shown[0]["id"], shown[-1]["id"]) if shown else (None, None)
    return {"object": "list", "data": shown, "first_id": first, "last_id": last, "has_more": len(found) > limit}


def routes(batches: Batches, settings: HttpSettings) -> list[Route]:
    """Return the endpoints of files and batches."""
    handlers = Handlers(batches, settings)
    endpoint = partial(Endpoint, has_options=True)
    return [
        endpoint("/v1/files", handlers.create_file, "Send a file of requests", form=records.FileForm, answer=records.FileObject),
        endpoint("/v1/files", handlers.list_files, "The files that are here", method="GET", answer=records.FilePage),
        endpoint("/v1/files/{file_id}", handlers.get_file, "One of them", method="GET", answer=records.FileObject),
        endpoint("/v1/files/{file_id}", handlers.delete_file, "Delete it", method="DELETE", answer=records.DeletedFile),
        endpoint("/v1/files/{file_id}/content", handlers.get_content, "Its lines", method="GET", raw=_Content.media_type),
        endpoint("/v1/batches", handlers.create_batch, "Run the requests of a file", body=BatchBody, answer=records.BatchObject),
        endpoint("/v1/batches", handlers.list_batches, "The batches that are here", method="GET", answer=records.BatchPage),
        endpoint("/v1/batches/{batch_id}", handlers.get_batch, "One of them", method="GET", answer=records.BatchObject),
        endpoint("/v1/batches/{batch_id}/cancel", handlers.cancel_batch, "Stop it", answer=records.BatchObject),
    ]
