"""A real Prometheus for tests and measurements: started on a free port, asked over HTTP."""

from __future__ import annotations

import asyncio
import json
import math
import shutil
import socket
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

BINARY = shutil.which("prometheus")
_CONFIG = """\
global: {{scrape_interval: 1s, scrape_timeout: 1s, evaluation_interval: 1s}}
rule_files: {rules}
scrape_configs:
  - job_name: pdmesh
    file_sd_configs: [{{files: ["{targets}"], refresh_interval: 1s}}]
"""


class Prometheus:
    """One that runs, as process `pid`."""

    def __init__(self, url: str, pid: int) -> None:
        self.url = url
        self.pid = pid

    async def ask(self, path: str, **arguments: str) -> Any:
        """`data` of an answer. Raises AssertionError with what is wrong with the question."""
        return await asyncio.to_thread(self._ask, path, arguments)

    def _ask(self, path: str, arguments: dict[str, str]) -> Any:
        try:
            with urllib.request.urlopen(f"{self.url}/api/v1/{path}?{urllib.parse.urlencode(arguments)}", timeout=10) as answer:
                return json.load(answer)["data"]
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{arguments}: {error.read().decode()}") from error

    async def values(self, expr: str) -> list[float]:
        """What the expression is now; numbers that are none are left out."""
        found = (await self.ask("query", query=expr))["result"]
        values = [float(each["value"][1]) for each in found]
        return [value for value in values if not math.isnan(value)]

    async def is_ready(self) -> bool:
        """It answers."""
        try:
            await asyncio.to_thread(urllib.request.urlopen, f"{self.url}/-/ready", timeout=10)
        except OSError:
            return False
        return True


@asynccontextmanager
async def running_prometheus(folder: Path, targets: Path, *rules: Path) -> AsyncIterator[Prometheus]:
    """It scrapes `targets` (file_sd) and evaluates `rules`, each second. Only where BINARY is."""
    assert BINARY is not None
    (folder / "prometheus.yaml").write_text(_CONFIG.format(rules=json.dumps([str(path) for path in rules]), targets=targets))
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    with (folder / "prometheus.log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            BINARY,
            f"--config.file={folder / 'prometheus.yaml'}",
            f"--storage.tsdb.path={folder / 'data'}",
            f"--web.listen-address={address}",
            "--enable-feature=exemplar-storage",
            stdout=log,
            stderr=log,
        )
    try:
        prometheus = Prometheus(f"http://{address}", process.pid)
        async with asyncio.timeout(30):
            while not await prometheus.is_ready():
                assert process.returncode is None, (folder / "prometheus.log").read_text()
                await asyncio.sleep(0.1)
        yield prometheus
    finally:
        process.terminate()
        await process.wait()
