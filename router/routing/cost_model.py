"""What a placement would do: to the request's own TTFT and TPOT, and to the sequences that run already. Pure; all in seconds.

A worker computes prompts in the order in which they come, in chunks that share its steps with the sequences that decode there:

    steps for t tokens = t / chunk, chunk = what a step may compute less a token for each sequence that decodes
    time for t tokens  = their work + steps · (a step in which only those sequences get their token)

A worker whose sequences were promised a pace makes its steps no longer than that, once what they are ahead of it is used up:

    time for t tokens >= (their work - slack · share) / (1 - share), share = a step of those sequences alone / their pace

Where tokens are guessed, a sequence's part of a step computes several tokens and gives several: the step is longer by the former,
a token takes a step divided by the latter, and a pace is kept by steps that last so many times longer.

Prompts in the queue come first; what the worker has done of them since its report is estimated from the report's age.
"""

from collections import OrderedDict
from typing import NamedTuple

from pdmesh.planning.latency_model import MAX_SHARE, PACE_TARGET, LatencyModel, prefill_context
from router.routing.worker_snapshot import WorkerSnapshot

DEFAULT_CHUNK = 512
"""Tokens of a step where the worker does not say."""

LARGEST_SHARE = 0.95
"""Beside steps that nearly fill the objective, prompts still get a few tokens of each."""

SPARED = 0.25
"""What a second counts that a running sequence loses and can spare: it keeps its pace, and ends later."""

MAX_AHEAD_S = 0.25
"""Work that workers are given in advance. More waits at the router, where it can still be ordered by rank and tenant."""

ALWAYS_AHEAD_S = 0.1
"""A long prompt that would be more than that by itself is given to a worker that has no more than this to do."""

NEUTRAL = LatencyModel(
    fixed_s=5e-3, per_prefill_token_s=2e-4, per_prefill_context_s=1e-8, per_sequence_s=3e-4, per_context_token_s=1e-7
)
"""A worker of a group in which nobody says how fast it is: its queue and its sequences still count."""


_new = tuple.__new__
"""Makes a named tuple in half the time: its own constructor is a function in between, and decisions make a hundred of them."""


class Prediction(NamedTuple):
    """Of one candidate. `delay_s`: what running sequences lose, summed; `work_s`: what the placement costs the fleet.

    `ahead_s`: the part of `ttft_s` that other prompts take. `misses`: objectives thought to be missed, own and others'.
    `steps_tpot_s`: what `tpot_s` would be, were no prompt to share the steps. `spares`: no running sequence would miss a pace."""

    ttft_s: float
    tpot_s: float
    delay_s: float
    work_s: float
    ahead_s: float
    misses: float
    steps_tpot_s: float = 0.0
    spares: bool = True


class Overhead(NamedTuple):
    """Of a pair beyond the steps: `before_s` the first token (reservation, calls, return), `after_s` it, until decode goes on.

    `stretch`: TPOT as observed over what the steps alone would take: prompts that came later shared them."""

    before_s: float
    after_s: float
    stretch: float = 1.0


class PromptSide(NamedTuple):
    """What computing the prompt on one worker means. `rows` decode there, get a token every `tpot_s` without it and lose `own_s`
    each; `fixed_s` of all its steps.

    `is_paced`: those rows keep their pace, and lose only what they can spare."""

    ahead_s: float
    compute_s: float
    own_s: float
    rows: int
    tpot_s: float
    fixed_s: float
    is_paced: bool = False


class OutputSide(NamedTuple):
    """What owning the request means: `tpot_s` of its own, `row_s` that `rows` others lose with each of its tokens.

    `missing`: the share of the prompt whose KV would have to come from elsewhere. `alone_s`: what each of its tokens takes of
    steps that would not be taken without it. `is_paced`: those others keep their pace."""

    tpot_s: float
    row_s: float
    rows: int
    queue_s: float
    missing: float = 1.0
    alone_s: float = 0.0
    is_paced: bool = False


