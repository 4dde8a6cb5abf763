"""Describes sessions: agents with system prompts and tools, and how much of each prompt had been sent or answered before. Pure.

An agent's session begins with one of a few system prompts, which it shares with other sessions. Its later turns bring what a
person types, after a pause for thought, or the output of a tool, which is longer and comes sooner.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass, field

from pdmesh.loadtest import arrivals
from pdmesh.loadtest.arrivals import Distribution, fixed

_DISTRIBUTION = f"a number, or one of {arrivals.usage()}"


@dataclass(frozen=True)
class Agents:
    """Describe what sessions of agents have beyond plain conversations. `system_tokens`: the length of each of the
    `num_system_prompts` shared system prompts, in front of the first turn's own tokens; 0: there are none. `tool_share`:
    the share of later turns whose new input is a tool's output, of `tool_tokens`, due `tool_think_s` after the answer."""

    system_tokens: Distribution = field(default=fixed(0))
    num_system_prompts: int = 1
    tool_share: float = 0.0
    tool_tokens: Distribution = field(default=fixed(1000))
    tool_think_s: Distribution = field(default=fixed(0))

    @property
    def have_system_prompts(self) -> bool:
        """Return whether sessions begin with a system prompt."""
        return any(self.system_tokens.parameters)

    def system_prompts(self, seed: int) -> tuple[int, ...]:
        """Return the length of each system prompt, in tokens. The same seed gives the same lengths."""
        if not self.have_system_prompts:
            return ()
        numbers = range(self.num_system_prompts)
        return tuple(self.system_tokens.draw_count(random.Random(f"{seed}/system{number}")) for number in numbers)

    def is_tool(self, rng: random.Random) -> bool:
        """Return whether a later turn brings a tool's output. Without tools nothing is drawn: plans stay as they were."""
        return self.tool_share > 0 and rng.random() < self.tool_share


@dataclass(frozen=True)
class AgentFlags:
    """Say what sessions of agents have beyond turns and think times."""

    system_tokens: str = field(
        default="0", metadata={"help": f"length of each system prompt, in front of the first turn's own tokens: {_DISTRIBUTION}"}
    )
    system_prompts: int = field(default=1, metadata={"help": "different system prompts; a session begins with one of them"})
    tool_share: float = field(default=0.0, metadata={"help": "share of later turns that bring the output of a tool"})
    tool_tokens: str = field(default="1000", metadata={"help": f"length of a tool's output: {_DISTRIBUTION}"})
    tool_think_s: str = field(
        default="0", metadata={"help": f"seconds that a tool takes, in place of --think-s: {_DISTRIBUTION}"}
    )

    def validate(self) -> None:
        """Raise ValueError that names the field."""
        for name in ("system_tokens", "tool_tokens", "tool_think_s"):
            arrivals.parse_flag(name, getattr(self, name))
        if self.system_prompts < 1:
            raise ValueError("system_prompts: must be at least 1")
        if not 0 <= self.tool_share <= 1:
            raise ValueError("tool_share: must be between 0 and 1")

    @property
    def are_used(self) -> bool:
        """Return whether sessions have system prompts or tools."""
        return self.of().have_system_prompts or self.tool_share > 0

    def of(self) -> Agents:
        return Agents(
            system_tokens=arrivals.parse(self.system_tokens),
            num_system_prompts=self.system_prompts,
            tool_share=self.tool_share,
            tool_tokens=arrivals.parse(self.tool_tokens),
            tool_think_s=arrivals.parse(self.tool_think_s),
        )


class PromptIndex:
    """Know the prompts that were sent, and say how many tokens of the next one a cache could hold that has room for all of them
    and computes no token twice.

    Prompts are named pieces, (key, number of tokens): equal keys are equal tokens, up to the shorter length. Paths of pieces are
    kept as 64-bit hashes: of long runs each piece takes some 200 bytes, whatever its length."""

    def __init__(self) -> None:
        self._ends: set[int] = set()
        self._longest: dict[int, int] = {}

    def add(self, pieces: Iterable[tuple[str, int]]) -> int:
        """Add a prompt, or a prompt with its answer; return the tokens at its beginning that were known before."""
        path, num_known, known = 0, 0, True
        for key, num_tokens in pieces:
            place = hash((path, key))
            path = hash((place, num_tokens))
            longest = self._longest.get(place, 0)
            if known:
                known = path in self._ends
                num_known += num_tokens if known else min(num_tokens, longest)
            self._ends.add(path)
            if num_tokens > longest:
                self._longest[place] = num_tokens
        return num_known
