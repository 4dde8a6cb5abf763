"""Shows a run's progress: a bar and a line that change on a terminal, or a line every ten seconds in a log."""

from __future__ import annotations

import asyncio
from collections import deque
from types import TracebackType
from typing import Self, TextIO

from rich.progress import BarColumn, TextColumn
from rich.progress import Progress as Bar

from pdmesh.loadtest.record import Outcome, Record
from pdmesh.loadtest.runner import Runner
from pdmesh.loadtest.stats import Latency
from pdmesh.terminal import console

_RECENT_S = 5.0
_FAILED = (Outcome.REFUSED, Outcome.TIMEOUT, Outcome.ERROR, Outcome.NOT_SENT)


class Progress:
    """Write to `stream` for as long as it is entered."""

    def __init__(self, stream: TextIO, runner: Runner, total_s: float, label: str = "") -> None:
        self._console = console(stream)
        columns = (BarColumn(bar_width=10), TextColumn("{task.description}", markup=False))
        self._bar = Bar(
            *columns,
            console=self._console,
            transient=True,
            auto_refresh=False,
            redirect_stdout=False,
            redirect_stderr=False,
            disable=not self._console.is_terminal,
        )
        self._shown = self._bar.add_task("", total=total_s)
        self._runner = runner
        self._total_s = total_s
        self._label = label
        self._seen = 0
        self._recent: deque[Record] = deque()
        self._num_ok = self._num_failed = 0
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self._write())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Leave the last line."""
        assert self._task is not None
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        self._bar.stop()
        self._console.print(self._line())

    async def _write(self) -> None:
        self._bar.start()
        while True:
            await asyncio.sleep(1.0 if self._console.is_terminal else 10.0)
            self._show()

    def _show(self) -> None:
        if self._console.is_terminal:
            self._bar.update(self._shown, description=self._line(), completed=self._now_s(), refresh=True)
        else:
            self._console.print(self._line())

    def _line(self) -> str:
        now_s = self._now_s()
        self._read(now_s)
        ttft = Latency.of(record.ttft_s for record in self._recent)
        rate = len(self._recent) / max(1e-9, min(_RECENT_S, now_s))
        return (
            f"{self._label}{min(now_s, self._total_s):.0f}/{self._total_s:.0f} s · {rate:.1f} answers/s"
            f" · {self._runner.log.num_running} running · {self._num_ok} ok · {self._num_failed} failed"
            f" · TTFT p50 {ttft.p50:.0f} p99 {ttft.p99:.0f} ms"
        )

    def _now_s(self) -> float:
        return self._runner.now_s() if self._runner.log.started_at else 0.0

    def _read(self, now_s: float) -> None:
        """Read the new records; keep those that ended lately."""
        records = self._runner.log.records
        for record in records[self._seen :]:
            self._num_ok += record.outcome is Outcome.OK
            self._num_failed += record.outcome in _FAILED
            self._recent.append(record)
        self._seen = len(records)
        while self._recent and self._recent[0].end_s < now_s - _RECENT_S:
            self._recent.popleft()
