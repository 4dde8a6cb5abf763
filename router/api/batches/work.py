"""The work on one batch: its input is checked, its lines run, their results are recorded, and the end is written down.

validating ─► in_progress ─► finalizing ─► completed, expired or cancelled
     └─► failed    └─► failed: the folder cannot be written

Every step may be repeated, because a router that takes the batch over begins with what the folder says. The caller holds the
batch's lock.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

from pdmesh.runtime.errors import MeshError
from router.api.batches.lines import Line, LineError, LineLimits, check_input, lines_of
from router.api.batches.records import FORMAT, BatchRecord, Ending, FileRecord, LineProblem, Status, new_id
from router.api.batches.results import BrokenResults, Result, Results
from router.api.batches.runner import LineAnswer, LineRunner
from router.api.batches.store import Store, now_s
from router.config import BatchConfig

WATCH_S = 0.5
"""How often the work looks for a client's wish to cancel, and writes its progress."""
MAX_PAUSE_S = 30.0
WRITE_AGAIN_S = 10.0
CHUNK = 256
NOT_RUN: dict[Ending, tuple[str, str]] = {
    "expired": ("batch_expired", "the completion window passed before this line had run"),
    "cancelled": ("batch_cancelled", "the batch was cancelled before this line had run"),
}

logger = logging.getLogger(__name__)


