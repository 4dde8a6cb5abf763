"""How the output of a chat is read: the formats of calls and thoughts, and their marks."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field

from pdmesh.text.parsers.machine import OutputParser, Schemas
from pdmesh.text.parsers.registry import NONE, TOOL_FORMATS, begins_inside, make_parser, marks_of
from pdmesh.text.tokenizer import Tokenizer

AUTO = "auto"
ID_CHARS = 24
SHORT_ID_CHARS = 9
"""Mistral's templates refuse ids of other lengths."""


@dataclass(frozen=True)
class OutputFormat:
    """Hold how an output is read. `tools`, `reasoning`: names of formats, or "none". `has_begun`: the prompt ends within
    thoughts. `marks`: texts of the special tokens that the parser has to see, by id. `max_calls`: None for any number. `origin`:
    what determines the output, for ids of calls."""

    tools: str
    reasoning: str
    schemas: Schemas = field(default_factory=dict)
    has_begun: bool = False
    marks: Mapping[int, str] = field(default_factory=dict)
    max_calls: int | None = None
    origin: bytes = b""

    def parser(self) -> OutputParser:
        """Return a parser of one choice."""
        return make_parser(self.tools, self.reasoning, self.schemas, has_begun=self.has_begun)

    def call_id(self, seed: int, choice: int, call: int) -> str:
        """Return the id of a call, the same wherever the output is read again."""
        said = hashlib.sha256(self.origin + f"{seed}:{choice}:{call}".encode()).hexdigest()
        return said[:SHORT_ID_CHARS] if self.tools == "mistral" else f"call_{said[:ID_CHARS]}"


@dataclass(frozen=True)
class FormatNames:
    """Hold the configured names of formats: "auto" takes that of the model's chat template."""

    tools: str = AUTO
    reasoning: str = AUTO


def format_of(
    tokenizer: Tokenizer, names: FormatNames, schemas: Schemas, prompt: str, *, max_calls: int | None = None
) -> OutputFormat | None:
    """Return how an output to a rendered `prompt` is read; None: all of it is text. `schemas` of the tools that may be called."""
    tools = tokenizer.tool_format if names.tools == AUTO else names.tools
    reasoning = tokenizer.reasoning_format if names.reasoning == AUTO else names.reasoning
    has_own_thoughts = tools != NONE and TOOL_FORMATS[tools].has_thoughts
    if has_own_thoughts:
        reasoning = NONE
    elif not schemas:
        tools = NONE
    if tools == reasoning == NONE:
        return None
    marks = set(marks_of(tools, reasoning))
    return OutputFormat(
        tools,
        reasoning,
        schemas,
        begins_inside(prompt, reasoning),
        {token_id: text for text, token_id in tokenizer.special_tokens.items() if text in marks},
        max_calls=max_calls,
        origin=hashlib.sha256(prompt.encode()).digest(),
    )
