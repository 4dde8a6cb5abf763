"""What a placement would do: to the request's own TTFT and TPOT, and to the sequences that run already. Pure; all in seconds.

A worker computes prompts in the order in which they come, in chunks that share its steps with the sequences that decode there:

    steps for t tokens = t / chunk, chunk = what a step may compute less a token for each sequence that decodes
    time for t tokens  = their work + steps · (a step in which only those sequences get their token)

Prompts in the queue come first; what the worker has done of them since its report is estimated from the report's age.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from planning.latency_model import LatencyModel, prefill_context
from router.views import WorkerView

DEFAULT_CHUNK = 512
"""Tokens of a step where the worker does not say."""

NEUTRAL = LatencyModel(
    fixed_s=5e-3, per_prefill_token_s=2e-4, per_prefill_context_s=1e-8, per_sequence_s=3e-4, per_context_token_s=1e-7
)
"""A worker of a group in which nobody says how fast it is: its queue and its sequences still count."""


class Prediction(NamedTuple):
    """Of one candidate. `delay_s`: what running sequences lose, summed; `work_s`: what the placement costs the fleet.

    `ahead_s`: the part of `ttft_s` that other prompts take. `misses`: objectives thought to be missed, own and others'."""

    ttft_s: float
    tpot_s: float
    delay_s: float
    work_s: float
    ahead_s: float
    misses: float


class Overhead(NamedTuple):
    """Of a pair beyond the steps: `before_s` the first token (reservation, calls, return), `after_s` it, until decode goes on."""

    before_s: float
    after_s: float


class PromptSide(NamedTuple):
    """What computing the prompt on one worker means. `rows` decode there and lose `own_s` each."""

    ahead_s: float
    compute_s: float
    own_s: float
    rows: int
    step_s: float
    num_steps: int
    fixed_s: float


class OutputSide(NamedTuple):
    """What owning the request means: `tpot_s` of its own, `row_s` that it adds to every step of `rows` others."""

    tpot_s: float
    row_s: float
    rows: int
    queue_s: float


