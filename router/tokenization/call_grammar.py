"""Grammars of calls, which hold the output of a request to its tools: of a required call, or of one that the model opens. And
that of an answer which a client's constraint describes, where the model thinks first."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from pdmesh.runtime.errors import InvalidArgument
from pdmesh.text.exact_json import dumps
from pdmesh.text.parsers.forcing import Choice, Form, answer_grammar, grammar, opened_grammar
from pdmesh.text.parsers.machine import Schemas
from pdmesh.text.parsers.registry import NONE, TOOL_FORMATS
from pdmesh.v1 import common_pb2
from router.api import validation
from router.tokenization.chat_prompt import OfferedTools
from router.tokenization.prepared_request import OutputFormat, ServedModel

_MORE_MEMBERS = frozenset(
    {"additionalProperties", "patternProperties", "unevaluatedProperties", "propertyNames", "minProperties"}
    | {"anyOf", "oneOf", "allOf", "if", "not", "$ref", "dependentSchemas"}
)
"""Keywords by which a schema may want members that it does not name."""


def takes_grammar(sampling: common_pb2.SamplingParams) -> bool:
    """Return whether a grammar that the client has not asked for may be added. Pure."""
    return not (sampling.HasField("constraint") or sampling.min_tokens or sampling.ignore_eos)


async def constrained(
    model: ServedModel,
    sampling: common_pb2.SamplingParams,
    offered: OfferedTools,
    wanted: OutputFormat | None,
    *,
    forces_opened: bool,
) -> common_pb2.SamplingParams:
    """Return the sampling parameters with the grammar of calls: of a required one; with `forces_opened` of one that the model
    opens, where its format has a mark for that.

    Raises InvalidArgument: a call is required that cannot be forced, or a strict schema cannot be followed."""
    if wanted is None or not offered.schemas:
        if offered.is_required:
            validation.refuse("tool_choice", "requires calls, which are not read here (--tool-parser none)")
        return sampling
    await _check_strict(model, offered)
    if offered.is_required:
        return await _required(model, sampling, offered, wanted)
    if not takes_grammar(sampling) or not (forces_opened or offered.strict):
        return sampling
    return await _opened(model, sampling, offered, wanted)


async def behind_thoughts(
    model: ServedModel, sampling: common_pb2.SamplingParams, wanted: OutputFormat | None
) -> common_pb2.SamplingParams | None:
    """Return the sampling parameters with a constraint that holds behind thoughts; None where it holds from the first token on:
    the model does not think, the constraint is a grammar (which describes a whole output), or both together are too complex.

    Raises InvalidArgument: the constraint itself cannot be followed."""
    await validation.compile_constraint(model.grammars, sampling)
    if wanted is None or wanted.thoughts is None:
        return None
    kind, thoughts = str(sampling.constraint.WhichOneof("kind")), wanted.thoughts
    source = list(sampling.constraint.choice.values) if kind == "choice" else str(getattr(sampling.constraint, kind))
    written = "".join((thoughts.open, thoughts.close, thoughts.behind, thoughts.answer))
    tokens = {text: token_id for text, token_id in model.tokenizer.special_tokens.items() if text in written}
    try:
        text = answer_grammar(kind, source, Choice((), thoughts=thoughts, has_begun=wanted.has_begun), tokens)
        await _compiled(model, common_pb2.Constraint(grammar=text), "sampling.constraint")
    except (InvalidArgument, ValueError, RecursionError):
        return None
    return _with(sampling, common_pb2.Constraint(grammar=text))


async def _check_strict(model: ServedModel, offered: OfferedTools) -> None:
    for number, (name, schema) in enumerate(offered.schemas.items()):
        if name in offered.strict:
            path = f"tools[{number}].parameters"
            await _compiled(model, common_pb2.Constraint(json_schema=_text({"type": "object", **schema})), path)


async def _required(
    model: ServedModel, sampling: common_pb2.SamplingParams, offered: OfferedTools, wanted: OutputFormat
) -> common_pb2.SamplingParams:
    if sampling.HasField("constraint"):
        validation.refuse("tool_choice", "requires calls, which excludes another constraint on the output; drop one of the two")
    if wanted.tools == NONE:
        validation.refuse("tool_choice", "requires calls, which are not read here (--tool-parser none)")
    written, _ = TOOL_FORMATS[wanted.tools].written_by(model.tokenizer.template)
    form, is_parallel = _ended(model, written, is_parallel=offered.is_parallel)
    thoughts = wanted.thoughts
    choice = Choice(offered.names, is_parallel, thoughts, wanted.has_begun)
    tokens = _tokens(model, form, *((thoughts.open, thoughts.close, thoughts.behind) if thoughts else ()))
    error: InvalidArgument | None = None
    for schemas in _by_strength(offered):
        constraint = common_pb2.Constraint(grammar=grammar(form, schemas, choice, tokens))
        try:
            await _compiled(model, constraint, "tools")
        except InvalidArgument as refused:
            error = error or refused
            continue
        return _with(sampling, constraint)
    assert error is not None
    raise error


async def _opened(
    model: ServedModel, sampling: common_pb2.SamplingParams, offered: OfferedTools, wanted: OutputFormat
) -> common_pb2.SamplingParams:
    """Return the parameters as they are where a call cannot be forced: the model may still write one."""
    if wanted.tools == NONE:
        return sampling
    written, opening = TOOL_FORMATS[wanted.tools].written_by(model.tokenizer.template)
    if not opening:
        return sampling
    form, is_parallel = _ended(model, written, is_parallel=offered.is_parallel)
    tokens = _tokens(model, form, opening)
    others = {*model.tokenizer.special_tokens.values()} - {*model.eos_token_ids, *tokens.values()}
    choice = Choice(offered.names, is_parallel)
    if wanted.has_begun and wanted.thoughts and not TOOL_FORMATS[wanted.tools].ends_thoughts:
        choice = choice._replace(thoughts=wanted.thoughts, has_begun=True)
        tokens |= _tokens(model, form, wanted.thoughts.close)
    for schemas in _by_strength(offered):
        try:
            source = opened_grammar(form, opening, schemas, choice, tokens, others)
            await _compiled(model, common_pb2.Constraint(grammar=source), "tools")
        except (InvalidArgument, ValueError):
            continue
        return _with(sampling, common_pb2.Constraint(grammar=source))
    return sampling


async def _compiled(model: ServedModel, constraint: common_pb2.Constraint, field: str) -> None:
    """Compile a constraint, which is remembered. Raises InvalidArgument that names `field`."""
    try:
        await validation.compile_constraint(model.grammars, common_pb2.SamplingParams(constraint=constraint))
    except InvalidArgument as error:
        own = f"sampling.constraint.{constraint.WhichOneof('kind')}: "
        raise InvalidArgument(field, f"{field}: {error.message.removeprefix(own)}") from error


def _with(sampling: common_pb2.SamplingParams, constraint: common_pb2.Constraint) -> common_pb2.SamplingParams:
    changed = common_pb2.SamplingParams()
    changed.CopyFrom(sampling)
    changed.constraint.CopyFrom(constraint)
    return changed


def _by_strength(offered: OfferedTools) -> Iterator[Schemas]:
    """Yield the schemas as they are, without members that they do not name; then without what may be more than a grammar can
    hold, where no tool is strict about it."""
    yield {name: _closed(schema) for name, schema in offered.schemas.items()}
    yield {name: _closed(schema) if name in offered.strict else _loose(schema) for name, schema in offered.schemas.items()}


def _closed(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a schema that allows the members alone that it names, unless it says otherwise: small models add others. Pure."""
    says_more = not _MORE_MEMBERS.isdisjoint(schema)
    return schema if says_more or not schema.get("properties") else {**schema, "additionalProperties": False}


def _loose(schema: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {
            name: {"type": each["type"]} if isinstance(each, dict) and "type" in each else {}
            for name, each in schema.get("properties", {}).items()
        },
        "required": schema.get("required", []),
    }


def _ended(model: ServedModel, form: Form, *, is_parallel: bool) -> tuple[Form, bool]:
    """Return a form without the marks that end an output by themselves, and whether several calls are possible then. Pure."""
    for text, token_id in model.tokenizer.special_tokens.items():
        if token_id in model.eos_token_ids and text in form.behind:
            form, is_parallel = form._replace(behind=form.behind.split(text)[0], between="", end=""), False
        if token_id in model.eos_token_ids and text in form.end:
            form = form._replace(end=form.end.split(text)[0])
    return form, is_parallel


def _tokens(model: ServedModel, form: Form, *others: str) -> dict[str, int]:
    """Return the special tokens in a form and in other marks. Pure."""
    tags = tuple(part for part in form.tags or () if isinstance(part, str))
    written = " ".join((*form[:5], *tags, *others))
    return {text: token_id for text, token_id in model.tokenizer.special_tokens.items() if text in written}


def _text(schema: Mapping[str, Any]) -> str:
    return dumps(schema, ensure_ascii=False)