class WorkerEstimate:
    """A worker with the model of its speed: numbers that every prediction about it needs, computed once for each view.

    `queued_s` is the work of all prompts here. `share`: of the pace that sequences here were promised, what steps without prompts
    take, 0 where none was promised; `share_soon` with those that begin to decode before a new prompt's turn comes, which are
    ahead of nothing yet (`slack_s`).

    `rows` sequences are in every step of now, `rows_soon` with those about to decode; each gets `tokens` of it, and makes it
    longer by `row_s`, its context apart. `step_s` is a step of the former alone, `others_s` one of the latter, `chunk` what fits
    into a step beside the former. `free_tokens` and `free_seqs` are room, `largest` what it could ever hold. `sent_ahead_s`:
    until a new prompt's turn, but for what was reported. `busy`: has it anything to do?
    """

    __slots__ = (
        "busy", "chunk", "context_soon", "dispatched_s", "free_seqs", "free_tokens", "key", "largest", "model", "others_s",
        "queued_s", "queued_tokens", "reported_s", "row_s", "rows", "rows_soon", "sent_ahead_s", "share", "share_soon",
        "slack_s", "step_s", "tokens", "view",
    )  # fmt: skip

    def __init__(self, view: WorkerSnapshot, model: LatencyModel) -> None:
        self.view, self.model, self.key = view, model, (view.address, view.epoch)
        # What ended since the report counts below zero, and is no longer in a step.
        decodes, sent_context = view.dispatched_decodes, view.dispatched_context
        rows = max(0, view.num_decoding + decodes) if decodes < 0 else view.num_decoding
        context = max(0, view.decode_context + sent_context) if sent_context < 0 else view.decode_context
        self.rows, self.rows_soon = rows, rows + view.num_starting + (decodes if decodes > 0 else 0)
        # Who has not started is thought to be like those that have.
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
        waiting, sent = view.num_waiting_tokens, view.dispatched_tokens
        reported_s = self._work_s(waiting, view.num_prefilling) if waiting else 0.0
        self.queued_s = reported_s + (self._work_s(sent, view.dispatched_seqs) if sent else 0.0)
        self.queued_tokens = waiting + sent
        self.reported_s = self._lasts_s(reported_s, waiting) if waiting else 0.0
        self.dispatched_s = self._lasts_s(self.queued_s, self.queued_tokens) - self.reported_s if sent else 0.0
        self.sent_ahead_s = self.dispatched_s + self.step_s / 2 if self.rows else self.dispatched_s
        self.busy = self.rows_soon > 0 or waiting + sent > 0
        self.free_tokens = (view.num_free_blocks - view.dispatched_blocks) * view.block_size
        self.free_seqs = view.max_num_seqs - view.num_seqs - view.dispatched_seqs
        self.largest = min(view.max_context, view.num_total_blocks * view.block_size)

    def _work_s(self, num_tokens: int, num_prompts: int) -> float:
        """So many prompts of equal length, together `num_tokens`."""
        context = num_tokens * num_tokens / max(1, num_prompts) / 2
        return num_tokens * self.model.per_prefill_token_s + context * self.model.per_prefill_context_s

    def _lasts_s(self, work_s: float, num_tokens: int) -> float:
        """How long so much of prompts takes, with the steps in which it is done."""
        lasts_s = work_s + self.step_s * num_tokens / self.chunk
        return max(lasts_s, self._paced_s(work_s, self.share)) if self.share else lasts_s

    def _paced_s(self, work_s: float, share: float) -> float:
        """At least, beside sequences that keep their pace. However far behind they are, prompts get their part of the time."""
        return min((work_s - self.slack_s * share) / (1 - share), work_s / (1 - max(MAX_SHARE, share)))

    def ahead_s(self, now: float) -> float:
        """Until the prompts that are here already have been computed, with half a step that is under way."""
        ahead_s = self.sent_ahead_s
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
        lasts_s = own_s + num_steps * self.step_s
        if self.share_soon:
            paced_s = own_s / (1 - self.share_soon) if self.queued_tokens else self._paced_s(own_s, self.share_soon)
            lasts_s = max(lasts_s, paced_s)
        is_paced = self.view.pace_s > 0
        compute_s, fixed_s = ahead_s + lasts_s, num_steps * model.fixed_s
        return _new(PromptSide, (ahead_s, compute_s, own_s, self.rows, self.step_s / self.tokens, fixed_s, is_paced))

    def output_side(self, num_tokens: int, num_cached: int, num_choices: int, expected_tokens: float, now: float) -> OutputSide:
        """Owning `num_choices` outputs of `expected_tokens` behind a prompt of `num_tokens`, of which `num_cached` are there."""
        model, tokens = self.model, self.tokens
        context = num_choices * (num_tokens + expected_tokens / 2)
        row_s = num_choices * self.row_s + context * model.per_context_token_s
        missing = 1 - num_cached / num_tokens if num_cached < num_tokens else 0.0
        # It outlives those that decode there by this share of its own steps, were all alike and somewhere on their way.
        alone_s = model.fixed_s / (self.rows_soon + 1) / tokens
        tpot_s, queue_s, is_paced = (self.others_s + row_s) / tokens, self.ahead_s(now), self.view.pace_s > 0
        return _new(OutputSide, (tpot_s, row_s / tokens, self.rows_soon, queue_s, missing, alone_s, is_paced))


