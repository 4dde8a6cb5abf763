"""What a placement would do: to the request's own TTFT and TPOT, and to the sequences that run already. Pure; all in seconds.

A worker computes prompts in the order in which they come, in chunks that share its steps with the sequences that decode there:

    steps for t tokens = t / chunk, chunk = what a step may compute less a token for each sequence that decodes
    time for t tokens  = their work + steps · (a step in which only those sequences get their token)

Prompts in the queue come first; what the worker has done of them since its report is estimated from the report's age.
"""

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
    """What computing the prompt on one worker means. `rows` decode there and lose `own_s` each; `fixed_s` of all its steps."""

    ahead_s: float
    compute_s: float
    own_s: float
    rows: int
    step_s: float
    fixed_s: float


class OutputSide(NamedTuple):
    """What owning the request means: `tpot_s` of its own, `row_s` that it adds to every step of `rows` others.

    `missing`: the share of the prompt whose KV would have to come from elsewhere."""

    tpot_s: float
    row_s: float
    rows: int
    queue_s: float
    missing: float = 1.0


class Engine:
    """A worker with the model of its speed: numbers that every prediction about it needs, computed once for each view.

    `rows` sequences get a token in every step of now, `rows_soon` with those about to decode; `step_s` is a step of the former
    alone, `others_s` one of the latter, `chunk` what fits into a step beside the former. `free_tokens` and `free_seqs` are room,
    `largest` what it could ever hold. `busy`: has it anything to do?
    """

    __slots__ = (
        "busy", "chunk", "context_soon", "dispatched_s", "free_seqs", "free_tokens", "key", "largest", "model", "others_s",
        "reported_s", "rows", "rows_soon", "step_s", "view",
    )  # fmt: skip

    def __init__(self, view: WorkerView, model: LatencyModel) -> None:
        self.view, self.model, self.key = view, model, (view.address, view.epoch)
        # What ended since the report counts below zero, and is no longer in a step.
        decodes, sent_context = view.dispatched_decodes, view.dispatched_context
        rows = max(0, view.num_decoding + decodes) if decodes < 0 else view.num_decoding
        context = max(0, view.decode_context + sent_context) if sent_context < 0 else view.decode_context
        self.rows, self.rows_soon = rows, rows + view.num_starting + (decodes if decodes > 0 else 0)
        # Who has not started is thought to be like those that have.
        mean = context / rows if rows else 0.0
        self.context_soon = context + view.num_starting * mean + (sent_context if sent_context > 0 else 0)
        fixed_s, row_s, token_s = model.fixed_s, model.per_sequence_s, model.per_context_token_s
        self.step_s = fixed_s + row_s * rows + token_s * context
        self.others_s = fixed_s + row_s * self.rows_soon + token_s * self.context_soon
        self.chunk = max(1, (view.max_num_batched_tokens or DEFAULT_CHUNK) - rows)
        waiting, sent = view.num_waiting_tokens, view.dispatched_tokens
        self.reported_s = self._queue_s(waiting, view.num_prefilling) if waiting else 0.0
        self.dispatched_s = self._queue_s(sent, view.dispatched_seqs) if sent else 0.0
        self.busy = self.rows_soon > 0 or waiting + sent > 0
        self.free_tokens = (view.num_free_blocks - view.dispatched_blocks) * view.block_size
        self.free_seqs = view.max_num_seqs - view.num_seqs - view.dispatched_seqs
        self.largest = min(view.max_context, view.num_total_blocks * view.block_size)

    def _queue_s(self, num_tokens: int, num_prompts: int) -> float:
        """So many prompts of equal length, together `num_tokens`."""
        context = num_tokens * num_tokens / max(1, num_prompts) / 2
        work_s = num_tokens * self.model.per_prefill_token_s + context * self.model.per_prefill_context_s
        return work_s + self.step_s * num_tokens / self.chunk

    def ahead_s(self, now: float) -> float:
        """Until the prompts that are here already have been computed, with half a step that is under way."""
        ahead_s = self.dispatched_s + self.step_s / 2 if self.rows else self.dispatched_s
        if not self.reported_s:
            return ahead_s
        age_s = now - self.view.figures_at
        left_s = self.reported_s - age_s if age_s > 0 else self.reported_s
        return ahead_s + left_s if left_s > 0 else ahead_s

    def prompt_side(self, num_tokens: int, num_cached: int, now: float) -> PromptSide:
        """Computing a prompt of which `num_cached` tokens are there."""
        model, first = self.model, num_cached if num_cached < num_tokens else num_tokens - 1
        own = num_tokens - first
        own_s = own * model.per_prefill_token_s + prefill_context(first, num_tokens) * model.per_prefill_context_s
        num_steps = -(-own // self.chunk)
        # With nobody beside it, a step still takes its fixed time: that is what step_s is then.
        ahead_s = self.ahead_s(now)
        compute_s = ahead_s + own_s + num_steps * self.step_s
        return PromptSide(ahead_s, compute_s, own_s, self.rows, self.step_s, num_steps * model.fixed_s)

    def output_side(self, num_tokens: int, num_cached: int, num_choices: int, expected_tokens: float, now: float) -> OutputSide:
        """Owning `num_choices` outputs of `expected_tokens` behind a prompt of `num_tokens`, of which `num_cached` are there."""
        model = self.model
        context = num_choices * (num_tokens + expected_tokens / 2)
        row_s = num_choices * model.per_sequence_s + context * model.per_context_token_s
        missing = 1 - num_cached / num_tokens if num_cached < num_tokens else 0.0
        return OutputSide(self.others_s + row_s, row_s, self.rows_soon, self.ahead_s(now), missing)


def miss(value_s: float, goal_s: float | None) -> float:
    """How likely an objective is to be missed, in [0, 1]: a prediction near the goal is worth half a miss."""
    if goal_s is None:
        return 0.0
    share = (value_s / goal_s - 0.8) / 0.4
    return 0.0 if share < 0 else 1.0 if share > 1 else share


def local(prompt: PromptSide, output: OutputSide, over: Overhead, expected: float, goals: "Goals") -> Prediction:
    """Decode computes the prompt itself, and its sequences wait in every step that holds a part of it."""
    ttft_s = prompt.compute_s + over.before_s
    gaps = max(1.0, expected - 1)
    delay_s = prompt.rows * prompt.own_s + output.rows * expected * output.row_s
    misses = miss(ttft_s, goals.ttft_s) + miss(output.tpot_s, goals.tpot_s)
    if goals.running_tpot_s is not None:
        misses += output.rows * miss(output.tpot_s + prompt.own_s / max(1.0, expected), goals.running_tpot_s)
    work_s = prompt.own_s + prompt.fixed_s + expected * output.row_s
    return Prediction(ttft_s, output.tpot_s + over.after_s / gaps, delay_s, work_s, prompt.ahead_s, misses)


def remote(prompt: PromptSide, output: OutputSide, over: Overhead, expected: float, goals: "Goals") -> Prediction:
    """Another worker computes the prompt: only sequences that run there wait for it. Prompts in decode's own queue that last
    longer than the computation slow the request's first tokens."""
    ttft_s, after_s = prompt.compute_s + over.before_s, over.after_s * output.missing
    gaps = max(1.0, expected - 1)
    tpot_s = output.tpot_s + (after_s + max(0.0, output.queue_s - prompt.own_s)) / gaps
    delay_s = prompt.rows * prompt.own_s + output.rows * expected * output.row_s
    misses = miss(ttft_s, goals.ttft_s) + miss(tpot_s, goals.tpot_s)
    if goals.running_tpot_s is not None:
        elsewhere_s = prompt.step_s + prompt.own_s / max(1.0, expected)
        misses += prompt.rows * miss(elsewhere_s, goals.running_tpot_s)
        misses += output.rows * miss(output.tpot_s, goals.running_tpot_s)
    work_s = prompt.own_s + prompt.fixed_s + expected * output.row_s + over.before_s + after_s
    return Prediction(ttft_s, tpot_s, delay_s, work_s, prompt.ahead_s, misses)


class Goals(NamedTuple):
    """Objectives in seconds, None without one: of the request, and of those that run beside it."""

    ttft_s: float | None = None
    tpot_s: float | None = None
    running_tpot_s: float | None = None
