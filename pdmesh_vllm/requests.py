"""The requests of one engine: a request of pdmesh, and the requests in vLLM that compute its choices.

    RESERVING ──granted──► RESERVED ──start──► ACTIVE ──► gone when its last choice ends
                                    add / run_local ──► ACTIVE ──first token, prefill_only──► HELD ──► gone by release

A choice is one request in vLLM, under a name of its own: a choice that begins anew (more history, computed here after all) gets
another name, because vLLM may hold blocks of the old one for another step.
"""

from __future__ import annotations

import contextlib
import enum
import time
from collections.abc import Sequence
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from vllm import SamplingParams
from vllm.v1.engine import EngineCoreRequest

from pdmesh.engine.interface import ReservedBlocks
from pdmesh.engine.outputs import RequestStarted, StartClock, TokenLogprobs
from pdmesh.engine.request import EngineRequest, end_tokens
from pdmesh.engine.request_validation import Limits
from pdmesh.engine.sampling.grammar import Matcher
from pdmesh.engine.sampling.sampler import SampleRow
from pdmesh_vllm.prefix_cache import salt_of
from pdmesh_vllm.sampling import REQUEST

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest
    from vllm.v1.request import Request


class State(enum.Enum):
    RESERVING = "waiting for blocks"
    RESERVED = "reserved"
    ACTIVE = "active"
    HELD = "held"


@dataclass
class Pending:
    """Hold the answer to a reserve() that vLLM has not decided on; None: no room. `until`: monotonic seconds."""

    answer: Future[ReservedBlocks | None]
    until: float
    was_asked: bool = False  # vLLM has looked for blocks


@dataclass(eq=False)
class Choice:
    """Hold one choice of a request, and what vLLM knows of it."""

    name: str  # of its request in vLLM
    group: Group
    index: int
    output: list[int]  # history, then drawn tokens
    num_in_prompt: int  # of `output` that are part of vLLM's prompt
    logprobs: TokenLogprobs | None = None  # of the token that was drawn last
    is_not_finite: bool = False
    blocks: list[int] = field(default_factory=list)  # only ever grows while the KV is announced
    num_cached: int = 0
    is_reported: bool = False  # its end as a receiver was told to vLLM
    is_taken_over: bool = False  # its KV and its first token came from elsewhere
    has_run: bool = False
    _matcher: Matcher | None = None
    _num_taken: int = 0

    @property
    def num_tokens(self) -> int:
        """Return the tokens of prompt and output."""
        return len(self.group.request.prompt) + len(self.output)

    @property
    def vllm_prompt(self) -> list[int]:
        """Return the prompt as vLLM gets it: with the history."""
        return [*self.group.request.prompt, *self.output[: self.num_in_prompt]]

    @property
    def matcher(self) -> Matcher | None:
        """Return the grammar's matcher after the present output; None without a grammar."""
        request = self.group.request
        if request.grammar is None:
            return None
        if self._matcher is None:
            ready = request.matchers[self.index] if request.matchers else None
            self._matcher = request.grammar.matcher() if ready is None else ready.copy()
            self._num_taken = 0 if ready is None else len(_history(request, self.index))
        for token_id in self.output[self._num_taken :]:
            self._matcher.take(token_id)
        self._num_taken = len(self.output)
        return self._matcher

    @property
    def has_lost_grammar(self) -> bool:
        """Return whether the output ends because its grammar could not be followed any further."""
        return self._matcher is not None and self._matcher.failed

    def sample_row(self, limits: Limits) -> SampleRow:
        """Return what the sampler has to know to draw the next token."""
        matcher, request = self.matcher, self.group.request
        return SampleRow(
            params=request.sampling,
            choice=self.index,
            index=len(self.output),
            prompt=request.prompt,
            output=self.output,
            eos_token_ids=frozenset(limits.eos_token_ids),
            allowed=None if matcher is None else matcher.allowed(),
            owner=self,
        )


@dataclass(eq=False)
class Group:
    """Hold a request and its unfinished choices."""

    request: EngineRequest
    state: State
    choices: list[Choice] = field(default_factory=list)
    clock: StartClock | None = None
    pending: Pending | None = None
    started: RequestStarted | None = None
    has_told_start: bool = False

    @property
    def num_seats(self) -> int:
        return len(self.choices)


def _history(request: EngineRequest, choice: int) -> tuple[int, ...]:
    return request.emitted[choice] if request.emitted else ()


def open_group(request: EngineRequest, state: State, names: Sequence[str]) -> Group:
    """Return a group with a choice for each that is unfinished, named by `names` in turn."""
    group = Group(request, state)
    unfinished = [index for index in range(request.sampling.n) if not (request.finished and request.finished[index])]
    for name, index in zip(names, unfinished, strict=False):
        history = list(_history(request, index))
        group.choices.append(Choice(name, group, index, history, len(history)))
    return group


# A choice as vLLM knows it.


def as_vllm(choice: Choice, limits: Limits, lora: LoRARequest | None) -> EngineCoreRequest:
    """Return a choice as vLLM takes it: greedy, because the draw decides its tokens, and with all tokens that end it."""
    request, params = choice.group.request, choice.group.request.sampling
    left = 1 if request.prefill_only else max(1, params.max_tokens - len(choice.output))
    return EngineCoreRequest(
        request_id=choice.name,
        prompt_token_ids=choice.vllm_prompt,
        mm_features=None,
        sampling_params=SamplingParams(
            temperature=0.0,
            max_tokens=left,
            ignore_eos=True,
            stop_token_ids=sorted(end_tokens(params, frozenset(limits.eos_token_ids))),
            detokenize=False,
            extra_args={REQUEST: choice.name},
        ),
        pooling_params=None,
        arrival_time=time.time(),
        lora_request=lora,
        cache_salt=salt_of(request.block_root),
        data_parallel_rank=None,
    )


def take_over(choice: Choice, request: Request, token: int) -> None:
    """Continue `request`, which is the choice in vLLM, with a token that was drawn elsewhere, behind KV that is complete.

    vLLM has not sent the request to its model yet. With the token as the last of its prompt, its next step computes that one
    alone; without, it would compute the prompt's last token again, in another shape than prefill did, and draw once more.
    """
    request.prompt_token_ids.append(token)
    request._all_token_ids.append(token)
    request.num_prompt_tokens += 1
    request.max_tokens = max(1, request.max_tokens - 1)
    request.update_block_hashes()
    choice.output.append(token)
    choice.num_in_prompt += 1
    choice.is_taken_over = True


def answer(future: Future[ReservedBlocks | None], value: ReservedBlocks | None) -> None:
    """Set a result, unless the caller has gone."""
    with contextlib.suppress(InvalidStateError):
        future.set_result(value)


def refuse(future: Future[ReservedBlocks | None], error: Exception) -> None:
    """Set an error, unless the caller has gone."""
    with contextlib.suppress(InvalidStateError):
        future.set_exception(error)
