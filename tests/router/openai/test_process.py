"""The router as a process: its ready line names the URL, SIGTERM ends it, a port in use is one line and exit code 2."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path


def test_starts_with_http_and_stops_on_sigterm(model_folder: Path) -> None:
    command = [sys.executable, "-m", "router", "--port", "0", "--models", f"tiny={model_folder}", "--exit-with-parent"]
    process = subprocess.Popen([*command, "--http-port", "0"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        url = json.loads(process.stdout.readline())["http_url"]
        with urllib.request.urlopen(f"{url}/health/live", timeout=10) as answer:
            assert json.load(answer) == {"status": "live"} and answer.headers["date"]
        taken = url.rpartition(":")[2]
        for flags, words in ((["--http-port", taken], f"port {taken} for HTTP"), (["--http-port=0", "--port", taken], "--port")):
            second = subprocess.run([*command, *flags], capture_output=True, text=True, timeout=60, check=False)
            assert second.returncode == 2 and words in second.stderr and "Traceback" not in second.stderr
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=20) == 0
    finally:
        process.kill()
        _, errors = process.communicate()
    assert "Traceback" not in errors and "never awaited" not in errors
