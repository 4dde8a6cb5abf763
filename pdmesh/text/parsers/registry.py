"""The formats by name, and which of them a model writes: its chat template has their marks."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from pdmesh.text.parsers.forcing import Form
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
from pdmesh.text.parsers.machine import OutputParser, Parse, Schemas
from pdmesh.text.parsers.reasoning import ThinkMarks, plain, thinking

NONE, AUTO = "none", "auto"


@dataclass(frozen=True)
class ToolFormat:
    """A format of calls: how it is read, and how it is written. `signs`: a template that has all of one of these groups writes
    it. `opening`: the mark behind which a call can be forced; "" where text before it cannot be told from it. `marks`: those that
    may be special tokens of a tokenizer, `opening` and what `form` writes aside. `has_thoughts`: the format itself has them, so a
    reasoning format has no effect."""

    parse: Callable[[Schemas], Parse]
    form: Form
    signs: tuple[tuple[str, ...], ...]
    opening: str = ""
    marks: tuple[str, ...] = ()
    has_thoughts: bool = False


_LLAMA_WORDS = ('"parameters": dictionary',)
TOOL_FORMATS: Mapping[str, ToolFormat] = {
    "harmony": ToolFormat(
        harmony.parse,
        harmony.FORM,
        (("<|channel|>", "<|message|>"),),
        marks=(harmony.START, harmony.CHANNEL, harmony.MESSAGE, *harmony.ENDS, "<|constrain|>"),
        has_thoughts=True,
    ),
    "kimi": ToolFormat(kimi.parse, kimi.FORM, (("<|tool_calls_section_begin|>",),), "<|tool_calls_section_begin|>"),
    "deepseek": ToolFormat(deepseek.parse, deepseek.FORM, (("<｜tool▁calls▁begin｜>",),), "<｜tool▁calls▁begin｜>"),
    "minimax": ToolFormat(
        minimax.parse,
        minimax.FORM,
        (("<minimax:tool_call>",), ("minimax:tool_call", "<invoke name=")),
        "<minimax:tool_call>",
        marks=("</minimax:tool_call>",),
    ),
    "glm": ToolFormat(glm.parse, glm.FORM, (("<arg_key>",),), "<tool_call>", marks=("</tool_call>", *glm.TAGS[:4])),
    "qwen_coder": ToolFormat(qwen_coder.parse, qwen_coder.FORM, (("<function=",),), "<tool_call>", marks=("</tool_call>",)),
    "mistral": ToolFormat(mistral.parse, mistral.FORM, (("[TOOL_CALLS]",),), "[TOOL_CALLS]", marks=("[ARGS]", "[CALL_ID]")),
    "gemma": ToolFormat(
        gemma.parse,
        gemma.FORM,
        (("<start_function_call>",), ("tool_code",)),
        "```tool_code",
        marks=("<start_function_call>", "<end_function_call>", "<escape>"),
    ),
    "phi": ToolFormat(
        phi.parse,
        phi.FORM,
        (("functools",), ("<|/tool_call|>",), ("<|tool|>", "<|/tool|>")),
        "functools[",
        marks=("<|tool_call|>", "<|/tool_call|>"),
    ),
    "granite": ToolFormat(
        granite.parse,
        granite.FORM,
        (("<|tool_call|>",), ("<|start_of_role|>", "<tool_call>")),
        "<|tool_call|>",
        marks=("<tool_call>", "</tool_call>"),
    ),
    "hermes": ToolFormat(hermes.parse, hermes.FORM, (("<tool_call>",),), "<tool_call>", marks=("</tool_call>",)),
    "pythonic": ToolFormat(
        pythonic.parse,
        pythonic.FORM,
        (("<|python_start|>",), ("func_name1(params_name1",)),
        marks=(*pythonic.MARKS.open, *pythonic.MARKS.close),
    ),
    "llama": ToolFormat(
        llama.parse,
        llama.FORM,
        (("<|python_tag|>",), ("<|start_header_id|>ipython",), _LLAMA_WORDS),
        marks=(*llama.MARKS.open, *llama.MARKS.close),
    ),
    "json": ToolFormat(generic.parse, generic.FORM, ()),
}
"""In the order in which a template is asked: those whose marks others have as well come later."""

REASONING_FORMATS: Mapping[str, ThinkMarks] = {
    "think": ThinkMarks("<think>", "</think>"),
    "mistral": ThinkMarks("[THINK]", "[/THINK]"),
    "kimi": ThinkMarks("◁think▷", "◁/think▷"),
    "seed": ThinkMarks("<seed:think>", "</seed:think>"),
    "granite": ThinkMarks("Here is my thought process:", "Here is my response:"),
}

PROMPTED = "hermes"
"""The format that a model is asked for whose template knows no tools (pdmesh/text/tool_prompt.py)."""
OTHER = "json"
"""The format that a model may write whose template shows tools, and has the marks of no format."""


def tool_format_of(template: str) -> str:
    """Return the name of the format that a template's model writes; `none` for a template without tools. Pure."""
    for name, form in TOOL_FORMATS.items():
        if any(all(sign in template for sign in group) for group in form.signs):
            return name
    return NONE


def reasoning_format_of(template: str) -> str:
    """Return the name of the format of thoughts in a template; `none` for one without. Pure."""
    for name, marks in REASONING_FORMATS.items():
        if marks.close in template or marks.open in template:
            return name
    return NONE


def marks_of(tools: str, reasoning: str) -> tuple[str, ...]:
    """Return the marks of two formats, which a parser has to see also where they are special tokens. Pure."""
    found: list[str] = []
    if tools in TOOL_FORMATS:
        form = TOOL_FORMATS[tools]
        written = " ".join((*form.form[:5], form.opening))
        found += [mark for mark in _MARK.findall(written) if mark not in form.marks]
        found += form.marks
    return (*found, *REASONING_FORMATS.get(reasoning, ()))


_MARK = re.compile(r"<[^<>\s]+>|\[[A-Z_]+\]")


def begins_inside(prompt: str, reasoning: str) -> bool:
    """Return whether a rendered prompt ends with the opening mark of thoughts. Pure."""
    return reasoning != NONE and prompt.rstrip().endswith(REASONING_FORMATS[reasoning].open)


def make_parser(tools: str, reasoning: str, schemas: Schemas, *, has_begun: bool = False) -> OutputParser:
    """Return a parser for one output. `tools`, `reasoning`: names of formats, or `none`; `has_begun`: see `begins_inside`."""
    form = TOOL_FORMATS.get(tools)
    parse = form.parse(schemas) if form is not None else plain
    if reasoning != NONE and (form is None or not form.has_thoughts):
        parse = thinking(REASONING_FORMATS[reasoning], parse, has_begun=has_begun)
    return OutputParser(parse)
