"""From an engine's GenerateRequest to the frontend's. Every error names the field of the caller's message."""

import math
from collections.abc import Iterator

from pdmesh.sampling_params import PARAMETERS, Kind, Parameter
from pdmesh.third_party.vllm import vllm_engine_pb2 as pb
from pdmesh.v1 import common_pb2, mesh_pb2
from router.api.protocol_errors import mesh_request_id, shortest
from router.api.validation import refuse

_KV = "a mesh moves its KV itself; point the gateway at it as at one ordinary engine"
_MEDIA = "models of text only are served here"
_REFUSED = {
    "kv_transfer_params": _KV,
    "kv_transfer_params_json": _KV,
    "mm_inputs": _MEDIA,
    "extra_mm_inputs": _MEDIA,
    "media_refs": _MEDIA,
}
_REFUSED_SAMPLING = {
    "prompt_logprobs": "log-probabilities of the prompt are not supported",
    "truncate_prompt_tokens": "is not supported; send the prompt as it is to be used",
    "structural_tag": "is not supported; send json_schema, regex, grammar or choice",
}
ANY_OBJECT = '{"type": "object"}'

# Of our parameters those that the engine's protocol has, under the same names.
_PARAMETERS = {each.name: each for each in PARAMETERS if each.name in pb.SamplingParams.DESCRIPTOR.fields_by_name}
_CONSTRAINTS = ("json_schema", "regex", "grammar", "choice")
# Our fields to the caller's names, for errors.
NAMES = {
    **{f"sampling.{name}": f"sampling_params.{name}" for name in (*_PARAMETERS, "stop")},
    **{f"sampling.constraint.{name}": f"sampling_params.{name}" for name in _CONSTRAINTS},
    "sampling.constraint": "sampling_params.constraint",
    "tokens.ids": "tokenized.input_ids",
    "text": "text",
    "prompt": "input",
}


def to_mesh(request: pb.GenerateRequest) -> mesh_pb2.GenerateRequest:
    """Return the frontend's request. The model is the only one that the router serves. Raises InvalidArgument."""
    present = {descriptor.name for descriptor, _ in request.ListFields()}
    for name, why in _REFUSED.items():
        if name in present:
            refuse(name, why)
    if request.data_parallel_rank:
        refuse("data_parallel_rank", f"{request.data_parallel_rank} does not exist: there is rank 0")
    result = mesh_pb2.GenerateRequest(sampling=_sampling(request.sampling_params))
    result.options.request_id = mesh_request_id(request.request_id)
    kind = request.WhichOneof("input")
    if kind is None:
        refuse("input", "is missing; send tokenized or text")
    if kind == "text":
        result.text = request.text
    else:
        result.tokens.ids.extend(request.tokenized.input_ids)
    return result


def _sampling(params: pb.SamplingParams) -> common_pb2.SamplingParams:
    present = {descriptor.name for descriptor, _ in params.ListFields()}  # what is absent, or 0, is the default, as with us
    for name, why in _REFUSED_SAMPLING.items():
        if name in present:
            refuse(f"sampling_params.{name}", why)
    sampling = common_pb2.SamplingParams(stop=params.stop)
    for name, parameter in _PARAMETERS.items():
        if name not in present:
            continue
        if parameter.kind is Kind.TOKENS:
            getattr(sampling, name).extend(getattr(params, name))
        elif parameter.kind is Kind.BIASES:
            sampling.logit_bias.extend(_biases(params))
        else:
            setattr(sampling, name, _value(parameter, getattr(params, name)))
    _constrain(sampling, params)
    return sampling


def _biases(params: pb.SamplingParams) -> Iterator[common_pb2.TokenBias]:
    for token_id, bias in params.logit_bias.items():
        if token_id < 0:
            refuse("sampling_params.logit_bias", f"token id {token_id} is negative")
        yield common_pb2.TokenBias(token_id=token_id, bias=bias)


def _value(parameter: Parameter, value: float) -> float:
    if parameter.kind is Kind.NUMBER:
        return shortest(value) if math.isfinite(value) else value
    if parameter.name == "seed":
        return int(value) % 2**64
    if parameter.name == "logprobs" and value < 0:
        refuse("sampling_params.logprobs", f"{value} is negative; the whole vocabulary is not supported")
    return value


def _constrain(sampling: common_pb2.SamplingParams, params: pb.SamplingParams) -> None:
    kind = params.WhichOneof("constraint")
    if kind is None:
        return
    if kind == "json_object":
        if params.json_object:
            sampling.constraint.json_schema = ANY_OBJECT
    elif kind == "choice":
        sampling.constraint.choice.values.extend(params.choice.choices)
        sampling.constraint.choice.SetInParent()
    else:
        setattr(sampling.constraint, kind, getattr(params, kind))
