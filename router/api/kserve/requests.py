"""From a ModelInferRequest to the frontend's messages, and to the form that its response has to have."""

import json
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from pdmesh.runtime.errors import InvalidArgument, NotFound
from pdmesh.sampling_params import PARAMETERS, Kind, Parameter
from pdmesh.text.exact_json import dumps, number_of
from pdmesh.third_party.kserve import grpc_service_pb2 as pb
from pdmesh.v1 import common_pb2, mesh_pb2
from router.api.kserve.tensors import FLAGS, LATE_OUTPUTS, OUTPUTS, PIECE_OUTPUTS, VERSION, WHOLE_OUTPUTS, Inputs, input_name
from router.api.protocol_errors import mesh_request_id
from router.api.validation import MAX_MESSAGES, MAX_PRIORITY_HINT, refuse

# Readers for the values of parameters, which come as JSON or as InferParameter, and often as text ("0.7"). Errors name the field.

Value = object
Read = Callable[[str, Value], object]
_UINT32 = 2**32


def _read_number(field: str, value: Value) -> float:
    """Return a finite number, which may come as text."""
    if isinstance(value, str):
        given = value
        try:
            value = float(given)
        except ValueError:
            refuse(field, f"{given[:100]!r} is not a number")
    if isinstance(value, bool) or not isinstance(value, int | float) or not _is_finite(value):
        refuse(field, f"{str(value)[:100]} is not a finite number")
    return float(value)


def _is_finite(value: int | float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:
        return False


def _reader_between(low: int, high: int) -> Callable[[str, Value], int]:
    """Return a reader of whole numbers in [low, high), which may come as text."""

    def read(field: str, value: Value) -> int:
        if isinstance(value, str):
            given = value
            try:
                value = int(given)
            except ValueError:
                refuse(field, f"{given[:100]!r} is not a whole number")
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int):
            refuse(field, f"{str(value)[:100]} is not a whole number")
        if not low <= value < high:
            refuse(field, f"{str(value)[:100]} is not from {low} to {high - 1}")
        return value

    return read


_read_count = _reader_between(0, _UINT32)


def _read_count_or_all(field: str, value: Value) -> int:
    """-1 is a usual way to say "all", which is 0 here."""
    return max(0, _reader_between(-1, _UINT32)(field, value))


def _read_flag(field: str, value: Value) -> bool:
    """Return a truth value, which may come as text."""
    if isinstance(value, str) and value.lower() in ("true", "false"):
        return value.lower() == "true"
    if not isinstance(value, bool):
        refuse(field, f"{str(value)[:100]} is neither true nor false")
    return value


def _read_text(field: str, value: Value) -> str:
    """Return text that is valid Unicode."""
    if not isinstance(value, str):
        refuse(field, f"{str(value)[:100]} is not text")
    try:
        value.encode()
    except UnicodeEncodeError:
        refuse(field, "is not valid Unicode (it holds half of a surrogate pair)")
    return value


def _read_texts(field: str, value: Value) -> list[str]:
    """Return a list of strings from one string, a list, or such a list as JSON text."""
    value = _from_json(value, "[") if isinstance(value, str) else value
    if isinstance(value, str):
        return [_read_text(field, value)]
    if not isinstance(value, list):
        refuse(field, f"{str(value)[:100]} is neither text nor a list of texts")
    return [_read_text(f"{field}[{position}]", item) for position, item in enumerate(value)]


def _read_counts(field: str, value: Value) -> list[int]:
    """Return a list of numbers from one number, a list, or such a list as JSON text."""
    value = _from_json(value, "[") if isinstance(value, str) else value
    if not isinstance(value, list):
        return [_read_count(field, value)]
    return [_read_count(f"{field}[{position}]", item) for position, item in enumerate(value)]


def _read_biases(field: str, value: Value) -> list[common_pb2.TokenBias]:
    """Return biases from an object with a number for each token id, or such an object as JSON text."""
    value = _from_json(value, "{") if isinstance(value, str) else value
    if not isinstance(value, dict):
        refuse(field, f"{str(value)[:100]} is no object with a number for each token id")
    return [_read_bias(field, name, number) for name, number in value.items()]


def _read_bias(field: str, name: str, number: Value) -> common_pb2.TokenBias:
    token_id = int(name) if _TOKEN_ID.fullmatch(name) else refuse(field, f"{name[:100]!r} is no token id")
    return common_pb2.TokenBias(token_id=_read_count(field, token_id), bias=_read_number(f"{field}.{name}", number))


def _read_schema(field: str, value: Value) -> str:
    """Return a JSON Schema as text, from text or from the object itself."""
    if isinstance(value, str):
        return _read_text(field, value)
    if not isinstance(value, dict):
        refuse(field, f"{str(value)[:100]} is no JSON Schema: send an object, or its text")
    return _read_text(field, dumps(value, ensure_ascii=False))