class BatchWork:
    """Work one batch until it has ended, or until `stop`."""

    def __init__(
        self, record: BatchRecord, store: Store, runner: LineRunner, config: BatchConfig, limits: LineLimits,
        clock: Callable[[], float] = time.time,
    ) -> None:  # fmt: skip
        self.record = record
        self._store = store
        self._runner = runner
        self._config = config
        self._limits = limits
        self._clock = clock
        self._is_stopping = False
        self._woken = asyncio.Event()
        self._source = asyncio.Lock()

    def wake(self) -> None:
        """Look at once whether a client has cancelled the batch."""
        self._woken.set()

    def stop(self) -> None:
        """Begin no further lines; `run` returns when those that run have ended."""
        self._is_stopping = True
        self._woken.set()

    async def run(self) -> None:
        """Work until the end of the batch, which may be a failure that its record explains."""
        try:
            await self._work()
        except FileNotFoundError as error:
            await self._fail("storage_error", f"a file of the batch is missing: {Path(str(error.filename)).name}")
        except OSError as error:
            await self._fail("storage_error", f"the batch folder of the router cannot be used: {error.strerror or error}")
        except BrokenResults as error:
            await self._fail("storage_error", str(error))
        except LineError as error:  # the input has changed since it was checked
            await self._fail("input_changed", error.problem.message)

    async def _work(self) -> None:
        if self.record.output_file_id is None and not await self._validate():
            return
        results = await asyncio.to_thread(self._open_results)
        try:
            ending = self.record.ending or await self._run_lines(results)
            if ending is not None:
                await self._write(ending=ending)
            if ending in NOT_RUN:
                await self._record_rest(results, ending)
        finally:
            await results.close()
        await self._progress(results)
        if ending is not None:
            await self._finish(ending, results)

    # The input.

    async def _validate(self) -> bool:
        """Check the input; return whether its lines are to run."""
        if (ending := self._ending()) is not None:
            await self._end(ending)
            return False
        path = self._store.data_path(self.record.tenant, self.record.input_file_id)
        total, problems = await asyncio.to_thread(check_input, path, self.record.endpoint, self._limits)
        if problems:
            await self._write(status="failed", failed_at=now_s(), errors=problems)
            return False
        counts = self.record.counts.model_copy(update={"total": total})
        ids = {"output_file_id": new_id("file-"), "error_file_id": new_id("file-")}
        await self._write(status="in_progress", in_progress_at=now_s(), counts=counts, **ids)
        return True

    def _lines(self) -> Iterator[Line]:
        path = self._store.data_path(self.record.tenant, self.record.input_file_id)
        return lines_of(path, self.record.endpoint, self._limits.max_body_bytes)

    # The lines.

    def _open_results(self) -> Results:
        assert self.record.output_file_id is not None and self.record.error_file_id is not None
        output, errors = (
            self._store.data_path(self.record.tenant, file_id)
            for file_id in (self.record.output_file_id, self.record.error_file_id)
        )
        return Results(output, errors)

    async def _run_lines(self, results: Results) -> Ending | None:
        """Run what has no result yet. Return how the batch ends; None: it has been stopped before its end."""
        lines = self._lines()
        with self._runner.keys.key_of(self.record.tenant) as key:
            lanes = [asyncio.create_task(self._lane(lines, results, key)) for _ in range(self._config.http_batch_concurrency)]
            everything = asyncio.gather(*lanes)
            try:
                return await self._watched(everything, results)
            finally:
                for lane in lanes:
                    lane.cancel()
                await asyncio.gather(*lanes, return_exceptions=True)
                with suppress(BaseException):
                    everything.exception()  # it has been raised, or does not matter any more

    async def _watched(self, everything: asyncio.Future[list[None]], results: Results) -> Ending | None:
        """Wait for the lines, for the end of the completion window, or for a client that cancels the batch."""
        while not everything.done() and not self._is_complete(results):
            if (ending := self._ending()) is not None:
                return ending
            self._woken.clear()
            await self._progress(results)
            waking = asyncio.create_task(self._woken.wait())
            await asyncio.wait((everything, waking), timeout=WATCH_S, return_when=asyncio.FIRST_COMPLETED)
            waking.cancel()
        if everything.done():
            everything.result()  # raises what has failed
        return "completed" if self._is_complete(results) else None

    def _is_complete(self, results: Results) -> bool:
        return len(results.done) >= self.record.counts.total

    def _ending(self) -> Ending | None:
        """Return whether the batch is to end before its lines have run."""
        if self._store.cancelled_at(self.record) is not None:
            return "cancelled"
        return "expired" if self._clock() >= self.record.expires_at else None

    async def _lane(self, lines: Iterator[Line], results: Results, key: str) -> None:
        """Run one line after the other."""
        while (line := await self._next(lines, results)) is not None:
            answer = await self._answered(line, key)
            if answer is None:
                return
            response: dict[str, object] = {"status_code": answer.status, "request_id": answer.request_id, "body": answer.body}
            await results.add([Result(line.custom_id, new_id("batch_req_"), response)])

    async def _next(self, lines: Iterator[Line], results: Results) -> Line | None:
        """Return the next line that has no result; None: there is none, or the work is to stop."""

        def read() -> Line | None:
            return next((line for line in lines if line.custom_id not in results.done), None)

        async with self._source:
            return None if self._is_stopping else await asyncio.to_thread(read)

    async def _answered(self, line: Line, key: str) -> LineAnswer | None:
        """Return the answer to a line, which is tried again while the mesh is overloaded; None: the work is to stop."""
        give_up = self._clock() + self._config.http_batch_retry_s
        pause_s = 0.0
        while True:
            answer = await self._runner.run(self.record.endpoint, line.body, key)
            if answer.retry_s is None or self._clock() >= give_up:
                return answer
            if self._is_stopping:
                return None
            pause_s = min(MAX_PAUSE_S, max(answer.retry_s, 2 * pause_s))
            await asyncio.sleep(pause_s * random.uniform(0.75, 1.25))

    async def _record_rest(self, results: Results, ending: Ending) -> None:
        """Record for every line without a result that it did not run."""
        code, message = NOT_RUN[ending]
        await results.settle()
        lines = self._lines()
        while True:
            rest = await asyncio.to_thread(_some_without, lines, results.done)
            if not rest:
                return
            error: dict[str, object] = {"code": code, "message": message}
            await results.add([Result(custom_id, new_id("batch_req_"), None, error) for custom_id in rest])

    # The record.

    async def _progress(self, results: Results) -> None:
        counts = results.counts(self.record.counts.total)
        if counts != self.record.counts:
            await self._write(counts=counts, usage=results.usage)

    async def _finish(self, ending: Ending, results: Results) -> None:
        """Show the files of results to the client, and end the batch."""
        await self._write(status="finalizing", finalizing_at=now_s())
        await self._show_files(has_output=results.has_output, has_errors=results.has_errors)
        await self._end(ending)

    async def _show_files(self, *, has_output: bool, has_errors: bool) -> None:
        shown = {"output_file_id": has_output, "error_file_id": has_errors}
        for name, has_lines in shown.items():
            file_id = getattr(self.record, name)
            if has_lines:
                await asyncio.to_thread(self._show_file, file_id, name.removesuffix("_file_id"))
            else:
                await asyncio.to_thread(self._store.data_path(self.record.tenant, file_id).unlink, missing_ok=True)
        self.record = self.record.but(**{name: None for name, has_lines in shown.items() if not has_lines})

    def _show_file(self, file_id: str, what: str) -> None:
        size = self._store.data_path(self.record.tenant, file_id).stat().st_size
        created = now_s()
        self._store.write_file(
            FileRecord(
                format=FORMAT, id=file_id, tenant=self.record.tenant, filename=f"{self.record.id}_{what}.jsonl",
                purpose="batch_output", bytes=size, created_at=created, expires_at=created + self.record.files_expire_after_s,
            )
        )  # fmt: skip

    async def _end(self, ending: Ending) -> None:
        cancelled = {"cancelling_at": self._store.cancelled_at(self.record)} if ending == "cancelled" else {}
        await self._write(status=ending, **{f"{ending}_at": now_s()}, **cancelled)

    async def _fail(self, code: str, message: str) -> None:
        """End the batch as failed. Where not even that can be written, this router tries again and says so meanwhile; after its
        end the batch goes on from the last state that is on disk."""
        logger.error("batch %s has failed: %s", self.record.id, message)
        problem = LineProblem(code=code, message=message)
        self.record = self.record.but(status="failed", failed_at=now_s(), errors=[problem])
        while not self._is_stopping:
            try:
                await self._show_what_there_is()
                await self._write()
                return
            except OSError as error:
                logger.error("the state of batch %s cannot be written: %s; trying again", self.record.id, error)
                with suppress(TimeoutError):
                    self._woken.clear()
                    async with asyncio.timeout(WRITE_AGAIN_S):
                        await self._woken.wait()

    async def _show_what_there_is(self) -> None:
        if self.record.output_file_id is None or self.record.error_file_id is None:
            return
        with suppress(FileNotFoundError, MeshError):
            sizes = [
                self._store.data_path(self.record.tenant, file_id).stat().st_size
                for file_id in (self.record.output_file_id, self.record.error_file_id)
            ]
            await self._show_files(has_output=sizes[0] > 0, has_errors=sizes[1] > 0)

    async def _write(self, status: Status | None = None, **changed: object) -> None:
        if status is not None:
            changed["status"] = status
        record = self.record.but(**changed)
        await asyncio.to_thread(self._store.write_batch, record)
        self.record = record  # clients see nothing that is not on disk


def _some_without(lines: Iterator[Line], done: set[str]) -> list[str]:
    found: list[str] = []
    for line in lines:
        if line.custom_id not in done:
            found.append(line.custom_id)
        if len(found) == CHUNK:
            break
    return found
