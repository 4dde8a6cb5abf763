"""The Dockerfile, read: stages with their instructions, and what the builder is sent."""

from __future__ import annotations

import fnmatch
import re
from dataclasses import dataclass, field

from tests.k8s.kustomize import FOLDER

ROOT = FOLDER.parent


@dataclass
class Stage:
    """One FROM with the instructions behind it."""

    name: str
    base: str
    steps: list[tuple[str, str]] = field(default_factory=list)

    def of(self, instruction: str) -> list[str]:
        """The arguments of all of one kind."""
        return [argument for name, argument in self.steps if name == instruction]


def stages() -> dict[str, Stage]:
    """By name, in their order."""
    text = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    lines = re.sub(r"\\\n", "", "\n".join(line for line in text.splitlines() if not line.startswith("#"))).splitlines()
    found: dict[str, Stage] = {}
    current: Stage | None = None
    for line in filter(None, lines):
        name, _, argument = line.partition(" ")
        if name == "FROM":
            base, _, label = argument.partition(" AS ")
            current = found[label] = Stage(label, base)
        elif current is not None:
            current.steps.append((name, argument.strip()))
    return found


def is_sent(path: str) -> bool:
    """Whether a path reaches the builder: the last pattern of .dockerignore that takes it, or a folder of it, decides."""
    sent = True
    parts = path.split("/")
    for pattern in (ROOT / ".dockerignore").read_text(encoding="utf-8").split("\n"):
        if not pattern or pattern.startswith("#"):
            continue
        wanted = pattern.removeprefix("!").removeprefix("**/")
        heads = parts if pattern.startswith("**/") else ["/".join(parts[: count + 1]) for count in range(len(parts))]
        if any(fnmatch.fnmatchcase(head, wanted) and head.count("/") == wanted.count("/") for head in heads):
            sent = pattern.startswith("!")
    return sent