def _read_alternatives(field: str, value: Value) -> common_pb2.Alternatives:
    """Return a list of strings as a constraint."""
    return common_pb2.Alternatives(values=_read_texts(field, value))


def _from_json(value: str, begin: str) -> Value:
    """Return `value` parsed where it is JSON that starts with `begin`; else unchanged."""
    if not value.lstrip().startswith(begin):
        return value
    try:
        return json.loads(value, parse_float=number_of)
    except (ValueError, RecursionError):
        return value


def _reader_of(parameter: Parameter) -> Read:
    """What reads a sampling parameter that is no list."""
    if parameter.kind is Kind.NUMBER:
        return _read_number
    if parameter.kind is Kind.FLAG:
        return _read_flag
    return _read_count_or_all if parameter.rules.is_minus_one_all else _reader_between(0, 2**parameter.rules.bits)


# Parameters of a request, from `parameters` and from the JSON in the tensor `sampling_parameters`, to our messages.

_SAMPLING: dict[str, Read] = {each.name: _reader_of(each) for each in PARAMETERS if each.kind not in (Kind.TOKENS, Kind.BIASES)}
_TOKEN_ID = re.compile("0|[1-9][0-9]{0,9}")
_LISTS: dict[str, Callable[[str, Value], list[Any]]] = {
    "stop": _read_texts,
    **{each.name: _read_counts for each in PARAMETERS if each.kind is Kind.TOKENS},
    **{each.name: _read_biases for each in PARAMETERS if each.kind is Kind.BIASES},
}
_CONSTRAINTS: dict[str, Read] = {
    "json_schema": _read_schema,
    "regex": _read_text,
    "grammar": _read_text,
    "choice": _read_alternatives,
}
_NESTED = ("constraint", "structured_outputs", "guided_decoding")  # objects with one of the four kinds, or with "json"
_OPTIONS: dict[str, Read] = {
    "tenant": _read_text,
    "cache_salt": _read_text,
    "slo_ttft_ms": _read_count,
    "slo_tpot_ms": _read_count,
    "session_id": _read_text,
    "kv_retention_s": _read_count,
    "session_final": _read_flag,
    "priority_hint": _reader_between(-MAX_PRIORITY_HINT, MAX_PRIORITY_HINT + 1),
}
_MODES = {"local": mesh_pb2.PREFILL_MODE_LOCAL, "remote": mesh_pb2.PREFILL_MODE_REMOTE}
# Triton's priorities: 0 is the default, 1 the highest.
_PRIORITIES = (
    common_pb2.PRIORITY_UNSPECIFIED,
    common_pb2.PRIORITY_INTERACTIVE,
    common_pb2.PRIORITY_STANDARD,
    common_pb2.PRIORITY_BATCH,
)
EMPTY_FINAL = "triton_enable_empty_final_response"
NAMES = (*_SAMPLING, *_LISTS, *_CONSTRAINTS, *_NESTED, *_OPTIONS, "mode", "priority", "timeout", EMPTY_FINAL)


@dataclass
class Parameters:
    """Hold what a request's parameters say. `timeout_s`: seconds, None without one. `names`: our fields to the caller's names."""

    sampling: common_pb2.SamplingParams = field(default_factory=common_pb2.SamplingParams)
    options: mesh_pb2.RequestOptions = field(default_factory=mesh_pb2.RequestOptions)
    timeout_s: float | None = None
    empty_final: bool = False
    names: dict[str, str] = field(default_factory=dict)

    @classmethod
    def read(cls, request: pb.ModelInferRequest, inputs: Inputs) -> "Parameters":
        """Read and check the parameters. Raises InvalidArgument that names the parameter."""
        result = cls()
        seen: dict[str, str] = {}
        for name, where, value in (*_of_request(request), *_of_tensor(inputs)):
            if name in seen:
                refuse(where, f"is given twice, as {seen[name]} too")
            seen[name] = where
            result._take(name, where, value)
        return result

    def _take(self, name: str, where: str, value: Value) -> None:
        if name in _SAMPLING:
            setattr(self.sampling, name, _SAMPLING[name](where, value))
            self.names[f"sampling.{name}"] = where
        elif name in _LISTS:
            getattr(self.sampling, name).extend(_LISTS[name](where, value))
            self.names[f"sampling.{name}"] = where
        elif name in _CONSTRAINTS:
            self._constrain(name, where, value)
        elif name in _NESTED:
            self._nested(where, value)
        else:
            self._take_option(name, where, value)

    def _take_option(self, name: str, where: str, value: Value) -> None:
        if name in _OPTIONS:
            setattr(self.options, name, _OPTIONS[name](where, value))
        elif name == "mode":
            self.options.mode = _MODES.get(_read_text(where, value)) or refuse(where, "is neither local nor remote")
        elif name == "priority":
            self.options.priority = _PRIORITIES[_reader_between(0, len(_PRIORITIES))(where, value)]
        elif name == "timeout":  # microseconds; 0 is none
            self.timeout_s = _read_count(where, value) / 1e6 or None
        elif name == EMPTY_FINAL:
            self.empty_final = _read_flag(where, value)
        else:
            refuse(where, f"there is no such parameter; there are {', '.join(NAMES)}")
        self.names[f"options.{name}"] = where

    def _nested(self, where: str, value: Value) -> None:
        if isinstance(value, str):
            value = _object(where, value)
        if not isinstance(value, dict) or len(value) != 1:
            refuse(where, f"is no object with exactly one of {', '.join(_CONSTRAINTS)}")
        ((name, inner),) = value.items()
        name = "json_schema" if name == "json" else name
        if name not in _CONSTRAINTS:
            refuse(where, f"{name[:100]!r} is none of {', '.join(_CONSTRAINTS)}")
        self._constrain(name, where, inner)

    def _constrain(self, name: str, where: str, value: Value) -> None:
        constraint = self.sampling.constraint
        if constraint.WhichOneof("kind"):
            refuse(where, f"a request has one constraint, and {constraint.WhichOneof('kind')} is there, too")
        read = _CONSTRAINTS[name](where, value)
        if isinstance(read, common_pb2.Alternatives):
            constraint.choice.CopyFrom(read)
        else:
            setattr(constraint, name, read)
        self.names["sampling.constraint"] = self.names[f"sampling.constraint.{name}"] = where


