"""Where the CPU time of a router goes, to `benchmarks/results/router_profile.txt`: `python -m benchmarks.router.profile`."""

from __future__ import annotations

import signal
import tempfile
import time
from pathlib import Path

from benchmarks.harness import RESULTS, parser_of, running, say
from benchmarks.router.overhead import CLIENT, STEP_S, router, streams, write_model

SECONDS = 60.0
STOP = ("--drain-grace-s", 0, "--linger-s", 0)


def write_profile(seconds: float = SECONDS) -> Path:
    """Samples of 32 streams of 50 tokens/s, then of requests that follow each other as fast as they can."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_model(folder)
        text = "32 streams, one token per message, 50/s each\n" + _of_streams(folder, seconds)
        text += "\nrequests, REMOTE prefill, 128 tokens in, 8 out, 16 at a time\n" + _of_requests(folder, seconds)
    path = RESULTS / "router_profile.txt"
    path.write_text(text)
    say(f"wrote benchmarks/results/{path.name}")
    return path


def _of_streams(folder: Path, seconds: float) -> str:
    out = folder / "streams.txt"
    with router(folder, step_s=STEP_S, profile=out, settings=STOP) as (process, address), streams(address, 32):
        process.popen.send_signal(signal.SIGUSR1)
        time.sleep(seconds)
        process.popen.send_signal(signal.SIGTERM)
        process.popen.wait(10)
    return out.read_text()


def _of_requests(folder: Path, seconds: float) -> str:
    out = folder / "requests.txt"
    with router(folder, profile=out, settings=STOP) as (process, address):
        with running(CLIENT, "closed", "--address", address, "--seconds", seconds, "--count", 16) as client:
            process.popen.send_signal(signal.SIGUSR1)
            client.hear()
        process.popen.send_signal(signal.SIGTERM)
        process.popen.wait(10)
    return out.read_text()


if __name__ == "__main__":
    parser_of("benchmarks.router.profile", __doc__).parse_args()
    write_profile()
