"""What a person sees while a model is fetched."""

from __future__ import annotations

import shutil
import sys
import time

_LINE_PERIOD_S = 5.0


class StderrProgress:
    """Shows messages on standard error: on a terminal one line that changes, else a line now and then.

    Messages with the same words before ": " are news of one step, such as "downloading x: 10 of 90 MB".
    """

    def __init__(self) -> None:
        self._is_terminal = sys.stderr.isatty()
        self._step: str | None = None
        self._shown_at = 0.0

    def __call__(self, message: str) -> None:
        step, has_news, _ = message.partition(": ")
        same_step, self._step = step == self._step, step
        if self._is_terminal:
            if has_news:  # a line that wraps cannot be overwritten
                message = message[: shutil.get_terminal_size().columns - 1]
            before = "\r\x1b[2K" if same_step else "\n" if self._shown_at else ""
            print(f"{before}{message}", end="", file=sys.stderr, flush=True)
        elif not same_step or time.monotonic() - self._shown_at >= _LINE_PERIOD_S:
            print(message, file=sys.stderr, flush=True)
        else:
            return
        self._shown_at = time.monotonic()

    def close(self) -> None:
        """Ends the changing line."""
        if self._is_terminal and self._shown_at:
            print(file=sys.stderr, flush=True)


def megabytes(num_bytes: int) -> str:
    """ "93 MB"."""
    return f"{num_bytes / 1e6:.0f} MB"
