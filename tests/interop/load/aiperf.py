"""NVIDIA's AIPerf on the OpenAI gateway. Its TTFT counts from before the request is sent; its inter-token latency is (end − first
token) / (tokens − 1), where the end is the last chunk, the one with the usage included."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.peers.environments import Environment
from tests.interop.load.generator import LoadGenerator, Report, Task, read_json, write_lines

_PREFIX = "report"


def _command(python: Path, task: Task) -> list[str]:
    prompts = write_lines(task.folder / "prompts.jsonl", ({"text": prompt} for prompt in task.prompts))
    site = task.site
    return [
        *(str(python.with_name("aiperf")), "profile", "--endpoint-type", "chat", "--streaming", "--ui", "none"),
        *("--url", site.http, "--model", site.model, "--tokenizer", str(site.tokenizer)),
        *("--input-file", str(prompts), "--custom-dataset-type", "single_turn", "--dataset-sampling-strategy", "sequential"),
        *("--concurrency", "1", "--workers-max", "1"),
        *("--warmup-request-count", str(task.num_warm_up), "--request-count", str(len(task.prompts))),
        *("--osl", str(task.max_tokens), "--extra-inputs", json.dumps({"ignore_eos": True, "temperature": 0.8})),
        "--use-server-token-count",  # what it counts itself is the text tokenized again: not always the tokens that were drawn
        *("--no-server-metrics", "--no-gpu-telemetry"),
        *("--output-artifact-dir", str(task.folder), "--profile-export-prefix", _PREFIX),
    ]


def _report(folder: Path) -> Report:
    """In milliseconds there."""
    found = read_json(folder / f"{_PREFIX}.json")
    milliseconds = [found[name]["p50"] for name in ("time_to_first_token", "inter_token_latency")]
    return Report(round(found["request_count"]["avg"]), *(value / 1e3 for value in milliseconds))


AIPERF = LoadGenerator(
    "AIPerf 0.13.0",
    Environment("aiperf", (("install", "aiperf==0.13.0"),)),
    _command,
    _report,
    tpot="TPOT (its inter-token latency)",
    unset=("HF_HUB_OFFLINE",),  # with it, whatever its value, a folder is no tokenizer
)
