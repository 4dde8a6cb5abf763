"""`vllm bench serve` on the OpenAI gateway. Its TTFT counts from before the request is sent; its TPOT is (last token − first
token) / (tokens − 1). Prompts are its own random ones: reading them from a file needs packages that its environment lacks."""

from __future__ import annotations

from pathlib import Path

from benchmarks.peers.environments import VLLM
from tests.interop.load.generator import LoadGenerator, Report, Task, read_json

_PROMPT_TOKENS = 30


def _command(python: Path, task: Task) -> list[str]:
    return [
        *(str(python), "-m", "tests.interop.load.vllm_bench_serve", "--disable-tqdm"),
        *("--backend", "openai-chat", "--base-url", task.site.http, "--endpoint", "/v1/chat/completions"),
        *("--model", task.site.model, "--tokenizer", str(task.site.tokenizer)),
        *("--dataset-name", "random", "--random-input-len", str(_PROMPT_TOKENS), "--random-output-len", str(task.max_tokens)),
        *("--num-warmups", str(task.num_warm_up), "--num-prompts", str(len(task.prompts)), "--max-concurrency", "1"),
        *("--ignore-eos", "--temperature", "0.8"),
        *("--save-result", "--result-dir", str(task.folder), "--result-filename", "report.json"),
    ]


def _report(folder: Path) -> Report:
    """In milliseconds there."""
    found = read_json(folder / "report.json")
    return Report(found["completed"], found["median_ttft_ms"] / 1e3, found["median_tpot_ms"] / 1e3)


VLLM_BENCH = LoadGenerator(
    "vllm bench serve 0.32.0", VLLM, _command, _report, tpot="TPOT", variables={"VLLM_NO_USAGE_STATS": "1"}
)
