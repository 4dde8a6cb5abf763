"""The predicted effect of a placement on the request's TTFT and TPOT, and on running sequences. Pure; all in seconds.

A worker computes prompts in chunks that share its steps with the sequences that decode there; in order of arrival, but for
prompts much shorter than the oldest one, which have a part of its steps (pdmesh/engine/scheduler/scheduler.py):

    steps for t tokens = t / chunk, chunk = token budget of a step less one token for each decoding sequence
    time for t tokens  = their work + steps · (a step in which only those sequences get their token)

A TPOT objective sets a pace (PACE_TARGET of it): once the slack of a worker's sequences is used up, its steps last no longer,
where its engine keeps paces:

    time for t tokens >= (their work - slack · share) / (1 - share), share = a step of those sequences alone / their pace

With speculative decoding a sequence computes several tokens in a step and gets several: the step is longer by the former, TPOT is
a step divided by the latter, and a step may last that many paces.

Prompts in the queue come first; what the worker has done of them since its report is estimated from the report's age, and of
those that it was sent since from when they came: a report has the figures of the latest step's end, and a step may last a second.
"""

import math
from typing import NamedTuple

from pdmesh.planning.latency_model import LatencyModel, prefill_context
from pdmesh.step_sharing import DRAFTING, MAX_SHARE, MUCH_SHORTER, OLDEST_SHARE, PACE_TARGET, decode_share
from router.routing.worker_snapshot import WorkerSnapshot

DEFAULT_CHUNK = 512
"""Token budget of a step where the worker does not report it."""

LARGEST_SHARE = 0.95
"""Where decoding alone nearly fills the objective, prompts still get a few tokens of each step."""

SPARED = 0.25
"""Weight of a second that a running sequence loses out of its slack: it keeps its pace, and ends later."""

MAX_AHEAD_S = 0.25
"""Work that is sent to workers in advance. More waits at the router, where it can still be ordered by priority and tenant, but
for what waits for a cached prefix while other workers are free (`free_elsewhere` in router/routing/filters.py)."""

ALWAYS_AHEAD_S = 0.1
"""A prompt that exceeds MAX_AHEAD_S by itself is sent to a worker with no more work than this."""

FETCH_S = 0.004
"""What it takes to fetch KV beside its bytes: two calls and a hello (prefill_service/kv_pull.py)."""
RESTORE_S = 0.001
"""What it takes to restore KV from a worker's tiers beside its bytes: commands to the engine."""

NEUTRAL = LatencyModel(
    fixed_s=5e-3, per_prefill_token_s=2e-4, per_prefill_context_s=1e-8, per_sequence_s=3e-4, per_context_token_s=1e-7
)
"""Speed of the workers of a pool in which none reports one: their queues and sequences still count."""


_new = tuple.__new__
"""Makes a named tuple in half the time of its constructor, which calls a function: a decision makes a hundred of them."""


class Prediction(NamedTuple):
    """Hold the prediction for one candidate. `delay_s`: sum of what running sequences lose; `work_s`: worker time that it takes.

    `ahead_s`: the part of `ttft_s` that other prompts take. `misses`: expected number of missed objectives, own and others'.
    `steps_tpot_s`: `tpot_s` if no prompt shared the steps. `spares`: every running sequence keeps its pace. `plain_ttft_s`:
    `ttft_s` if what is there were all that the worker computes until then."""

    ttft_s: float
    tpot_s: float
    delay_s: float
    work_s: float
    ahead_s: float
    misses: float
    steps_tpot_s: float = 0.0
    spares: bool = True
    plain_ttft_s: float = 0.0


class PromptWays(NamedTuple):
    """Hold in how many seconds a worker would have the prompt computed, with the prompts ahead of it, if it computes what its
    pool lacks; if it restores first what its tiers hold; and if it fetches first what another worker has. None: it cannot.
    The least counts. `num_fetched`: tokens that will be here after a fetch for which another worker restores some first; 0:
    those that a pool has."""

    compute_s: float
    restore_s: float | None = None
    fetch_s: float | None = None
    num_fetched: int = 0

    @property
    def least_s(self) -> float:
        """Return the time of the way that is taken."""
        return min(seconds for seconds in (self.compute_s, self.restore_s, self.fetch_s) if seconds is not None)

    @property
    def taken(self) -> str:
        """Return which is the least: compute, restore or fetch."""
        known = {"compute": self.compute_s, "restore": self.restore_s, "fetch": self.fetch_s}
        found = [(seconds, name) for name, seconds in known.items() if seconds is not None]
        return min(found, key=lambda each: each[0])[1]


