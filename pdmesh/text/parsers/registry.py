"""The formats by name, and which of them a model writes: its chat template has their marks."""

from __future__ import annotations

from pdmesh.text.parsers.forcing import ToolFormat
from pdmesh.text.parsers.formats import (
    deepseek,
    gemma,
    generic,
    glm,
    granite,
    harmony,
    hermes,
    kimi,
    llama,
    minimax,
    mistral,
    phi,
    pythonic,
    qwen_coder,
)
from pdmesh.text.parsers.machine import OutputParser, Schemas
from pdmesh.text.parsers.reasoning import ThinkMarks, before_answer, plain, thinking

NONE, AUTO = "none", "auto"

TOOL_FORMATS: dict[str, ToolFormat] = {
    "harmony": harmony.FORMAT,
    "kimi": kimi.FORMAT,
    "deepseek": deepseek.FORMAT,
    "minimax": minimax.FORMAT,
    "glm": glm.FORMAT,
    "qwen_coder": qwen_coder.FORMAT,
    "mistral": mistral.FORMAT,
    "gemma": gemma.FORMAT,
    "phi": phi.FORMAT,
    "granite": granite.FORMAT,
    "hermes": hermes.FORMAT,
    "pythonic": pythonic.FORMAT,
    "llama": llama.FORMAT,
    "json": generic.FORMAT,
}
"""In the order in which a template is asked: those whose marks others have as well come later."""

REASONING_FORMATS: dict[str, ThinkMarks] = {
    "deepseek_r1": ThinkMarks("<think>", "</think>", always_begun=True),
    "think": ThinkMarks("<think>", "</think>"),
    "mistral": ThinkMarks("[THINK]", "[/THINK]"),
    "kimi": ThinkMarks("◁think▷", "◁/think▷"),
    "seed": ThinkMarks("<seed:think>", "</seed:think>"),
    "granite": ThinkMarks("Here is my thought process:", "Here is my response:"),
}
"""In the order in which a template is asked."""

PROMPTED = "hermes"
"""The format that a model is asked for whose template knows no tools (pdmesh/text/tool_prompt.py)."""
OTHER = "json"
"""The format that a model may write whose template shows tools, and has the marks of no format."""


def tool_format_of(template: str) -> str:
    """Return the name of the format that a template's model writes; `none` for a template without tools. Pure."""
    return next((name for name, tool_format in TOOL_FORMATS.items() if tool_format.is_shown_by(template)), NONE)


def reasoning_format_of(template: str) -> str:
    """Return the name of the format of thoughts in a template; `none` for one without. Pure."""
    return next((name for name, marks in REASONING_FORMATS.items() if marks.are_in(template)), NONE)


def marks_of(tools: str, reasoning: str) -> tuple[str, ...]:
    """Return the marks of two formats, which a parser has to see also where they are special tokens. Pure."""
    marks = TOOL_FORMATS[tools].marks if tools in TOOL_FORMATS else ()
    return (*marks, *REASONING_FORMATS[reasoning][:2]) if reasoning in REASONING_FORMATS else marks


def begins_inside(prompt: str, reasoning: str) -> bool:
    """Return whether the output to a rendered prompt begins within thoughts: the prompt ends with their opening mark, or the
    model leaves it out. Pure."""
    if reasoning == NONE:
        return False
    marks, end = REASONING_FORMATS[reasoning], prompt.rstrip()
    return end.endswith(marks.open) or (marks.always_begun and not end.endswith(marks.close))


def may_think(prompt: str, reasoning: str) -> bool:
    """Return whether thoughts may begin with the output: not where the prompt ends them already. Pure."""
    return reasoning != NONE and not prompt.rstrip().endswith(REASONING_FORMATS[reasoning].close)


def make_parser(
    tools: str, reasoning: str, schemas: Schemas, *, has_begun: bool = False, is_constrained: bool = False
) -> OutputParser:
    """Return a parser for one output. `tools`, `reasoning`: names of formats, or `none`; `has_begun`: see `begins_inside`;
    `is_constrained`: a constraint holds the answer behind thoughts, so that is text, with no call in it."""
    tool_format = TOOL_FORMATS.get(tools)
    if is_constrained:
        own = None if tool_format is None else tool_format.thoughts
        marks = own or REASONING_FORMATS.get(reasoning)
        return OutputParser(before_answer(marks, has_begun=has_begun, trims=own is None) if marks else plain)
    parse = tool_format.parse(schemas) if tool_format is not None else plain
    if reasoning != NONE and (tool_format is None or tool_format.thoughts is None):
        ends = (tool_format.opening,) if tool_format is not None and tool_format.ends_thoughts else ()
        parse = thinking(REASONING_FORMATS[reasoning], parse, has_begun=has_begun, ends=ends)
    return OutputParser(parse)
