"""The results of a batch: one line of JSON for each line of the input, appended to two files and on disk before it counts.

A line of the output file is a response with status 200, one of the error file any other response, or a line that did not run.
After a crash the two files say which lines are done. What a power failure cut off in the middle is dropped, and runs again.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from router.api.batches.records import Counts, Usage
from router.api.http.fields import JsonObject

MAX_WAITING = 1024


@dataclass(frozen=True)
class Result:
    """Hold what became of a line. `response` is None where it did not run: then `error` says why."""

    custom_id: str
    id: str
    response: JsonObject | None
    error: JsonObject | None = None

    @property
    def is_output(self) -> bool:
        """Return whether it belongs into the output file."""
        return self.response is not None and self.response["status_code"] == 200

    def encoded(self) -> bytes:
        """Return it as a line of a file."""
        value = {"id": self.id, "custom_id": self.custom_id, "response": self.response, "error": self.error}
        return json.dumps(value, separators=(",", ":")).encode() + b"\n"


class BrokenResults(Exception):
    """Report a file of results with a line in its middle that is none."""


class Results:
    """Append results. One writer task puts all that wait on disk together."""

    def __init__(self, output: Path, errors: Path) -> None:
        """Open both files, and read what they hold. Blocks. Raises OSError, BrokenResults."""
        self.done: set[str] = set()
        self.usage = Usage()
        self._num_output, self._output = self._recovered(output)
        self._num_errors, self._errors = self._recovered(errors)
        self._waiting: asyncio.Queue[tuple[Sequence[Result], asyncio.Future[None]] | None] = asyncio.Queue(MAX_WAITING)
        self._writer: asyncio.Task[None] | None = None

    def counts(self, total: int) -> Counts:
        """Return how many lines have which result."""
        return Counts(total=total, completed=self._num_output, failed=self._num_errors)

    @property
    def has_output(self) -> bool:
        """Return whether the output file has a line."""
        return self._num_output > 0

    @property
    def has_errors(self) -> bool:
        """Return whether the error file has a line."""
        return self._num_errors > 0

    async def add(self, results: Sequence[Result]) -> None:
        """Return when the results are on disk. Raises OSError, then for every call."""
        if self._writer is None:
            self._writer = asyncio.create_task(self._write_all(), name="batch results")
        settled: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        await self._waiting.put((results, settled))
        await settled

    async def settle(self) -> None:
        """Return when everything that was added is on disk, by callers that were cancelled, too. Raises OSError."""
        await self.add(())

    async def close(self) -> None:
        """Write what waits, also for callers that were cancelled, and close both files."""
        if self._writer is not None:
            await self._waiting.put(None)
            await self._writer
        for file in (self._output, self._errors):
            with suppress(OSError):  # a write that failed has been reported
                file.close()

    async def _write_all(self) -> None:
        failure: OSError | None = None
        is_open = True
        while is_open:
            entries = [await self._waiting.get()]
            while not self._waiting.empty():
                entries.append(self._waiting.get_nowait())
            is_open = None not in entries
            wanted = [entry for entry in entries if entry is not None]
            if failure is None:
                failure = await asyncio.to_thread(self._append, [result for results, _ in wanted for result in results])
            for _, settled in wanted:
                if settled.cancelled():
                    continue
                if failure is None:
                    settled.set_result(None)
                else:
                    settled.set_exception(failure)

    def _append(self, results: Sequence[Result]) -> OSError | None:
        try:
            _settle(self._output, [result.encoded() for result in results if result.is_output])
            self._count([result for result in results if result.is_output])
            _settle(self._errors, [result.encoded() for result in results if not result.is_output])
            self._count([result for result in results if not result.is_output])
        except OSError as error:
            return error
        return None

    def _count(self, results: Sequence[Result]) -> None:
        for result in results:
            self._note(result.custom_id, result.response)
        num_output = sum(result.is_output for result in results)
        self._num_output += num_output
        self._num_errors += len(results) - num_output

    def _note(self, custom_id: str, response: object) -> None:
        self.done.add(custom_id)
        self.usage = self.usage.plus(_usage_of(response))

    def _recovered(self, path: Path) -> tuple[int, BinaryIO]:
        """Return the number of whole lines, and the file at their end."""
        number, end = 0, 0
        file = os.fdopen(os.open(path, os.O_CREAT | os.O_RDWR, 0o600), "r+b", buffering=0)
        with open(path, "rb") as reader:
            for raw in reader:
                if not raw.endswith(b"\n"):
                    break
                number += 1
                self._read(path, number, raw)
                end += len(raw)
        file.truncate(end)
        file.seek(end)
        return number, file

    def _read(self, path: Path, number: int, raw: bytes) -> None:
        try:
            value = json.loads(raw)
            custom_id = value["custom_id"]
            if not isinstance(custom_id, str):
                raise TypeError("custom_id is not a string")
            self._note(custom_id, value["response"])
        except (ValueError, TypeError, KeyError) as error:
            raise BrokenResults(f"line {number} of the file of results {path.name} is damaged ({error!r})") from None


def _settle(file: BinaryIO, lines: Sequence[bytes]) -> None:
    """Append lines, all or none, and put them on disk. Raises OSError."""
    if not lines:
        return
    start = file.tell()
    data = memoryview(b"".join(lines))
    try:
        while data:
            data = data[file.write(data) :]
        os.fsync(file.fileno())
    except OSError:
        with suppress(OSError):
            file.truncate(start)
        raise


def _usage_of(response: object) -> Usage:
    """Return the tokens that a response counts, by the names of either of OpenAI's APIs."""
    body = response.get("body") if isinstance(response, dict) else None
    usage = body.get("usage") if isinstance(body, dict) else None
    if not isinstance(usage, dict):
        return Usage()
    return Usage(
        input_tokens=_number(usage, "input_tokens", "prompt_tokens"),
        cached_tokens=_number(_inner(usage, "input_tokens_details", "prompt_tokens_details"), "cached_tokens"),
        output_tokens=_number(usage, "output_tokens", "completion_tokens"),
        reasoning_tokens=_number(_inner(usage, "output_tokens_details", "completion_tokens_details"), "reasoning_tokens"),
    )


def _number(values: JsonObject, *names: str) -> int:
    return next((value for name in names if isinstance(value := values.get(name), int)), 0)


def _inner(values: JsonObject, *names: str) -> JsonObject:
    return next((value for name in names if isinstance(value := values.get(name), dict)), {})