class Overhead(NamedTuple):
    """Hold a pair's time beyond steps: `before_s` the first token (reservation, calls, return), `after_s` it until decode runs.

    `stretch`: observed TPOT ÷ TPOT of the steps alone: what came later shared the steps, and what was there ended.
    `ttft_stretch`: the same of TTFT: beside a pace, sequences that came later took of the time that prompts had."""

    before_s: float
    after_s: float
    stretch: float = 1.0
    ttft_stretch: float = 1.0


class PromptSide(NamedTuple):
    """Hold the effect of computing the prompt on one worker. `rows` sequences decode there, with `tpot_s` without it, and lose
    `own_s` each. `fixed_s`: fixed time of all its steps.

    `is_paced`: those sequences keep their pace, and lose only slack."""

    ahead_s: float
    compute_s: float
    own_s: float
    rows: int
    tpot_s: float
    fixed_s: float
    is_paced: bool = False


class OutputSide(NamedTuple):
    """Hold the effect of decoding the request on one worker: its own `tpot_s`, and `row_s` that each of `rows` other sequences
    loses with each of its tokens.

    `missing`: the share of the prompt whose KV has to be transferred. `alone_s`: for each of its tokens, the time of steps that
    run only for this request. `is_paced`: the other sequences keep their pace; `keeps_pace`: with an objective this one will."""

    tpot_s: float
    row_s: float
    rows: int
    queue_s: float
    missing: float = 1.0
    alone_s: float = 0.0
    is_paced: bool = False
    keeps_pace: bool = True