def _of_request(request: pb.ModelInferRequest) -> Iterator[tuple[str, str, Value]]:
    for name, parameter in request.parameters.items():
        where = f'parameters["{name[:100]}"]'
        kind = parameter.WhichOneof("parameter_choice")
        if kind is None:
            refuse(where, "has no value")
        yield name, where, getattr(parameter, kind)


def _of_tensor(inputs: Inputs) -> Iterator[tuple[str, str, Value]]:
    """Yield the parameters in the JSON of the tensor. A null counts as absent."""
    text = inputs.text("sampling_parameters")
    where = input_name("sampling_parameters")
    for name, value in _object(where, text or "{}").items():
        if value is not None:
            yield name, f"{where}.{name[:100]}", value


def _object(where: str, text: str) -> dict[str, Value]:
    try:
        value = json.loads(text, parse_float=number_of)
    except (ValueError, RecursionError) as error:
        refuse(where, f"is no JSON: {error}")
    if not isinstance(value, dict):
        refuse(where, "is no JSON object")
    return value


PROMPTS = ("text_input", "messages", "input_ids")


@dataclass(frozen=True)
class Ask:
    """Hold a checked request. `streamed`: its output is wanted in pieces. `outputs`: names, in this order. `prefix`: text before
    the first output. `names`: our fields to the caller's names."""

    id: str
    message: mesh_pb2.GenerateRequest | mesh_pb2.ChatRequest
    streamed: bool
    outputs: tuple[str, ...]
    prefix: str = ""
    timeout_s: float | None = None
    empty_final: bool = False
    names: dict[str, str] = field(default_factory=dict)

    @classmethod
    def read(cls, request: pb.ModelInferRequest, *, can_stream: bool) -> "Ask":
        """Read and check a request. Raises InvalidArgument that names the tensor or parameter, NotFound. `can_stream`: the call
        takes many responses."""
        check_version(request.model_version)
        inputs = Inputs.read(request)
        parameters = Parameters.read(request, inputs)
        parameters.options.request_id = mesh_request_id(request.id)
        streamed = _streamed(inputs, can_stream=can_stream)
        prompt = _prompt(inputs)
        return cls(
            id=request.id,
            message=_message(request.model_name, prompt, inputs, parameters),
            streamed=streamed,
            outputs=_outputs(request, inputs, parameters, streamed=streamed),
            prefix=_prefix(inputs, prompt, streamed=streamed),
            timeout_s=parameters.timeout_s,
            empty_final=parameters.empty_final,
            names={**parameters.names, **_names_of_prompt(prompt), "model": "model_name"},
        )


def check_version(version: str) -> None:
    """Raise NotFound unless the version is empty or the only one that a model has."""
    if version not in ("", VERSION):
        raise NotFound(f'model_version: {version[:20]!r} is not served here; there is "{VERSION}"', field="model_version")


def _streamed(inputs: Inputs, *, can_stream: bool) -> bool:
    wanted = inputs.flag("stream")
    if wanted and not can_stream:
        refuse(input_name("stream"), "ModelInfer returns one response; call ModelStreamInfer for a stream")
    return can_stream if wanted is None else wanted