def _most(step_s: float, pace_s: float) -> float:
    """Of the time, for steps without prompts, however far behind sequences are. What cannot be kept holds nobody up."""
    filled = step_s * PACE_TARGET / pace_s
    return min(LARGEST_SHARE, filled) if MAX_SHARE < filled < 1 else MAX_SHARE


def miss(value_s: float, goal_s: float | None) -> float:
    """How likely an objective is to be missed, in [0, 1]: a prediction near the goal is worth half a miss."""
    if goal_s is None:
        return 0.0
    part = value_s / goal_s
    if part < 0.8:
        return 0.0
    share = (part - 0.8) / 0.4
    return 1.0 if share > 1 else share


def is_saturated(ttft_s: float, ahead_s: float, transit_s: float = 0.0) -> bool:
    """Has the worker more than enough to do? `transit_s`: of prompts on their way that no report contains."""
    ahead_s += transit_s
    return ahead_s > ALWAYS_AHEAD_S and max(ttft_s + transit_s, ahead_s) > MAX_AHEAD_S


def local(prompt: PromptSide, output: OutputSide, over: Overhead, expected: float, goals: "Goals") -> Prediction:
    """Decode computes the prompt itself, and its sequences wait in every step that holds a part of it."""
    ttft_s = prompt.compute_s + over.before_s
    steps_tpot_s = output.tpot_s + over.after_s / max(1.0, expected - 1)
    delay_s = lost_s(prompt) + slowed_s(output, expected)
    misses = miss(ttft_s, goals.ttft_s) + miss(output.tpot_s, goals.tpot_s)
    if goals.running_tpot_s is not None:
        more_s = 0.0 if prompt.is_paced else prompt.own_s / max(1.0, expected)
        misses += output.rows * miss(output.tpot_s + more_s, goals.running_tpot_s)
    work_s = prompt.own_s + prompt.fixed_s + expected * (output.row_s + output.alone_s)
    tpot_s = _stretched(steps_tpot_s, output.tpot_s, over.stretch, goals.tpot_s)
    return Prediction(ttft_s, tpot_s, delay_s, work_s, prompt.ahead_s, misses, steps_tpot_s, _spares(prompt))


