"""Grammars that force calls: the name and the arguments by their schema, in the format that a model was trained to write.

    grammar         the output is nothing but calls, perhaps behind thoughts
    opened_grammar  the output is free, until the model opens a call: then it is one
    answer_grammar  the output is what a constraint describes, behind thoughts

What a format writes around names and arguments is its `Form`, which with how it is read is a `ToolFormat`. A mark that is a token
of its own in the model's vocabulary is forced as that token, because no other tokens spell it for the model.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from pdmesh.text.exact_json import dumps
from pdmesh.text.parsers.machine import Parse, Schemas
from pdmesh.text.parsers.reasoning import ThinkMarks
from pdmesh.text.parsers.tagged import Tags, is_told, options_of, resolved, schema_of

NAME, INDEX = "NAME", "INDEX"
"""Stand in a form for the name of the tool, and for a number that the model gives the call."""
MAX_CALLS = 16
_INDEX = "/[0-9]{1,3}/"
_JSON_STYLE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
ANY_OBJECT: Mapping[str, Any] = {"type": "object"}


class Form(NamedTuple):
    """What stands around calls: before the first one, before the arguments of each (with NAME), behind them, between two calls,
    and behind the last. `tags`: arguments stand between tags; `is_python`: they are arguments in Python; else they are JSON."""

    begin: str
    before: str
    behind: str
    between: str
    end: str
    tags: Tags | None = None
    is_python: bool = False


class Variant(NamedTuple):
    """Another way in which models of a format write calls: those whose template has all `signs` and none of `lacks`."""

    form: Form
    opening: str
    signs: tuple[str, ...]
    lacks: tuple[str, ...] = ()


_MARK = re.compile(r"<[^<>\s]+>|\[[A-Z_]+\]")


@dataclass(frozen=True)
class ToolFormat:
    """A format of calls: how it is read, and how it is written. `signs`: a template that has all of one of these groups writes
    it. `opening`: the mark behind which a call can be forced; "" where text before it cannot be told from it. `more_marks`: those
    that may be special tokens of a tokenizer, `opening` and what `form` writes aside. `thoughts`: the format itself has them, so
    a reasoning format has no effect. `ends_thoughts`: no thought has `opening`, a token that a
    model writes for a call alone, so it ends thoughts where the closing mark is missing. `variants`: ways in which
    some of its models write calls, by their template."""

    parse: Callable[[Schemas], Parse]
    form: Form
    signs: tuple[tuple[str, ...], ...]
    opening: str = ""
    more_marks: tuple[str, ...] = ()
    thoughts: ThinkMarks | None = None
    ends_thoughts: bool = False
    variants: tuple[Variant, ...] = ()

    def written_by(self, template: str) -> tuple[Form, str]:
        """Return form and opening of the calls of a model with this chat template. Pure."""
        for each in self.variants:
            if all(sign in template for sign in each.signs) and not any(sign in template for sign in each.lacks):
                return each.form, each.opening
        return self.form, self.opening

    def is_shown_by(self, template: str) -> bool:
        """Return whether a chat template has the marks of this format. Pure."""
        return any(all(sign in template for sign in group) for group in self.signs)

    @property
    def marks(self) -> tuple[str, ...]:
        """Return the marks of the format, which a parser has to see also where they are special tokens."""
        ways = ((self.form, self.opening), *((each.form, each.opening) for each in self.variants))
        written = dict.fromkeys(_MARK.findall(" ".join(text for form, opening in ways for text in (*form[:5], opening))))
        return (*(mark for mark in written if mark not in self.more_marks), *self.more_marks)


class Choice(NamedTuple):
    """What a request asks for. `names`: the tools that may be called. `thoughts`: their marks, where the model may think first.
    `has_begun`: it does, and the prompt ends within thoughts. `is_parallel`: there may be several calls."""

    names: Sequence[str]
    is_parallel: bool = True
    thoughts: ThinkMarks | None = None
    has_begun: bool = False


def grammar(form: Form, schemas: Schemas, choice: Choice, tokens: Mapping[str, int]) -> str:
    """Return the Lark grammar of an output that is nothing but calls. `tokens`: ids of the marks that are tokens of their own.

    Raises ValueError for a tool that is not described."""
    writer = _Writer(tokens)
    return writer.grammar(f"{_thoughts(writer, choice)} {_calls(writer, form, schemas, choice)}")


def opened_grammar(
    form: Form, opening: str, schemas: Schemas, choice: Choice, tokens: Mapping[str, int], others: Collection[int] = ()
) -> str:
    """Return the Lark grammar of any output in which a call follows each `opening`, a mark that the form begins with. `others`:
    ids of special tokens that may stand in text, such as the marks of thoughts; no text spells them. Where thoughts have begun
    they are free to their end: what looks like a call there is none.

    Raises ValueError for a tool that is not described, and for a form that begins with something else: there a call cannot be
    told from text before it is written."""
    writer, most = _Writer(tokens), MAX_CALLS if choice.is_parallel else 1
    if (token := _headed_by(opening, tokens)) and form.before.startswith(opening) and not form.begin:
        return writer.grammar(_headed(writer, form, opening, token, schemas, choice, {*others, *tokens.values()}))
    if form.begin.startswith(opening) and opening:
        behind = form._replace(begin=form.begin[len(opening) :])
    elif form.before.startswith(opening) and opening and not form.begin:
        behind, choice = form._replace(before=form.before[len(opening) :]), choice._replace(is_parallel=False)
    else:
        raise ValueError(f"this format has no mark {opening!r} before its calls")
    before = writer.free(opening, others)
    piece = writer.rule(f"{before} {writer.any_until(opening)} {_calls(writer, behind, schemas, choice)}")
    rest = f"{piece}{{0,{most}}} {before} {writer.any_without(opening)}"
    if choice.thoughts is None or not choice.has_begun:
        return writer.grammar(rest)
    close = choice.thoughts.close
    within = writer.free(close, {*others, *tokens.values()} - {tokens.get(close)})
    ended = writer.rule(f"{within} {writer.any_until(close)} {rest}")
    return writer.grammar(f"{ended} | {within} {writer.any_without(close)}")


def _headed_by(opening: str, tokens: Mapping[str, int]) -> str:
    """Return the mark, a token of its own, with which an opening begins that goes on as text: a header of a message, of which
    others are none of calls. "" for any other. Pure."""
    return next((mark for mark in tokens if opening.startswith(mark) and opening != mark), "")


def _headed(
    writer: _Writer, form: Form, opening: str, mark: str, schemas: Schemas, choice: Choice, special: Collection[int]
) -> str:
    """Return any messages, in which a header that begins as those of calls do is one of a call."""
    header, token = opening.removeprefix(mark), writer.text(mark)
    behind = form._replace(before=form.before.removeprefix(opening))
    call = writer.rule(f"{token} {_literal(header)} {_calls(writer, behind, schemas, choice._replace(is_parallel=False))}")
    other = writer.rule(f"{token} {writer.any_but(header)}")
    free = writer.rule("/(?s:.*)/")
    rest = ",".join(map(str, sorted({*special} - {writer.id_of(mark)})))
    piece = writer.rule(" | ".join(filter(None, [f"<[{rest}]> {free}" if rest else "", other, f"{call} {free}"])))
    return f"{free} {piece}*"


def answer_grammar(kind: str, source: str | Sequence[str], choice: Choice, tokens: Mapping[str, int]) -> str:
    """Return the Lark grammar of an output that is thoughts, and then what a constraint describes. `kind`, `source`: as
    `GrammarCompiler.compile` has them; a grammar describes a whole output, so there is none of it behind thoughts.

    Raises ValueError for such a one, and for a choice without thoughts."""
    if choice.thoughts is None:
        raise ValueError("there are no thoughts to stand before the answer")
    writer = _Writer(tokens)
    return writer.grammar(f"{_thoughts(writer, choice)} {writer.text(choice.thoughts.answer)} {writer.answer(kind, source)}")


def _thoughts(writer: _Writer, choice: Choice) -> str:
    if choice.thoughts is None:
        return ""
    rest = f"{writer.any_until(choice.thoughts.close)} {writer.text(choice.thoughts.behind)}"
    return rest if choice.has_begun else f"({writer.text(choice.thoughts.open)} {rest})?"


def _calls(writer: _Writer, form: Form, schemas: Schemas, choice: Choice) -> str:
    unknown = [name for name in choice.names if name not in schemas]
    if unknown or not choice.names:
        raise ValueError(f"tool_choice: {', '.join(unknown) or 'nothing'} is none of the tools; name one of {', '.join(schemas)}")
    one = writer.rule(" | ".join(writer.rule(writer.call(form, name, schemas[name])) for name in choice.names))
    more = f" ({writer.text(form.between)} {one}){{0,{MAX_CALLS - 1}}}" if choice.is_parallel else ""
    return f"{writer.text(form.begin)} {one}{more} {writer.text(form.end)}"


class _Writer:
    """Write rules, each once."""

    def __init__(self, tokens: Mapping[str, int]) -> None:
        self._tokens = tokens
        self._marks = re.compile("|".join(map(re.escape, sorted(tokens, key=len, reverse=True)))) if tokens else None
        self.rules: list[str] = []

    def rule(self, body: str, attributes: str = "") -> str:
        """Add a rule, and return its name."""
        name = f"r{len(self.rules)}"
        self.rules.append(f"{name}{attributes}: {body}")
        return name

    def grammar(self, start: str) -> str:
        """Return all of it."""
        return "\n".join([f"start: {start}", *self.rules])

    def text(self, text: str) -> str:
        """Return literals of a text, and of the marks in it."""
        if self._marks is None:
            return _literal(text)
        pieces, at = [], 0
        for found in self._marks.finditer(text):
            pieces += [_literal(text[at : found.start()]), f"<[{self._tokens[found[0]]}]>"]
            at = found.end()
        return " ".join(filter(None, [*pieces, _literal(text[at:])])) or '""'

    def any_until(self, mark: str) -> str:
        """Return any text up to a mark, and the mark."""
        token = next((each for each in self._tokens if each in mark), None)
        if token is None:
            return self.rule("/(?s:.*)/", f"[suffix={_literal(mark)}]")
        return f"{self.rule('/(?s:.*)/')} {self.text(mark)}"

    def free(self, mark: str, others: Collection[int]) -> str:
        """Return any text in which a mark does not occur, up to the last of some special tokens in it."""
        return f"({self.any_without(mark)} <[{','.join(map(str, sorted(others)))}]>)*" if others else ""

    def id_of(self, mark: str) -> int:
        """Return the id of a mark that is a token of its own."""
        return self._tokens[mark]

    def any_but(self, beginning: str) -> str:
        """Return any text that begins otherwise."""
        name = f"OTHER{len(self.rules)}"
        self.rules.append(f"{name}: /(?s:.*)/ & ~/{_pattern(beginning)}(?s:.*)/")
        return self.rule(name)

    def any_without(self, mark: str) -> str:
        """Return any text in which a mark does not occur; one that is a token of its own is in no text."""
        if mark in self._tokens:
            return self.rule("/(?s:.*)/")
        name = f"WITHOUT{len(self.rules)}"
        self.rules.append(f"{name}: /(?s:.*)/ & ~/(?s:.*){_pattern(mark)}(?s:.*)/")
        return self.rule(name)

    def answer(self, kind: str, source: str | Sequence[str]) -> str:
        """Return what a constraint describes."""
        if kind == "choice":
            return self.rule(" | ".join(_literal(each) for each in source))
        if not isinstance(source, str) or kind not in ("json_schema", "regex"):
            raise ValueError(f"{kind} describes a whole output")
        if kind == "regex":
            return self.rule(f"/{_SLASH.sub(_escaped, source)}/")
        schema = json.loads(source)
        own = schema.get("x-guidance")
        style = {**_JSON_STYLE, **(own if isinstance(own, dict) else {})}
        return self.rule("%json " + json.dumps({**schema, "x-guidance": style}, ensure_ascii=False))

    def call(self, form: Form, name: str, schema: Mapping[str, Any]) -> str:
        """Return one call of a tool."""
        parts = [self.text(part.replace(NAME, name)) for part in form.before.split(INDEX)]
        before, behind = f" {_INDEX} ".join(parts), self.text(form.behind)
        return f"{before} {self._arguments(form, schema or ANY_OBJECT)} {behind}"

    def _arguments(self, form: Form, schema: Mapping[str, Any]) -> str:
        if form.tags is None and not form.is_python:
            return self._json({"type": "object", **schema})
        schema = resolved(schema)
        properties = schema.get("properties") or {}
        required = set(schema.get("required") or ())
        members = [self._member(form, schema, key) for key in properties]
        if form.tags is not None:
            each = [member if key in required else f"({member})?" for key, member in zip(properties, members, strict=True)]
            return " ".join(each)
        return self._separated([(member, key in required) for key, member in zip(properties, members, strict=True)])

    def _member(self, form: Form, schema: Mapping[str, Any], key: str) -> str:
        described = _with_definitions(schema_of(schema, key), schema)
        if form.tags is None:
            return self.rule(f"{_literal(f'{key}=')} {self._json(described)}")
        tags, line = form.tags, "\n" if form.tags.has_breaks else ""
        before = f"{tags.key}{key}{tags.key_end}{tags.value}{line}"
        options = options_of(described)
        if options is None and (described.get("type") == "string" or not is_told(described)):
            return self.rule(f"{self.text(before)} {self.any_until(line + tags.value_end)} {_literal(line)}")
        is_text = options is not None and all(isinstance(option, str) for option in options)
        written = self._plain(options) if options and is_text else self._json(described)
        return self.rule(f"{self.text(before)} {written} {self.text(line + tags.value_end + line)}")

    def _plain(self, options: Sequence[Any]) -> str:
        return "(" + " | ".join(_literal(str(each)) or '""' for each in options) + ")"

    def _separated(self, members: Sequence[tuple[str, bool]]) -> str:
        """Return members with commas between those that are there: a chain of rules, from the last member back."""
        first, rest = '""', '""'  # what may follow where no member was written yet, and where one was
        for member, is_required in reversed(members):
            here, there = f"{member} {rest}", f'", " {member} {rest}'
            first = self.rule(here if is_required else f"{here} | {first}")
            rest = self.rule(there if is_required else f"{there} | {rest}")
        return first

    def _json(self, schema: Mapping[str, Any]) -> str:
        return self.rule("%json " + dumps({**schema, "x-guidance": _JSON_STYLE}, ensure_ascii=False))


def _with_definitions(described: Mapping[str, Any], schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a property's schema with the definitions that it may refer to. Pure."""
    return {**{name: schema[name] for name in ("$defs", "definitions") if name in schema}, **described}


_SLASH = re.compile(r"\\.|[/\n\r]", re.DOTALL)
"""What has to be written otherwise where a regular expression stands between slashes; also what is escaped already."""


def _escaped(found: re.Match[str]) -> str:
    return {"/": r"\/", "\n": r"\n", "\r": r"\r"}.get(found[0], found[0])


def _pattern(text: str) -> str:
    """Return a regular expression of a text, within slashes."""
    return re.escape(text).replace("/", r"\/")


def _literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False).replace("\x7f", r"\u007f") if text else ""