class WorkerEstimate:
    """Hold a worker's snapshot with its latency model, and the numbers that every prediction needs, computed once a snapshot.

    `queued_s` is the work of all prompts here. `share`: time of a step without prompts ÷ pace, 0 without a pace; `share_soon`:
    the same including sequences that begin to decode before a new prompt's turn, which have no slack yet (`slack_s`).

    `rows` sequences are in every step now, `rows_soon` includes those about to decode; each gets `tokens` from a step and makes
    it longer by `row_s`, besides its context. `step_s` is a step of the former alone, `others_s` one of the latter, `chunk` the
    prompt tokens that fit beside the former. `free_tokens` and `free_seqs` are free room, `largest` the longest request that fits
    when the worker is empty. `longest`: tokens of the oldest prompt, or of a longer one that was sent there; 0: prompts are
    computed strictly in order. `reported_s` and `dispatched_s`: how long the prompts last that its report has, and those sent
    since. `busy`: it has work.
    """

    __slots__ = (
        "busy", "chunk", "context_soon", "dispatched_s", "free_seqs", "free_tokens", "key", "largest", "longest", "model",
        "others_s", "queued_s", "queued_tokens", "reported_s", "row_s", "rows", "rows_soon", "share", "share_soon", "slack_s",
        "step_s", "tokens", "view",
    )  # fmt: skip

    def __init__(self, view: WorkerSnapshot, model: LatencyModel) -> None:
        self.view, self.model, self.key = view, model, (view.address, view.epoch)
        # Sequences that ended since the report count negatively, and are in no further step.
        decodes, sent_context = view.dispatched_decodes, view.dispatched_context
        rows = max(0, view.num_decoding + decodes) if decodes < 0 else view.num_decoding
        context = max(0, view.decode_context + sent_context) if sent_context < 0 else view.decode_context
        self.rows, self.rows_soon = rows, rows + view.num_starting + (decodes if decodes > 0 else 0)
        # Sequences that have not started are assumed to have the mean context of those that have.
        mean = context / rows if rows else 0.0
        self.context_soon = context + view.num_starting * mean + (sent_context if sent_context > 0 else 0)
        self.tokens, self.row_s = view.tokens_per_row, model.per_sequence_s * view.computed_per_row
        fixed_s, row_s, token_s = model.fixed_s, self.row_s, model.per_context_token_s
        self.step_s = fixed_s + row_s * rows + token_s * context
        self.others_s = fixed_s + row_s * self.rows_soon + token_s * self.context_soon
        self.chunk = max(1, (view.max_num_batched_tokens or DEFAULT_CHUNK) - int(rows * view.computed_per_row))
        pace_s, begins = view.pace_s * self.tokens, view.num_starting + decodes > 0
        self.share = min(_most(self.step_s, pace_s), self.step_s / pace_s) if rows and pace_s else 0.0
        self.share_soon = min(_most(self.others_s, pace_s), self.others_s / pace_s) if begins and pace_s else self.share
        self.slack_s = min(0.0, view.slack_s) if begins else view.slack_s
        if self.tokens > DRAFTING:  # however far they are behind, every second step has prompts
            self.slack_s = max(0.0, self.slack_s)
        waiting, sent = view.num_waiting_tokens, view.dispatched_tokens
        reported_s = self._work_s(waiting, view.num_prefilling) if waiting else 0.0
        self.queued_s = reported_s + (self._work_s(sent, view.dispatched_seqs) if sent else 0.0)
        self.queued_tokens = waiting + sent
        self.longest = max(view.num_oldest_tokens, view.dispatched_longest) if waiting + sent and view.shares_prompts else 0
        self.reported_s = self._lasts_s(reported_s, waiting) if waiting else 0.0
        self.dispatched_s = self._lasts_s(self.queued_s, self.queued_tokens) - self.reported_s if sent else 0.0
        self.busy = self.rows_soon > 0 or waiting + sent > 0
        self.free_tokens = (view.num_free_blocks - view.dispatched_blocks) * view.block_size
        self.free_seqs = view.max_num_seqs - view.num_seqs - view.dispatched_seqs
        self.largest = min(view.max_context, view.num_total_blocks * view.block_size)

    def _work_s(self, num_tokens: int, num_prompts: int) -> float:
        """Return the work of `num_prompts` prompts of equal length, together `num_tokens`."""
        context = num_tokens * num_tokens / max(1, num_prompts) / 2
        return num_tokens * self.model.per_prefill_token_s + context * self.model.per_prefill_context_s

    def _lasts_s(self, work_s: float, num_tokens: int) -> float:
        """Return how long this work of prompts takes, with the steps that it shares."""
        lasts_s = work_s + self.step_s * num_tokens / self.chunk
        return max(lasts_s, self._paced_s(work_s, self.share)) if self.share else lasts_s

    def _paced_s(self, work_s: float, share: float) -> float:
        """Return the least time beside sequences that keep their pace. Prompts get a part of it however far those are behind."""
        return min((work_s - self.slack_s * share) / (1 - share), work_s / (1 - max(MAX_SHARE, share)))

    def ahead_s(self, now: float) -> float:
        """Return the seconds until the prompts that are here are computed, with half of the running step."""
        view, ahead_s, reported_s = self.view, self.step_s / 2 if self.rows else 0.0, self.reported_s
        if reported_s:
            age_s = now - view.figures_at
            left_s = reported_s - age_s if age_s > 0 else reported_s
            ahead_s = ahead_s + left_s if left_s > 0 else ahead_s
        if self.dispatched_s:
            done_s = now - max(view.figures_at + reported_s, view.dispatched_since)
            left_s = self.dispatched_s - done_s if done_s > 0 else self.dispatched_s
            # Of the latest prompt no more can be done than since it came, however late the worker is.
            latest_s = self.dispatched_s * view.dispatched_latest / view.dispatched_tokens
            left_s = max(left_s, latest_s - max(0.0, now - view.dispatched_latest_at))
            ahead_s = ahead_s + left_s if left_s > 0 else ahead_s
        return ahead_s

    def _share_ahead_s(self, num_tokens: int, now: float) -> float:
        """Return the seconds that other prompts take of one of `num_tokens` that overtakes the oldest one: the rest of the
        running step, then their part of its own steps. All others but the oldest one are taken to be shorter."""
        chunk = min(self.chunk, self._paced_chunk()) if self.share else self.chunk
        num_before = max(0, self.queued_tokens - self.longest) + num_tokens
        num_steps = math.ceil(num_before / max(1.0, chunk * (1 - OLDEST_SHARE)))
        part = (chunk * (num_steps + 0.5) - num_tokens) / self.queued_tokens
        return self.ahead_s(now) * min(1.0, part)

    def _paced_chunk(self) -> float:
        """Return how many of the queued tokens fit into a step beside sequences that keep their pace."""
        return self.step_s * (1 / self.share - 1) * self.queued_tokens / self.queued_s if self.queued_s else self.chunk

    def prompt_side(self, num_tokens: int, num_cached: int, now: float) -> PromptSide:
        """Return the effect of computing a prompt of which `num_cached` tokens are cached."""
        model, first = self.model, num_cached if num_cached < num_tokens else num_tokens - 1
        own = num_tokens - first
        own_s = own * model.per_prefill_token_s + prefill_context(first, num_tokens) * model.per_prefill_context_s
        num_steps = -(-own // self.chunk)
        # Without decoding sequences, step_s is the fixed time of a step.
        ahead_s = self.ahead_s(now) if own > MUCH_SHORTER * self.longest else self._share_ahead_s(own, now)
        lasts_s = own_s + num_steps * self.step_s
        if self.share_soon:
            paced_s = own_s / (1 - self.share_soon) if self.queued_tokens else self._paced_s(own_s, self.share_soon)
            lasts_s = max(lasts_s, paced_s)
        is_paced = self.view.pace_s > 0
        compute_s, fixed_s = ahead_s + lasts_s, num_steps * model.fixed_s
        return _new(PromptSide, (ahead_s, compute_s, own_s, self.rows, self.step_s / self.tokens, fixed_s, is_paced))

    def output_side(self, num_tokens: int, num_cached: int, num_choices: int, expected_tokens: float, now: float) -> OutputSide:
        """Return the effect of decoding `num_choices` outputs of `expected_tokens`; `num_cached` prompt tokens are cached."""
        model, tokens = self.model, self.tokens
        context = num_choices * (num_tokens + expected_tokens / 2)
        row_s = num_choices * self.row_s + context * model.per_context_token_s
        missing = 1 - num_cached / num_tokens if num_cached < num_tokens else 0.0
        # If all sequences were alike and at random points of their output, it would run alone for this share of its steps.
        alone_s = model.fixed_s / (self.rows_soon + 1) / tokens
        tpot_s, queue_s, is_paced = (self.others_s + row_s) / tokens, self.ahead_s(now), self.view.pace_s > 0
        keeps_pace = self.view.keeps_pace
        return _new(OutputSide, (tpot_s, row_s / tokens, self.rows_soon, queue_s, missing, alone_s, is_paced, keeps_pace))


def _most(step_s: float, pace_s: float) -> float:
    """Return the largest share of the time for steps without prompts. A pace that cannot be kept holds no prompt back."""
    return min(LARGEST_SHARE, decode_share(step_s * PACE_TARGET / pace_s))


def miss(value_s: float, goal_s: float | None) -> float:
    """Return how likely the objective is to be missed, in [0, 1]: a prediction near the goal counts half a miss."""
    if goal_s is None:
        return 0.0
    part = value_s / goal_s
    if part < 0.8:
        return 0.0
    share = (part - 0.8) / 0.4
    return 1.0 if share > 1 else share


def is_saturated(ttft_s: float, ahead_s: float, transit_s: float = 0.0) -> bool:
    """Return True if the worker has enough work. `transit_s`: work of prompts on their way that no report contains."""
    ahead_s += transit_s
    return ahead_s > ALWAYS_AHEAD_S and max(ttft_s + transit_s, ahead_s) > MAX_AHEAD_S


def local(prompt: PromptSide, output: OutputSide, over: Overhead, expected: float, goals: "Goals") -> Prediction:
    """Return the prediction for LOCAL: the decode worker's sequences wait in every step that holds a part of the prompt."""
    plain_s = prompt.compute_s + over.before_s
    ttft_s = plain_s * over.ttft_stretch
    steps_tpot_s = output.tpot_s + over.after_s / max(1.0, expected - 1)
    delay_s = lost_s(prompt) + slowed_s(output, expected)
    tpot_s = _stretched(steps_tpot_s, output, over.stretch, goals.tpot_s)
    misses = miss(ttft_s, goals.ttft_s) + miss(output.tpot_s if output.keeps_pace else tpot_s, goals.tpot_s)
    if goals.running_tpot_s is not None:
        more_s = 0.0 if prompt.is_paced else prompt.own_s / max(1.0, expected)
        misses += output.rows * miss(output.tpot_s + more_s, goals.running_tpot_s)
    work_s = prompt.own_s + prompt.fixed_s + expected * (output.row_s + output.alone_s)
    ahead_s = prompt.ahead_s * over.ttft_stretch
    return Prediction(ttft_s, tpot_s, delay_s, work_s, ahead_s, misses, steps_tpot_s, _spares(prompt), plain_s)


def remote(prompt: PromptSide, output: OutputSide, over: Overhead, expected: float, goals: "Goals") -> Prediction:
    """Return the prediction for REMOTE: only sequences on the prefill worker wait for the prompt. Prompts queued on the decode
    worker that last longer than this prompt's computation slow the first tokens."""
    plain_s, after_s = prompt.compute_s + over.before_s, over.after_s * output.missing
    ttft_s = plain_s * over.ttft_stretch
    gaps = max(1.0, expected - 1)
    steps_tpot_s = output.tpot_s + (after_s + max(0.0, output.queue_s - prompt.own_s)) / gaps
    delay_s = lost_s(prompt) + slowed_s(output, expected)
    tpot_s = _stretched(steps_tpot_s, output, over.stretch, goals.tpot_s)
    own_s = min(tpot_s, steps_tpot_s) if output.keeps_pace else tpot_s
    misses = miss(ttft_s, goals.ttft_s) + miss(own_s, goals.tpot_s)
    if goals.running_tpot_s is not None:
        elsewhere_s = prompt.tpot_s + (0.0 if prompt.is_paced else prompt.own_s / max(1.0, expected))
        misses += prompt.rows * miss(elsewhere_s, goals.running_tpot_s)
        misses += output.rows * miss(output.tpot_s, goals.running_tpot_s)
    work_s = prompt.own_s + prompt.fixed_s + expected * (output.row_s + output.alone_s) + over.before_s + after_s
    ahead_s = prompt.ahead_s * over.ttft_stretch
    return Prediction(ttft_s, tpot_s, delay_s, work_s, ahead_s, misses, steps_tpot_s, _spares(prompt), plain_s)


def lost_s(prompt: PromptSide) -> float:
    """Return the time that sequences lose on the worker that computes the prompt."""
    return prompt.rows * prompt.own_s * (SPARED if prompt.is_paced else 1.0)


def slowed_s(output: OutputSide, expected: float) -> float:
    """Return the time that sequences lose on the decode worker."""
    return output.rows * expected * output.row_s * (SPARED if output.is_paced else 1.0)


def _spares(prompt: PromptSide) -> bool:
    return prompt.is_paced or not prompt.rows


def _stretched(tpot_s: float, output: OutputSide, stretch: float, goal_s: float | None) -> float:
    """Return TPOT with the prompts that will share the steps. With an objective an engine that keeps a pace admits no more of
    them than keep it."""
    stretched_s = tpot_s * stretch
    if goal_s is None or not output.keeps_pace:
        return stretched_s
    return min(stretched_s, max(output.tpot_s, PACE_TARGET * goal_s))


class Goals(NamedTuple):
    """Hold objectives in seconds, None without one: the request's, and the TPOT of the requests that run beside it."""

    ttft_s: float | None = None
    tpot_s: float | None = None
    running_tpot_s: float | None = None