def remote(prompt: PromptSide, output: OutputSide, over: Overhead, expected: float, goals: "Goals") -> Prediction:
    """Another worker computes the prompt: only sequences that run there wait for it. Prompts in decode's own queue that last
    longer than the computation slow the request's first tokens."""
    ttft_s, after_s = prompt.compute_s + over.before_s, over.after_s * output.missing
    gaps = max(1.0, expected - 1)
    steps_tpot_s = output.tpot_s + (after_s + max(0.0, output.queue_s - prompt.own_s)) / gaps
    delay_s = lost_s(prompt) + slowed_s(output, expected)
    tpot_s = _stretched(steps_tpot_s, output.tpot_s, over.stretch, goals.tpot_s)
    misses = miss(ttft_s, goals.ttft_s) + miss(min(tpot_s, steps_tpot_s), goals.tpot_s)
    if goals.running_tpot_s is not None:
        elsewhere_s = prompt.tpot_s + (0.0 if prompt.is_paced else prompt.own_s / max(1.0, expected))
        misses += prompt.rows * miss(elsewhere_s, goals.running_tpot_s)
        misses += output.rows * miss(output.tpot_s, goals.running_tpot_s)
    work_s = prompt.own_s + prompt.fixed_s + expected * (output.row_s + output.alone_s) + over.before_s + after_s
    return Prediction(ttft_s, tpot_s, delay_s, work_s, prompt.ahead_s, misses, steps_tpot_s, _spares(prompt))


def lost_s(prompt: PromptSide) -> float:
    """What the sequences lose that run where the prompt is computed."""
    return prompt.rows * prompt.own_s * (SPARED if prompt.is_paced else 1.0)


def slowed_s(output: OutputSide, expected: float) -> float:
    """What the sequences lose beside which it decodes."""
    return output.rows * expected * output.row_s * (SPARED if output.is_paced else 1.0)


def _spares(prompt: PromptSide) -> bool:
    return prompt.is_paced or not prompt.rows


def _stretched(tpot_s: float, least_s: float, stretch: float, goal_s: float | None) -> float:
    """With the prompts that will share its steps; of a request that is promised a pace, no more of them than leave it that.
    `least_s`: steps without prompts."""
    stretched_s = tpot_s * stretch
    return stretched_s if goal_s is None else min(stretched_s, max(least_s, PACE_TARGET * goal_s))


class Goals(NamedTuple):
    """Objectives in seconds, None without one: of the request, and of those that run beside it."""

    ttft_s: float | None = None
    tpot_s: float | None = None
    running_tpot_s: float | None = None


# What a placement costs beyond the steps of its workers, as learned from requests that have ended. Bounded; pure.


UNKNOWN_LOCAL = Overhead(2e-3, 0.0)
UNKNOWN_REMOTE = Overhead(5e-3, 5e-3)
MIN_WEIGHT = 0.1
"""Of the newest observation, once there are some: the first replaces what was assumed, the second counts half, and so on."""

MAX_JUMP = 4.0
"""So many times what is known, and no more, counts of one observation: a process that starts up or a machine that stalls."""

LEAST_S = 1e-3
"""Below this, a jump is none."""

MAX_PAIRS = 4096

MIN_STRETCH, MAX_STRETCH = 0.8, 4.0
STRETCH_STEP = 0.03
"""One request moves what is known by no more: so it follows the middle, which the few that met a long prompt do not shift."""

_Key = tuple[str | None, str]


