"""Parameters of a request, from its `parameters` and from the JSON in the tensor `sampling_parameters`, to our messages."""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from pdmesh.third_party.kserve import grpc_service_pb2 as pb
from pdmesh.v1 import common_pb2, mesh_pb2
from router.api.kserve import values
from router.api.kserve.tensors import Inputs, input_name
from router.api.kserve.values import Value
from router.api.validation import refuse

Read = Callable[[str, Value], object]
_SAMPLING: dict[str, Read] = {
    "temperature": values.number,
    "top_k": values.top_k,
    "top_p": values.number,
    "min_p": values.number,
    "repetition_penalty": values.number,
    "presence_penalty": values.number,
    "frequency_penalty": values.number,
    "seed": values.seed,
    "max_tokens": values.count,
    "min_tokens": values.count,
    "ignore_eos": values.flag,
    "logprobs": values.count,
    "n": values.count,
}
_LISTS: dict[str, Callable[[str, Value], list[str] | list[int]]] = {"stop": values.texts, "stop_token_ids": values.counts}
_CONSTRAINTS: dict[str, Read] = {
    "json_schema": values.schema,
    "regex": values.text,
    "grammar": values.text,
    "choice": values.alternatives,
}
_NESTED = ("constraint", "structured_outputs", "guided_decoding")  # objects that hold one of the four, or "json"
_OPTIONS: dict[str, Read] = {
    "tenant": values.text,
    "cache_salt": values.text,
    "slo_ttft_ms": values.count,
    "slo_tpot_ms": values.count,
}
_MODES = {"local": mesh_pb2.PREFILL_MODE_LOCAL, "remote": mesh_pb2.PREFILL_MODE_REMOTE}
# Triton's: 0 is the default, 1 the highest.
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
    """What a request's parameters say. `timeout_s`: seconds, None without one. `names`: our fields to the caller's names."""

    sampling: common_pb2.SamplingParams = field(default_factory=common_pb2.SamplingParams)
    options: mesh_pb2.RequestOptions = field(default_factory=mesh_pb2.RequestOptions)
    timeout_s: float | None = None
    empty_final: bool = False
    names: dict[str, str] = field(default_factory=dict)

    @classmethod
    def read(cls, request: pb.ModelInferRequest, inputs: Inputs) -> "Parameters":
        """Raises InvalidArgument that names the parameter."""
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
            self.options.mode = _MODES.get(values.text(where, value)) or refuse(where, "is neither local nor remote")
        elif name == "priority":
            self.options.priority = _PRIORITIES[values.whole(0, len(_PRIORITIES))(where, value)]
        elif name == "timeout":  # microseconds; 0 is none
            self.timeout_s = values.count(where, value) / 1e6 or None
        elif name == EMPTY_FINAL:
            self.empty_final = values.flag(where, value)
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
    """A null is as good as absent."""
    text = inputs.text("sampling_parameters")
    where = input_name("sampling_parameters")
    for name, value in _object(where, text or "{}").items():
        if value is not None:
            yield name, f"{where}.{name[:100]}", value


def _object(where: str, text: str) -> dict[str, Value]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        refuse(where, f"is no JSON: {error}")
    if not isinstance(value, dict):
        refuse(where, "is no JSON object")
    return value
