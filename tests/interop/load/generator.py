"""What the load generators have in common: what they are asked, and what they say."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.peers.environments import Environment
from tests.interop.site import Site


@dataclass(frozen=True)
class Task:
    """Streamed requests, one after the other: `num_warm_up` that do not count, then one for each prompt. `folder`: for files."""

    site: Site
    prompts: tuple[str, ...]
    num_warm_up: int
    max_tokens: int
    folder: Path


@dataclass(frozen=True)
class Report:
    """What a load generator says of its requests: how many completed, and medians over them, in seconds."""

    num_completed: int
    ttft_s: float
    tpot_s: float


@dataclass(frozen=True)
class LoadGenerator:
    """`command` is called with the Python of the environment. `tpot` is what the tool calls the mean time per token after the
    first; `num_warm_up`: 0 for a tool that cannot leave its first requests out. `variables` are added to its environment, those
    in `unset` taken away."""

    name: str
    environment: Environment
    command: Callable[[Path, Task], list[str]]
    report: Callable[[Path], Report]
    tpot: str
    num_warm_up: int = 2
    variables: Mapping[str, str] = field(default_factory=dict)
    unset: tuple[str, ...] = ()


def write_lines(path: Path, rows: Iterable[Mapping[str, str]]) -> Path:
    """A file with a line of JSON for each row."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def read_json(path: Path) -> Any:
    """A tool's report; its keys are the tool's."""
    return json.loads(path.read_text())
