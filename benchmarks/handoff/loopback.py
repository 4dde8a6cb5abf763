"""The limit of a hand-off through sockets: iperf3 over loopback."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import time
from typing import Any

SECONDS = 2
_START_S = 5.0


def is_there() -> bool:
    """iperf3 is on PATH."""
    return shutil.which("iperf3") is not None


def iperf3_gb_s(num_connections: int) -> float:
    """10^9 bytes a second that arrive over so many connections. Raises RuntimeError with what iperf3 said."""
    port = _free_port()
    with subprocess.Popen(["iperf3", "--server", "--one-off", "--port", str(port)], stdout=subprocess.DEVNULL) as server:
        try:
            return _client(port, num_connections)
        finally:
            server.kill()


def _client(port: int, num_connections: int) -> float:
    command = ["iperf3", "--client", "127.0.0.1", "--port", str(port), "--time", str(SECONDS), "--json"]
    command += ["--parallel", str(num_connections)]
    deadline = time.monotonic() + _START_S
    while True:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        answer: dict[str, Any] = json.loads(done.stdout) if done.stdout else {"error": done.stderr}
        if "error" not in answer:
            return float(answer["end"]["sum_received"]["bits_per_second"]) / 8e9
        if "refused" not in answer["error"] or time.monotonic() > deadline:  # it may not listen yet
            raise RuntimeError(f"iperf3 failed: {answer['error']}")
        time.sleep(0.05)


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])