@dataclass(frozen=True)
class Engine:
    """A worker with the model of its speed: numbers that every prediction about it needs, computed once."""

    view: WorkerView
    model: LatencyModel

    @cached_property
    def rows(self) -> int:
        """Sequences that get a token in every step of now."""
        return self.view.num_decoding

    @cached_property
    def rows_soon(self) -> int:
        """With those that are about to decode."""
        return self.rows + self.view.num_starting + self.view.dispatched_decodes

    @cached_property
    def context_soon(self) -> float:
        """Tokens that those attend to; who has not started is thought to be like those that have."""
        mean = self.view.decode_context / self.rows if self.rows else 0.0
        return self.view.decode_context + self.view.num_starting * mean + self.view.dispatched_context

    @cached_property
    def step_s(self) -> float:
        """A step in which nothing but today's sequences get a token."""
        return self.model.decode_s(self.rows, self.view.decode_context)

    @cached_property
    def chunk(self) -> int:
        """Prompt tokens in a step."""
        return max(1, (self.view.max_num_batched_tokens or DEFAULT_CHUNK) - self.rows)

    @cached_property
    def _reported_s(self) -> float:
        prompts = max(1, self.view.num_prefilling)
        return self._queue_s(self.view.num_waiting_tokens, self.view.num_waiting_tokens / prompts)

    @cached_property
    def _dispatched_s(self) -> float:
        prompts = max(1, self.view.dispatched_seqs)
        return self._queue_s(self.view.dispatched_tokens, self.view.dispatched_tokens / prompts)

    def _queue_s(self, num_tokens: int, prompt_tokens: float) -> float:
        """Prompts of `prompt_tokens` each, together `num_tokens`."""
        work = num_tokens * (self.model.per_prefill_token_s + self.model.per_prefill_context_s * prompt_tokens / 2)
        return work + self.step_s * num_tokens / self.chunk

    def ahead_s(self, now: float) -> float:
        """Until the prompts that are here already have been computed, with half a step that is under way."""
        under_way = self.step_s / 2 if self.rows else 0.0
        return max(0.0, self._reported_s - max(0.0, now - self.view.figures_at)) + self._dispatched_s + under_way

    @cached_property
    def busy(self) -> bool:
        """Has it anything to do?"""
        return self.rows_soon > 0 or self.view.tokens_ahead > 0

    def prompt_side(self, num_tokens: int, num_cached: int, now: float) -> PromptSide:
        """Computing a prompt of which `num_cached` tokens are there."""
        first = min(num_cached, num_tokens - 1)
        own = num_tokens - first
        own_s = own * self.model.per_prefill_token_s + prefill_context(first, num_tokens) * self.model.per_prefill_context_s
        num_steps = -(-own // self.chunk)
        ahead_s = self.ahead_s(now)
        return PromptSide(
            ahead_s, ahead_s + own_s + num_steps * self.step_s, own_s, self.rows, self.step_s, num_steps, self.model.fixed_s
        )

    def output_side(self, num_tokens: int, num_choices: int, expected_tokens: float, now: float) -> OutputSide:
        """Owning `num_choices` outputs of `expected_tokens` behind a prompt of `num_tokens`."""
        model = self.model
        context = num_choices * (num_tokens + expected_tokens / 2)
        row_s = num_choices * model.per_sequence_s + context * model.per_context_token_s
        others_s = model.fixed_s + self.rows_soon * model.per_sequence_s + self.context_soon * model.per_context_token_s
        return OutputSide(others_s + row_s, row_s, self.rows_soon, self.ahead_s(now))


def miss(value_s: float, goal_s: float | None) -> float:
    """How likely an objective is to be missed, in [0, 1]: a prediction near the goal is worth half a miss."""
    if goal_s is None:
        return 0.0
    return min(1.0, max(0.0, (value_s / goal_s - 0.8) / 0.4))


def local(prompt: PromptSide, output: OutputSide, over: Overhead, expected: float, goals: "Goals") -> Prediction:
    """Decode computes the prompt itself, and its sequences wait in every step that holds a part of it."""
    ttft_s = prompt.compute_s + over.before_s
    gaps = max(1.0, expected - 1)
    delay_s = prompt.rows * prompt.own_s + output.rows * expected * output.row_s
    others_s = output.tpot_s + prompt.own_s / max(1.0, expected)
    misses = miss(ttft_s, goals.ttft_s) + miss(output.tpot_s, goals.tpot_s) + output.rows * miss(others_s, goals.running_tpot_s)
    work_s = prompt.own_s + prompt.num_steps * prompt.fixed_s + expected * output.row_s
    return Prediction(ttft_s, output.tpot_s + over.after_s / gaps, delay_s, work_s, prompt.ahead_s, misses)


def remote(prompt: PromptSide, output: OutputSide, over: Overhead, expected: float, goals: "Goals") -> Prediction:
    """Another worker computes the prompt: only sequences that run there wait for it. Prompts in decode's own queue that last
    longer than the computation slow the request's first tokens."""
    ttft_s = prompt.compute_s + over.before_s
    gaps = max(1.0, expected - 1)
    tpot_s = output.tpot_s + (over.after_s + max(0.0, output.queue_s - prompt.own_s)) / gaps
    delay_s = prompt.rows * prompt.own_s + output.rows * expected * output.row_s
    elsewhere = prompt.rows * miss(prompt.step_s + prompt.own_s / max(1.0, expected), goals.running_tpot_s)
    misses = miss(ttft_s, goals.ttft_s) + miss(tpot_s, goals.tpot_s)
    misses += output.rows * miss(output.tpot_s, goals.running_tpot_s) + elsewhere
    work_s = prompt.own_s + prompt.num_steps * prompt.fixed_s + expected * output.row_s + over.before_s + over.after_s
    return Prediction(ttft_s, tpot_s, delay_s, work_s, prompt.ahead_s, misses)


class Goals(NamedTuple):
    """Objectives in seconds, None without one: of the request, and of those that run beside it."""

    ttft_s: float | None = None
    tpot_s: float | None = None
    running_tpot_s: float | None = None
