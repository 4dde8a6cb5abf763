"""GuideLLM on the OpenAI gateway. Its TTFT counts from the first byte of the request; its inter-token latency is (last token −
first token) / (tokens − 1). What it calls time per output token has the first token in it."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.peers.environments import TORCH, Environment
from tests.interop.load.generator import LoadGenerator, Report, Task, read_json, write_lines


def _command(python: Path, task: Task) -> list[str]:
    prompts = write_lines(task.folder / "prompts.jsonl", ({"prompt": prompt} for prompt in task.prompts))
    backend = {
        "kind": "openai_http",
        "target": task.site.http,
        "model": task.site.model,
        "max_tokens": task.max_tokens,
        "extras": {"body": {"ignore_eos": True, "temperature": 0.8}},
    }
    tokenizer = {"kind": "huggingface_auto", "model": str(task.site.tokenizer)}
    return [
        *(str(python.with_name("guidellm")), "run", "--disable-console-interactive"),
        *("--backend", json.dumps(backend), "--tokenizer", json.dumps(tokenizer)),
        *("--profile", "kind=synchronous", "--constraint", f"kind=max_requests,count={len(task.prompts)}"),
        *("--data", f"kind=json_file,path={prompts}", "--output", f"kind=json,path={task.folder / 'report.json'}"),
    ]


def _report(folder: Path) -> Report:
    """In milliseconds there."""
    metrics = read_json(folder / "report.json")["benchmarks"][0]["metrics"]
    names = ("time_to_first_token_ms", "inter_token_latency_ms")
    milliseconds = [metrics[name]["successful"]["median"] for name in names]
    return Report(metrics["request_totals"]["successful"], *(value / 1e3 for value in milliseconds))


GUIDELLM = LoadGenerator(
    "GuideLLM 0.8.1",
    Environment("guidellm", (TORCH, ("install", "guidellm==0.8.1"))),
    _command,
    _report,
    tpot="TPOT (its inter-token latency)",
    num_warm_up=0,  # its warm-up ends with a time, not with a request
)
