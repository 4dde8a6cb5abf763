"""Renders a model's own chat template, in Jinja, as Hugging Face does.

The conventions are those of transformers' `apply_chat_template`: blocks trimmed, loop controls, `raise_exception`,
`strftime_now`, a `tojson` that leaves non-ASCII characters alone, `{% generation %}` transparent. A template comes with the model
and is not trusted: it runs in Jinja's immutable sandbox. Not covered: documents (always none).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from pdmesh.text.exact_json import dumps

# Exceptions of a template on unexpected messages; all of them are the caller's (or the template's) fault.
_RENDER_ERRORS = (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError)


@dataclass(frozen=True)
class ToolCall:
    """A call that an assistant made: `arguments` by name."""

    name: str
    arguments: Mapping[str, Any]
    call_id: str = ""

    def as_template(self) -> dict[str, Any]:
        """Return what templates see: OpenAI's form, with arguments as a mapping."""
        said: dict[str, Any] = {"type": "function", "function": {"name": self.name, "arguments": dict(self.arguments)}}
        return said | ({"id": self.call_id} if self.call_id else {})


@dataclass(frozen=True)
class Message:
    """Hold one turn of a conversation: `role` is "system", "user", "assistant", "tool" or another that the template knows.

    `tool_calls`, `thoughts`: of an assistant. `call_id`, `name`: of a tool's answer, the call and the tool that it belongs to."""

    role: str
    content: str
    tool_calls: tuple[ToolCall, ...] = ()
    thoughts: str = ""
    call_id: str = ""
    name: str = ""

    def as_template(self) -> dict[str, Any]:
        """Return what templates see: what the turn has, under the names that transformers gives it."""
        more: dict[str, Any] = {
            "tool_calls": [call.as_template() for call in self.tool_calls],
            "reasoning_content": self.thoughts,
            "tool_call_id": self.call_id,
            "name": self.name,
        }
        return {"role": self.role, "content": self.content, **{name: value for name, value in more.items() if value}}


@dataclass(frozen=True)
class Rendering:
    """How a conversation is rendered. `tools`: as OpenAI describes them. `variables`: more that a template may ask for, such as
    enable_thinking. `continues`: the last message goes on, and no new one begins."""

    tools: tuple[Mapping[str, Any], ...] = ()
    variables: Mapping[str, Any] = field(default_factory=dict)
    add_generation_prompt: bool = True
    continues: bool = False


PLAIN = Rendering()
_OWN_VARIABLES = frozenset({"messages", "tools", "documents", "add_generation_prompt"})


class ChatTemplate:
    """Hold a Jinja template and the special tokens that it may name (`bos_token`, `eos_token`, ...)."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        self.source = source
        self.special_tokens = dict(special_tokens)

    def render(self, messages: Sequence[Message], how: Rendering = PLAIN) -> str:
        """Return the conversation as text. Raises ValueError with what the template rejected."""
        if not messages:
            raise ValueError("messages: a conversation needs at least one message")
        if own := _OWN_VARIABLES & how.variables.keys():
            raise ValueError(f"chat_template_kwargs: {', '.join(sorted(own))} is set by the request itself; leave it out")
        try:
            text = self._template.render(
                **{**self.special_tokens, **how.variables},
                messages=[message.as_template() for message in messages],
                tools=list(how.tools) or None,
                documents=None,
                add_generation_prompt=how.add_generation_prompt and not how.continues,
            )
        except _RENDER_ERRORS as error:
            raise ValueError(f"messages: the model's chat template refused them: {error}") from error
        return _unfinished(text, messages[-1]) if how.continues else text

    @cached_property
    def knows_tools(self) -> bool:
        """Return whether the template shows tools: it names the variable. Raises ValueError for one that cannot be read."""
        try:
            return "tools" in meta.find_undeclared_variables(self._environment.parse(self.source))
        except jinja2.TemplateError as error:
            raise ValueError(f"messages: the model's chat template refused them: {error}") from error

    @cached_property
    def _template(self) -> jinja2.Template:
        return self._environment.from_string(self.source)

    @cached_property
    def _environment(self) -> jinja2.Environment:
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        return environment


def _unfinished(text: str, last: Message) -> str:
    """Return a rendered conversation up to the end of its last message, which goes on. Raises ValueError."""
    for content in (last.content, last.content.strip()):  # many templates trim it
        if content.strip() and (place := text.rfind(content)) >= 0:
            return text[: place + len(content)]
    raise ValueError(
        "continue_final_message: the model's chat template does not show the last message as it is; let a new one begin"
    )


class _Generation(Extension):
    """Render the body of `{% generation %}`, which marks the assistant's text for training masks, unchanged."""

    tags = {"generation"}  # noqa: RUF012 (jinja2 declares it so)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(date_format: str) -> str:
    return datetime.now().strftime(date_format)


def read_template(folder: Path, declared: object) -> tuple[str | None, tuple[str, ...]]:
    """Return the template of plain conversations; where there are several and none is the default, None and their names.

    As transformers has it: chat_template.jinja and additional_chat_templates/ go before `declared`, the value of
    `chat_template` in tokenizer_config.json; chat_template.json, which processors have, comes last. Raises ValueError."""
    files = [("default", folder / "chat_template.jinja")]
    files += [(path.stem, path) for path in sorted((folder / "additional_chat_templates").glob("*.jinja"))]
    stored = {name: path.read_text(encoding="utf-8") for name, path in files if path.is_file()}
    if stored or declared:
        return select_template(stored or declared)
    legacy = folder / "chat_template.json"
    return select_template(_declared_in(legacy) if legacy.is_file() else None)


def _declared_in(path: Path) -> object:
    try:
        return json.loads(path.read_text(encoding="utf-8"))["chat_template"]
    except (ValueError, LookupError, TypeError) as error:
        raise ValueError(f"{path} holds no JSON object with a chat_template; get it again or remove it") from error


def select_template(declared: object) -> tuple[str | None, tuple[str, ...]]:
    """Return the default one of templates by name, or of a list of `{"name", "template"}`; one alone counts as the default.
    Without a default: None, and the names."""
    if declared is None or isinstance(declared, str):
        return declared, ()
    if isinstance(declared, list) and all(isinstance(item, Mapping) and {"name", "template"} <= item.keys() for item in declared):
        declared = {str(item["name"]): item["template"] for item in declared}
    if not isinstance(declared, Mapping) or not all(isinstance(template, str) for template in declared.values()):
        raise ValueError("tokenizer_config.json: chat_template is neither a text nor a list of {name, template}; get it again")
    template = next(iter(declared.values())) if len(declared) == 1 else declared.get("default")
    return template, () if template is not None else tuple(sorted(declared))
