"""What a run shows while it runs: a bar and a line that change on a terminal, or a line every ten seconds in a log."""

from __future__ import annotations

import asyncio
from collections import deque
from types import TracebackType
from typing import Self, TextIO

from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from pdmesh.loadtest.record import Outcome, Record
from pdmesh.loadtest.runner import Runner
from pdmesh.loadtest.stats import Latency
from pdmesh.terminal import console

_RECENT_S = 5.0
_BAR_WIDTH = 10
_FAILED = (Outcome.REFUSED, Outcome.TIMEOUT, Outcome.ERROR, Outcome.NOT_SENT)


class Progress:
    """Writes to `stream` for as long as it is entered."""

    def __init__(self, stream: TextIO, runner: Runner, total_s: float, label: str = "") -> None:
        self._console = console(stream)
        self._live = Live(console=self._console, transient=True, auto_refresh=False, redirect_stdout=False, redirect_stderr=False)
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
        """The last line stays."""
        assert self._task is not None
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        self._live.stop()
        self._console.print(self._line())

    async def _write(self) -> None:
        while True:
            await asyncio.sleep(1.0 if self._console.is_terminal else 10.0)
            if self._console.is_terminal:
                self._live.start()
                self._live.update(self._bar_and_line(), refresh=True)
            else:
                self._console.print(self._line())

    def _bar_and_line(self) -> Table:
        shown = Table.grid(padding=(0, 1, 0, 0))
        bar = ProgressBar(
            total=self._total_s,
            completed=self._now_s(),
            width=_BAR_WIDTH,
            style="faint",
            complete_style="good",
            finished_style="good",
        )
        shown.add_row(bar, Text(self._line(), no_wrap=True, overflow="ellipsis"))
        return shown

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
        """Takes in the records that are new; keeps those that ended lately."""
        records = self._runner.log.records
        for record in records[self._seen :]:
            self._num_ok += record.outcome is Outcome.OK
            self._num_failed += record.outcome in _FAILED
            self._recent.append(record)
        self._seen = len(records)
        while self._recent and self._recent[0].end_s < now_s - _RECENT_S:
            self._recent.popleft()