def _prompt(inputs: Inputs) -> str:
    """Return the name of the tensor that holds the prompt."""
    given = [name for name in PROMPTS if inputs.has(name)]
    if len(given) != 1:
        refuse(input_name(given[1] if given else PROMPTS[0]), f"send exactly one of {', '.join(PROMPTS)}")
    return given[0]


def _names_of_prompt(prompt: str) -> dict[str, str]:
    name = input_name(prompt)
    return {"prompt": name, "text": name, "messages": name, "tokens.ids": name}


def _message(model: str, prompt: str, inputs: Inputs, parameters: Parameters) -> mesh_pb2.GenerateRequest | mesh_pb2.ChatRequest:
    sampling, options = parameters.sampling, parameters.options
    if prompt == "messages":
        messages = _messages(inputs.text("messages") or "")
        return mesh_pb2.ChatRequest(model=model, messages=messages, sampling=sampling, options=options)
    if prompt == "input_ids":
        ids = mesh_pb2.TokenIds(ids=_ids(inputs))
        return mesh_pb2.GenerateRequest(model=model, tokens=ids, sampling=sampling, options=options)
    return mesh_pb2.GenerateRequest(model=model, text=inputs.text("text_input") or "", sampling=sampling, options=options)


def _ids(inputs: Inputs) -> list[int]:
    ids = list(map(int, inputs.elements["input_ids"]))
    if ids and not (min(ids) >= 0 and max(ids) < 2**32):
        position, token_id = next((position, token_id) for position, token_id in enumerate(ids) if not 0 <= token_id < 2**32)
        refuse(f"{input_name('input_ids')}[{position}]", f"token id {token_id} does not exist")
    return ids


def _messages(text: str) -> list[mesh_pb2.ChatMessage]:
    """Parse [{"role": …, "content": …}, …]; any other form is an error."""
    where = input_name("messages")
    try:
        dialogue = json.loads(text)
    except (ValueError, RecursionError) as error:
        refuse(where, f"is no JSON: {error}")
    if not isinstance(dialogue, list):
        refuse(where, "is no list of messages")
    if len(dialogue) > MAX_MESSAGES:
        refuse(where, f"there are {len(dialogue)} messages, {MAX_MESSAGES} are allowed")
    return [_turn(f"{where}[{position}]", turn) for position, turn in enumerate(dialogue)]


def _turn(where: str, turn: object) -> mesh_pb2.ChatMessage:
    if not isinstance(turn, dict) or not all(isinstance(value, str) for value in turn.values()):
        refuse(where, "is no object with the texts role and content")
    unknown = turn.keys() - {"role", "content"}
    if unknown:
        refuse(where, f"{min(unknown)[:100]!r} is not supported; a message has role and content")
    try:
        return mesh_pb2.ChatMessage(role=turn.get("role", ""), content=turn.get("content", ""))
    except ValueError as error:
        raise InvalidArgument(where, f"{where}: is not valid Unicode") from error


def _prefix(inputs: Inputs, prompt: str, *, streamed: bool) -> str:
    """Return the prompt where Triton's `exclude_input_in_output` is false: it then stands before the output. The default is
    true."""
    if inputs.flag("exclude_input_in_output") is not False:
        return ""
    where = input_name("exclude_input_in_output")
    if streamed or prompt != "text_input":
        refuse(where, "false is for a whole answer to text_input only")
    return inputs.text("text_input") or ""


def _outputs(request: pb.ModelInferRequest, inputs: Inputs, parameters: Parameters, *, streamed: bool) -> tuple[str, ...]:
    for tensor in request.outputs:
        _check_output(tensor, streamed=streamed)
    if request.outputs:
        return tuple(dict.fromkeys(tensor.name for tensor in request.outputs))
    usual = PIECE_OUTPUTS if streamed else WHOLE_OUTPUTS
    logprobs = tuple(name for name in ("logprobs", "prompt_logprobs") if parameters.sampling.HasField(name))
    flagged = [output for name, output in FLAGS.items() if inputs.flag(name)]
    return tuple(dict.fromkeys((*usual, *logprobs, *flagged)))


def _check_output(tensor: pb.ModelInferRequest.InferRequestedOutputTensor, *, streamed: bool) -> None:
    where = f'outputs["{tensor.name[:100]}"]'
    if tensor.name not in OUTPUTS:
        refuse(where, f"there is no such output; there are {', '.join(OUTPUTS)}")
    if tensor.parameters:
        refuse(where, f"parameter {min(tensor.parameters)[:100]!r}: neither classification nor shared memory is served here")
    if streamed and tensor.name in LATE_OUTPUTS:
        refuse(
            where, f"is known when the answer is complete; over a stream it is a parameter of the final response ({tensor.name})"
        )
