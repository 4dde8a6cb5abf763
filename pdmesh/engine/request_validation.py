"""Whether this engine could ever serve a request: pure checks, made before anything is held for it."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from pdmesh.engine.errors import InvalidRequest, RequestTooLarge
from pdmesh.engine.kv_cache.block_pool import num_blocks_for
from pdmesh.engine.kv_cache.retention import MAX_SECONDS
from pdmesh.engine.outputs import FinishReason
from pdmesh.engine.request import EndRule, EngineRequest
from pdmesh.engine.scheduler.sequence import unfinished_choices


@dataclass(frozen=True)
class Limits:
    """Hold what bounds a request in one engine."""

    block_size: int
    num_blocks: int
    max_num_seqs: int
    max_context: int  # prompt and output together
    vocab_size: int
    eos_token_ids: Collection[int]
    can_pool: bool = False  # embeddings can be computed

    def end_rule(self, request: EngineRequest) -> EndRule:
        """Return what ends the choices of the request."""
        return EndRule.of(
            request.sampling,
            prompt_length=len(request.prompt),
            eos_token_ids=self.eos_token_ids,
            max_context=self.max_context,
        )

    def finish_reason(self, request: EngineRequest, output: Sequence[int]) -> FinishReason | None:
        """Return why a choice of the request with this output has ended, or None."""
        return self.end_rule(request).reason(output)


def check_request(request: EngineRequest, limits: Limits) -> None:
    """Raise InvalidRequest or RequestTooLarge; the message names the field."""
    try:
        request.sampling.validate()
    except ValueError as error:
        raise InvalidRequest(f"sampling.{error}") from error
    _check_shape(request)
    _check_pooling(request, limits)
    _check_tokens(request, limits)
    _check_history(request, limits)
    _check_retention(request)
    _check_grammar(request, limits)
    _check_size(request, limits)


def _check_shape(request: EngineRequest) -> None:
    num_choices = request.sampling.n
    if not request.prompt:
        raise InvalidRequest("prompt: empty; give at least one token")
    for name, values in (("emitted", request.emitted), ("finished", request.finished), ("matchers", request.matchers)):
        if values and len(values) != num_choices:
            raise InvalidRequest(f"{name}: {len(values)} entries for n={num_choices} choices; give none or one for each")
    if not unfinished_choices(request):
        raise InvalidRequest("finished: every choice is; there is nothing to generate")
    if request.prefill_only and len(unfinished_choices(request)) > 1 and any(request.emitted):
        raise InvalidRequest("emitted: several choices with history cannot be prefilled for another engine; run them there")


def _check_pooling(request: EngineRequest, limits: Limits) -> None:
    if request.pooling is None:
        return
    if not limits.can_pool:
        raise InvalidRequest(
            "pooling: this engine's backend gives no hidden states; the native, the torch and the Triton backend do"
        )
    if request.sampling.n > 1 or request.sampling.max_tokens > 1 or request.emitted or request.prefill_only or request.grammar:
        raise InvalidRequest("sampling: pooling needs n=1, max_tokens=1, no history, no grammar and no hand-off")


def _check_tokens(request: EngineRequest, limits: Limits) -> None:
    for name, tokens in (("prompt", request.prompt), *(("emitted", tokens) for tokens in request.emitted)):
        if tokens and not 0 <= min(tokens) <= max(tokens) < limits.vocab_size:
            raise InvalidRequest(f"{name}: token ids {min(tokens)} to {max(tokens)} leave the vocabulary of {limits.vocab_size}")


def _check_history(request: EngineRequest, limits: Limits) -> None:
    for choice in unfinished_choices(request):
        reason = limits.finish_reason(request, request.emitted[choice]) if request.emitted else None
        if reason is not None:
            raise InvalidRequest(f"emitted: choice {choice} has ended already ({reason.value}); mark it as finished")


def _check_retention(request: EngineRequest) -> None:
    retention = request.retention
    if retention is None:
        return
    if not 0 <= retention.seconds <= MAX_SECONDS:
        raise InvalidRequest(f"retention.seconds: {retention.seconds} is not within 0 to {MAX_SECONDS}")
    if retention.final and not retention.session:
        raise InvalidRequest("retention.final: it ends a session, and the request names none")


def _check_grammar(request: EngineRequest, limits: Limits) -> None:
    """Check the grammar: a constraint ends its output itself, by end-of-sequence, and nothing may prevent that."""
    grammar = request.grammar
    if grammar is None:
        return
    if grammar.vocab_size != limits.vocab_size:
        raise InvalidRequest(f"sampling.constraint: compiled for {grammar.vocab_size} tokens, the model has {limits.vocab_size}")
    for name in ("min_tokens", "ignore_eos"):
        if getattr(request.sampling, name):
            raise InvalidRequest(f"sampling.{name}: excludes a constraint, whose output ends when it is complete")
    for choice in unfinished_choices(request) if request.emitted and not request.matchers else ():
        index = grammar.first_stray(request.emitted[choice])
        if index is not None:
            raise InvalidRequest(f"emitted: token {index} of choice {choice} does not follow sampling.constraint")


def _check_size(request: EngineRequest, limits: Limits) -> None:
    num_choices = len(unfinished_choices(request))
    if num_choices > limits.max_num_seqs:
        raise RequestTooLarge(f"n: {num_choices} choices exceed this engine's {limits.max_num_seqs} sequences; ask for fewer")
    if len(request.prompt) >= limits.max_context:
        raise RequestTooLarge(
            f"prompt: {len(request.prompt)} tokens leave no room to answer in a context of {limits.max_context}"
        )
    num_tokens = min(num_kv_tokens(request) if request.prefill_only else _num_tokens_at_most(request), limits.max_context)
    num_blocks = num_blocks_for(num_tokens, limits.block_size)
    if num_blocks > limits.num_blocks:
        raise RequestTooLarge(
            f"prompt and max_tokens: {num_tokens} tokens need {num_blocks} blocks of {limits.block_size}, "
            f"the pool has {limits.num_blocks}; ask for less or give the engine more KV memory"
        )


def num_kv_tokens(request: EngineRequest) -> int:
    """Return the tokens whose KV must be there before the next token is drawn: the prompt, and the history if only one choice is
    unfinished."""
    choices = unfinished_choices(request)
    return len(request.prompt) + (len(request.emitted[choices[0]]) if request.emitted and len(choices) == 1 else 0)


def _num_tokens_at_most(request: EngineRequest) -> int:
    return len(request.prompt) + request.sampling.max_tokens
