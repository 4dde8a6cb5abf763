"""From an engine's GenerateRequest to the frontend's. Every error names the field of the caller's message."""

import math

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
    "logit_bias": "is not supported",
    "truncate_prompt_tokens": "is not supported; send the prompt as it is to be used",
    "structural_tag": "is not supported; send json_schema, regex, grammar or choice",
}
# 0 is the default of both protocols.
_NUMBERS = ("min_p", "frequency_penalty", "presence_penalty")
_SAME = ("top_k", "min_tokens", "ignore_eos", "n")
ANY_OBJECT = '{"type": "object"}'

_FIELDS = (*_NUMBERS, *_SAME, "temperature", "top_p", "repetition_penalty", "max_tokens", "seed", "logprobs")
_LISTS = ("stop", "stop_token_ids")
_CONSTRAINTS = ("json_schema", "regex", "grammar", "choice")
# Our fields to the caller's names, for errors.
NAMES = {
    **{f"sampling.{name}": f"sampling_params.{name}" for name in (*_FIELDS, *_LISTS)},
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
    present = {descriptor.name for descriptor, _ in params.ListFields()}
    for name, why in _REFUSED_SAMPLING.items():
        if name in present:
            refuse(f"sampling_params.{name}", why)
    sampling = common_pb2.SamplingParams(stop=params.stop, stop_token_ids=params.stop_token_ids)
    for name in _SAME:
        setattr(sampling, name, getattr(params, name))
    for name in _NUMBERS:
        setattr(sampling, name, _number(params, name))
    for name in ("top_p", "repetition_penalty"):
        if name in present:  # these fields are set if and only if they are not 0
            setattr(sampling, name, _number(params, name))
    if params.HasField("temperature"):
        sampling.temperature = _number(params, "temperature")
    if params.HasField("max_tokens"):
        sampling.max_tokens = params.max_tokens
    if params.HasField("seed"):
        sampling.seed = params.seed % 2**64
    if params.HasField("logprobs"):
        sampling.logprobs = _logprobs(params.logprobs)
    _constrain(sampling, params)
    return sampling


def _number(params: pb.SamplingParams, name: str) -> float:
    value: float = getattr(params, name)
    return shortest(value) if math.isfinite(value) else value


def _logprobs(value: int) -> int:
    if value < 0:
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
