"""Where a mesh under test is to be found. Only the standard library."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Site:
    """`router`: "host:port" of its gRPC API; `http`: URL of its OpenAI API, without a path; `tokenizer`: the model's folder."""

    router: str
    http: str
    model: str
    tokenizer: Path