class Overheads:
    """Moving means by the hosts of the pair, LOCAL apart from REMOTE."""

    def __init__(self) -> None:
        self._pairs: OrderedDict[_Key, tuple[Overhead, int]] = OrderedDict()
        self._stretches: OrderedDict[str, float] = OrderedDict()
        self._answers: dict[str, dict[str | None, Overhead]] = {}  # by decode's host, then prefill's

    def between(self, prefill: WorkerSnapshot | None, decode: WorkerSnapshot) -> Overhead:
        """Of this pair; `prefill` None: LOCAL."""
        host, other = decode.host_id, None if prefill is None else prefill.host_id
        answers = self._answers.get(host)
        if answers is None:
            answers = self._new_answers(host)
        answer = answers.get(other)
        if answer is None:
            answer = answers[other] = self._look_up(other, host)
        return answer

    def observe_tpot(self, decode: WorkerSnapshot, steps_tpot_s: float, seen_tpot_s: float) -> None:
        """A request on this worker got its tokens this far apart, where the steps alone would have taken `steps_tpot_s`."""
        if steps_tpot_s <= 0:
            return
        known, seen = self._stretches.get(decode.host_id, 1.0), seen_tpot_s / steps_tpot_s
        stretch = known + min(STRETCH_STEP, max(-STRETCH_STEP, seen - known))
        self._stretches[decode.host_id] = min(MAX_STRETCH, max(MIN_STRETCH, stretch))
        self._stretches.move_to_end(decode.host_id)
        self._answers.pop(decode.host_id, None)
        if len(self._stretches) > MAX_PAIRS:
            host, _ = self._stretches.popitem(last=False)
            self._answers.pop(host, None)

    def observe(self, prefill: WorkerSnapshot | None, decode: WorkerSnapshot, seen: Overhead) -> None:
        """One request went this way."""
        key = _key(prefill, decode)
        known, count = self._pairs.get(key, (_unknown(key[0]), 0))
        weight = max(MIN_WEIGHT, 1 / (count + 1))
        before_s, after_s = _moved(known.before_s, seen.before_s, weight), _moved(known.after_s, seen.after_s, weight)
        self._pairs[key] = (Overhead(before_s, after_s), count + 1)
        self._pairs.move_to_end(key)
        self._answers.pop(key[1], None)
        if len(self._pairs) > MAX_PAIRS:
            (_, host), _ = self._pairs.popitem(last=False)
            self._answers.pop(host, None)

    def _look_up(self, prefill: str | None, decode: str) -> Overhead:
        """By hosts."""
        known, stretch = self._pairs.get((prefill, decode)), self._stretches.get(decode)
        over = known[0] if known is not None else _unknown(prefill)
        return over if stretch is None else Overhead(over.before_s, over.after_s, stretch)

    def _new_answers(self, host: str) -> dict[str | None, Overhead]:
        """An empty place for what is asked of this host: decisions ask the same about dozens of pairs until a request ends."""
        if len(self._answers) >= MAX_PAIRS:
            self._answers.clear()
        answers = self._answers[host] = {}
        return answers


def _moved(known: float, seen: float, weight: float) -> float:
    return known + weight * (min(seen, MAX_JUMP * known + LEAST_S) - known)


def _unknown(prefill: str | None) -> Overhead:
    return UNKNOWN_LOCAL if prefill is None else UNKNOWN_REMOTE


def _key(prefill: WorkerSnapshot | None, decode: WorkerSnapshot) -> _Key:
    return (None if prefill is None else prefill.host_id, decode.host_id)


# How many tokens a request is thought to generate: the mean of those that its tenant had of its model. Bounded; pure.


UNKNOWN = 128.0
MAX_KEYS = 4096
MEMORY = 64
"""About so many requests make the mean."""


class OutputLengths:
    """Moving means by model and tenant."""

    def __init__(self) -> None:
        self._means: OrderedDict[tuple[str, str], tuple[float, int]] = OrderedDict()

    def expected(self, model: str, tenant: str, max_tokens: int) -> float:
        """Tokens of each choice: at least one, at most `max_tokens`."""
        mean, _ = self._means.get((model, tenant)) or self._means.get((model, "")) or (UNKNOWN, 0)
        return max(1.0, min(mean, max_tokens))

    def observe(self, model: str, tenant: str, num_tokens: int) -> None:
        """A choice has ended after `num_tokens`."""
        mean, count = self._means.pop((model, tenant), (0.0, 0))
        count = min(count + 1, MEMORY)
        self._means[(model, tenant)] = (mean + (num_tokens - mean) / count, count)
        if len(self._means) > MAX_KEYS:
            self._means.popitem(last=False)
