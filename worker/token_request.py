"""From the wire to the engine: a TokenRequest, checked field by field, becomes an EngineRequest.

Checked here is what only the wire knows (presence, indexes, what is the router's). Vocabulary and context are checked by the
engine, in one place for all its callers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from engine.grammar import Grammar
from engine.request import EngineRequest
from engine.sampling_params import SamplingParams
from protos.v1 import common_pb2
from runtime.errors import FailedPrecondition, InvalidArgument
from text.grammar import GrammarCompiler

MAX_CHOICES = 16
MAX_LOGPROBS = 20


@dataclass(frozen=True)
class TokenRequestTranslator:
    """For a worker that serves `model`. `cache_root(tenant, cache_salt)` is where its block hashes begin; `grammars` compiles
    constraints, and is None where the model has no tokenizer."""

    model: str
    cache_root: Callable[[str, str], bytes]
    grammars: GrammarCompiler | None = None

    async def prepare(self, request: common_pb2.TokenRequest) -> None:
        """Compiles the constraint, if there is a new one, in a thread: the call that follows finds it. Raises as the call."""
        constraint = request.sampling.constraint
        kind = constraint.WhichOneof("kind")
        if kind is not None and self.grammars is not None and self.grammars.known(kind, _source(constraint)) is None:
            await asyncio.to_thread(self._grammar, request.sampling)

    def __call__(self, request: common_pb2.TokenRequest) -> EngineRequest:
        """Raises InvalidArgument, or FailedPrecondition for another model, naming the field from `request` on."""
        if request.model != self.model:
            raise FailedPrecondition("request.model", f"this worker serves {self.model!r}, not {request.model[:80]!r}")
        if not request.prompt_token_ids:
            raise InvalidArgument("request.prompt_token_ids", "empty; give at least one token")
        sampling = _sampling(request.sampling)
        emitted, finished = _history(request, sampling.n)
        return EngineRequest(
            request_id="",  # the services name it
            prompt=tuple(request.prompt_token_ids),
            sampling=sampling,
            emitted=emitted,
            finished=finished,
            cache_root=self.cache_root(request.tenant, request.cache_salt),
            grammar=self._grammar(request.sampling),
        )

    def _grammar(self, sampling: common_pb2.SamplingParams) -> Grammar | None:
        if not sampling.HasField("constraint"):
            return None
        field = "request.sampling.constraint"
        kind = sampling.constraint.WhichOneof("kind")
        if kind is None:
            raise InvalidArgument(field, "is empty; give one of json_schema, regex, choice and grammar")
        if self.grammars is None:
            raise FailedPrecondition(field, "this worker's model is no folder with a tokenizer; `pdmesh models fetch` makes one")
        try:
            return self.grammars.compile(kind, _source(sampling.constraint))
        except ValueError as error:
            raise InvalidArgument(f"{field}.{kind}", str(error)) from error


def _source(constraint: common_pb2.Constraint) -> str | tuple[str, ...]:
    kind = constraint.WhichOneof("kind")
    return tuple(constraint.choice.values) if kind == "choice" or kind is None else str(getattr(constraint, kind))


def _sampling(wire: common_pb2.SamplingParams) -> SamplingParams:
    for field in ("seed", "max_tokens"):
        if not wire.HasField(field):
            raise InvalidArgument(f"request.sampling.{field}", "missing; the router sets it")
    if wire.stop:
        raise InvalidArgument("request.sampling.stop", "stop strings are the router's; workers know tokens only")
    if wire.n > MAX_CHOICES:
        raise InvalidArgument("request.sampling.n", f"{wire.n} choices; at most {MAX_CHOICES}")
    if wire.logprobs > MAX_LOGPROBS:
        raise InvalidArgument("request.sampling.logprobs", f"{wire.logprobs} alternatives; at most {MAX_LOGPROBS}")
    params = SamplingParams(
        temperature=wire.temperature if wire.HasField("temperature") else 1.0,
        top_k=wire.top_k,
        top_p=wire.top_p if wire.HasField("top_p") else 1.0,
        min_p=wire.min_p,
        repetition_penalty=wire.repetition_penalty if wire.HasField("repetition_penalty") else 1.0,
        presence_penalty=wire.presence_penalty,
        frequency_penalty=wire.frequency_penalty,
        seed=wire.seed,
        max_tokens=wire.max_tokens,
        min_tokens=wire.min_tokens,
        ignore_eos=wire.ignore_eos,
        stop_token_ids=tuple(wire.stop_token_ids),
        logprobs=wire.logprobs if wire.HasField("logprobs") else None,
        n=wire.n or 1,
    )
    _check_ranges(params)
    return params


def _check_ranges(params: SamplingParams) -> None:
    try:
        params.validate()
    except ValueError as error:
        field, _, problem = str(error).partition(": ")
        raise InvalidArgument(f"request.sampling.{field}", problem) from error


def _history(request: common_pb2.TokenRequest, num_choices: int) -> tuple[tuple[tuple[int, ...], ...], tuple[bool, ...]]:
    """(emitted, finished) by choice; both empty when nothing was emitted."""
    if not request.emitted:
        return (), ()
    choices = sorted(request.emitted, key=lambda choice: choice.index)
    indexes = [choice.index for choice in choices]
    if indexes != list(range(num_choices)):
        raise InvalidArgument("request.emitted", f"choices {indexes[:20]}; give none, or one for each of {num_choices}")
    emitted = tuple(tuple(choice.token_ids) for choice in choices)
    finished = tuple(choice.finish_reason != common_pb2.FINISH_REASON_UNSPECIFIED for choice in choices)
    if all(finished):
        raise InvalidArgument("request.emitted", "every choice has finished; there is nothing to generate")
    return emitted, finished
