"""Renders a model's own chat template, in Jinja, as Hugging Face does.

The conventions are those of transformers' `apply_chat_template`: blocks trimmed, loop controls, `raise_exception`,
`strftime_now`, a `tojson` that leaves non-ASCII characters alone, `{% generation %}` transparent. A template comes with the model
and is not trusted: it runs in Jinja's immutable sandbox. Not covered: tools and documents (always none).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

# Exceptions of a template on unexpected messages; all of them are the caller's (or the template's) fault.
_RENDER_ERRORS = (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError)


@dataclass(frozen=True)
class Message:
    """Hold one turn of a conversation: `role` is "system", "user", "assistant" or another that the template knows."""

    role: str
    content: str


class ChatTemplate:
    """Hold a Jinja template and the special tokens that it may name (`bos_token`, `eos_token`, ...)."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        self.source = source
        self.special_tokens = dict(special_tokens)

    def render(self, messages: Sequence[Message], *, add_generation_prompt: bool = True) -> str:
        """Return the conversation as text. Raises ValueError with what the template rejected."""
        if not messages:
            raise ValueError("messages: a conversation needs at least one message")
        try:
            return self._template.render(
                messages=[asdict(message) for message in messages],
                tools=None,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **self.special_tokens,
            )
        except _RENDER_ERRORS as error:
            raise ValueError(f"messages: the model's chat template refused them: {error}") from error

    @cached_property
    def _template(self) -> jinja2.Template:
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        return environment.from_string(self.source)


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
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


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
