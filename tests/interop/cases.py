"""What a child is asked and what it says. Only the standard library: it is imported in the environments of the clients.

The child is called as `python -m MODULE OPTIONS`, with JSON: {"address": "host:port", "model": …, "cases": [Case, …]}. It sends
the cases one after the other, streamed, the first one once more before (not counted: connections are made, caches
filled), and prints an Outcome for each as a line of JSON. It exits 0 also when requests fail: an outcome says so.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class Case:
    """One question and how the answer is drawn. `leave`: the child's process ends without a word at the first piece of output."""

    content: str
    max_tokens: int
    seed: int
    temperature: float
    leave: bool = False


@dataclass
class Outcome:
    """What the client saw: seconds to the first piece of output, and from it to the last; `error` is empty if it completed."""

    text: str = ""
    num_tokens: int = 0
    first_s: float = 0.0
    rest_s: float = 0.0
    error: str = ""

    @property
    def tpot_s(self) -> float:
        """Mean seconds for each token after the first."""
        return self.rest_s / max(1, self.num_tokens - 1)


class Stopwatch:
    """Times the streamed answer to a case: `piece` whenever output arrives."""

    def __init__(self, case: Case, clock: Callable[[], float] = time.perf_counter) -> None:
        self._leave = case.leave
        self._clock = clock
        self._began = self._first = self._last = clock()
        self._any = False

    def piece(self) -> None:
        """Output has arrived."""
        if self._leave:
            os._exit(0)
        self._last = self._clock()
        if not self._any:
            self._any, self._first = True, self._last

    def outcome(self, text: str, num_tokens: int) -> Outcome:
        """Of an answer that is complete."""
        return Outcome(text, num_tokens, self._first - self._began, self._last - self._first)


def serve(ask: Callable[[str, str, Case], Outcome]) -> None:
    """The main function of a child: `ask(address, model, case)` does one request. Its exceptions are outcomes."""
    options = json.loads(sys.argv[1])
    cases = [Case(**case) for case in options["cases"]]
    for case in (cases[0], *cases):
        try:
            outcome = ask(options["address"], options["model"], case)
        except Exception as error:  # noqa: BLE001 - the parent reports it
            outcome = Outcome(error=f"{type(error).__name__}: {error}"[:500])
        print(json.dumps(asdict(outcome)), flush=True)
