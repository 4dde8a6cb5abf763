"""Workers that end by themselves, forked from one process that has imported torch for all of them: two seconds less for each."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Sequence
from pathlib import Path

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["pdmesh.worker.main"])


def run_worker(flags: Sequence[str], scratch: Path, timeout_s: float = 60.0) -> tuple[int | None, str]:
    """Exit code of `python -m pdmesh.worker` with `flags`, and what it wrote to standard error."""
    errors = scratch / "stderr"
    process = _CONTEXT.Process(target=_work, args=(list(flags), str(errors)))
    process.start()
    process.join(timeout_s)
    process.kill()
    process.join()
    return process.exitcode, errors.read_text()


def _work(flags: list[str], errors: str) -> None:
    from pdmesh.worker.main import main

    with open(errors, "w") as file:
        os.dup2(file.fileno(), 2)
    main(flags)
