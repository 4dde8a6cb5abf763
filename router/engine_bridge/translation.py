"""From a worker's TokenRequest to an engine's GenerateRequests, and from its messages to output. Pure.

A request without output so far is one call, with the protocol's own `n`. One that goes on is one call for each unfinished choice:
its prompt is the prompt and what the choice has emitted. vLLM draws choice i of a seeded request with seed + i, and the calls of
single choices do the same. It refuses several choices of a greedy request, which are single calls, too.

What the protocol cannot say is refused by name, so that another worker takes the request: FAILED_PRECONDITION.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import cast

from pdmesh.runtime.errors import OTHER_ENGINE, FailedPrecondition
from pdmesh.sampling_params import MAX_CHOICES, MAX_LOGPROBS, PARAMETERS, Kind
from pdmesh.third_party.vllm import vllm_engine_pb2 as pb
from pdmesh.v1 import common_pb2

NUM_SEEDS = 2**31 - MAX_CHOICES
"""The protocol's seeds have 31 bits, and the last choice has the seed + `MAX_CHOICES - 1`. Larger ones are taken modulo this."""

_COPIED = tuple(
    each
    for each in PARAMETERS
    if each.name in pb.SamplingParams.DESCRIPTOR.fields_by_name
    and each.name not in ("seed", "n", "logprobs", "prompt_logprobs", "max_tokens")
)
_SIMPLE_CONSTRAINTS = ("json_schema", "regex", "grammar")
_FINISH_REASONS = {"stop": common_pb2.FINISH_REASON_STOP, "length": common_pb2.FINISH_REASON_LENGTH}


@dataclass(frozen=True)
class EngineCall:
    """Hold one Generate call. `choices`: the choice of the request that each index of the call is, with its next output index."""

    request: pb.GenerateRequest
    choices: tuple[tuple[int, int], ...]

    @property
    def num_prompt_tokens(self) -> int:
        """Return the length of its prompt, emitted tokens included."""
        return len(self.request.tokenized.input_ids)


def check(request: common_pb2.TokenRequest, *, shares_cache: bool) -> None:
    """Raise FailedPrecondition for what the protocol cannot say. `shares_cache`: tenants may share the engine's prefix cache."""
    if request.adapter:
        _refuse("request.adapter", "names no LoRA adapter")
    tenant_scope = f"{len(request.tenant)}:{request.tenant}:"
    if request.cache_salt.removeprefix(tenant_scope):
        _refuse("options.cache_salt", "has no cache salt: the engine's prefix cache is shared by all of its requests")
    if request.tenant and not shares_cache:
        _refuse("options.tenant", "keeps no tenants apart in the engine's prefix cache; --engine-tenants share accepts that")
    if request.sampling.HasField("prompt_logprobs"):
        _refuse("sampling.prompt_logprobs", "is not read for log-probabilities of prompts")
    if request.sampling.HasField("constraint") and any(choice.token_ids for choice in request.emitted):
        _refuse("sampling.constraint", "cannot continue a constrained output that has begun")


def _refuse(field: str, what: str) -> None:
    error = FailedPrecondition(field, f"{field}: vLLM's engine protocol {what}")
    error.reason = OTHER_ENGINE
    raise error


def engine_calls(request: common_pb2.TokenRequest, name: str) -> list[EngineCall]:
    """Return the calls that compute the request. Their ids begin with `name`."""
    fresh = not any(choice.token_ids or choice.finish_reason for choice in request.emitted)
    num_choices = request.sampling.n or 1
    if fresh and not (num_choices > 1 and _is_greedy(request.sampling)):
        return [EngineCall(_generate(request, name), tuple((choice, 0) for choice in range(num_choices)))]
    emitted = {choice: common_pb2.EmittedChoice(index=choice) for choice in range(num_choices)}
    emitted.update((choice.index, choice) for choice in request.emitted)
    return [_call_of(request, name, choice) for choice in emitted.values() if not choice.finish_reason]


def _is_greedy(sampling: common_pb2.SamplingParams) -> bool:
    return sampling.HasField("temperature") and sampling.temperature == 0


def _call_of(request: common_pb2.TokenRequest, name: str, choice: common_pb2.EmittedChoice) -> EngineCall:
    """Return the call that goes on with one choice."""
    generate = _generate(request, f"{name}-{choice.index}", choice.token_ids, choice.index)
    return EngineCall(generate, ((choice.index, len(choice.token_ids)),))


def _generate(
    request: common_pb2.TokenRequest, call_id: str, emitted: Sequence[int] = (), choice: int | None = None
) -> pb.GenerateRequest:
    """Return one call. `choice` None: all choices."""
    sampling, params = request.sampling, _copied(request.sampling)
    params.n = (sampling.n or 1) if choice is None else 1
    params.seed = sampling.seed % NUM_SEEDS + (choice or 0)
    params.max_tokens = max(1, sampling.max_tokens - len(emitted))
    params.min_tokens = max(0, sampling.min_tokens - len(emitted))
    if sampling.HasField("logprobs"):
        params.logprobs = _asked_logprobs(sampling.logprobs)
    _constrain(params, sampling.constraint)
    prompt = pb.TokenizedInput(input_ids=[*request.prompt_token_ids, *emitted])
    return pb.GenerateRequest(request_id=call_id, tokenized=prompt, sampling_params=params, stream=True)


def _copied(sampling: common_pb2.SamplingParams) -> pb.SamplingParams:
    params = pb.SamplingParams()
    for descriptor, value in sampling.ListFields():
        for each in _COPIED:
            if each.name == descriptor.name:
                _set(params, each.name, each.kind, value)
    return params


def _set(params: pb.SamplingParams, name: str, kind: Kind, value: object) -> None:
    if kind is Kind.TOKENS:
        getattr(params, name).extend(value)
    elif kind is Kind.BIASES:
        getattr(params, name).update({each.token_id: each.bias for each in cast("Iterable[common_pb2.TokenBias]", value)})
    else:
        setattr(params, name, value)


def _asked_logprobs(top: int) -> int:
    """Return how many alternatives to ask for: engines put the drawn token among them, so one more shows all that are wanted."""
    return min(top + 1, MAX_LOGPROBS) if top else 0


def _constrain(params: pb.SamplingParams, constraint: common_pb2.Constraint) -> None:
    kind = constraint.WhichOneof("kind")
    if kind == "choice":
        params.choice.choices.extend(constraint.choice.values)
    elif kind in _SIMPLE_CONSTRAINTS:
        setattr(params, kind, getattr(constraint, kind))


# Output.


def finish_reason_of(complete: pb.GenerateComplete) -> common_pb2.FinishReason.ValueType | None:
    """Return why a choice ended; None: the engine gave it up ("abort", "error")."""
    return _FINISH_REASONS.get(complete.finish_reason)


def logprobs_of(said: pb.OutputLogProbs, top: int) -> Iterator[common_pb2.Logprobs]:
    """Yield the log-probabilities of a chunk's tokens, each with the `top` most likely alternatives, most likely first."""
    for position, (token_id, logprob) in enumerate(zip(said.token_ids, said.token_logprobs, strict=False)):
        others = said.top_logprobs[position] if position < len(said.top_logprobs) else pb.TopLogProbs()
        pairs = sorted(zip(others.values, others.token_ids, strict=False), key=lambda pair: -pair[0])
        yield common_pb2.Logprobs(
            chosen=common_pb2.TokenLogprob(token_id=token_id, logprob=logprob),
            top=[common_pb2.TokenLogprob(token_id=other, logprob=value) for value, other in pairs[:top]],
        )
