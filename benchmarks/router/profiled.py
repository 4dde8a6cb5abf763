"""A router that samples itself, from SIGUSR1 on: `python -m benchmarks.router.profiled FILE ARGUMENTS OF THE ROUTER`.

The kernel's profiling timer counts CPU time of the whole process; each signal finds what the event loop's thread is at. A
profiler that hooks calls would charge the many small functions of this path for its own work. What runs in C counts for the
function of Python that called it: most of gRPC's core for `Handle._run`.
"""

from __future__ import annotations

import signal
import sys
from collections import Counter
from pathlib import Path
from types import FrameType

from router.main import main

PERIOD_S = 0.001
NUM_LINES = 45


class Samples:
    """Counts by the function that ran, and by every function that was on the stack."""

    def __init__(self) -> None:
        self.total = 0
        self._own: Counter[str] = Counter()
        self._with_callees: Counter[str] = Counter()

    def take(self, number: int, frame: FrameType | None) -> None:
        """The signal's handler."""
        stack = []
        while frame is not None:
            stack.append(name_of(frame))
            frame = frame.f_back
        self.total += 1
        self._own.update(stack[:1])
        self._with_callees.update(set(stack))

    def table(self) -> str:
        """Shares of all samples, largest first."""
        rows = [f"{self.total} samples of CPU time", *self._rows("by own time", self._own)]
        rows += self._rows("by time with callees", self._with_callees)
        return "\n".join(rows) + "\n"

    def _rows(self, title: str, counts: Counter[str]) -> list[str]:
        rows = [f"\n{title}\n\n  own  with callees  function"]
        for name, _ in counts.most_common(NUM_LINES):
            own, all_of_it = self._own[name] / self.total, self._with_callees[name] / self.total
            rows.append(f"{own:5.1%}  {all_of_it:12.1%}  {name}")
        return rows


def name_of(frame: FrameType) -> str:
    """package/module.py:function, without the machine's folders."""
    code = frame.f_code
    return f"{'/'.join(Path(code.co_filename).parts[-2:])}:{code.co_qualname}"


def run(path: Path) -> None:
    """The router's main; the table is written when it is stopped."""
    samples = Samples()
    signal.signal(signal.SIGPROF, samples.take)

    def begin(number: int, frame: FrameType | None) -> None:
        signal.setitimer(signal.ITIMER_PROF, PERIOD_S, PERIOD_S)

    signal.signal(signal.SIGUSR1, begin)  # once it is warm
    try:
        main()
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        path.write_text(samples.table())


if __name__ == "__main__":
    out = Path(sys.argv.pop(1))
    run(out)
