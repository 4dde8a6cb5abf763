"""What a candidate would do, from what each of its two sides means alone: bit for bit the numbers of `local` and `remote` in
`router/prediction.py`. Dozens of candidates are compared for a request, and each worker is part of several. Pure.
"""

from typing import NamedTuple

from pdmesh.planning.pace_rules import PACE_TARGET
from router.routing.cost_model import SPARED, Goals, OutputSide, Overhead, Prediction, PromptSide, miss

_new = tuple.__new__  # as in router/prediction.py


class PromptPart(NamedTuple):
    """What of a prediction hangs on the worker that computes the prompt alone. `work_s`: the steps of the prompt; `more_s`: what
    it adds to each token of those that run there, `misses` of theirs."""

    ahead_s: float
    compute_s: float
    own_s: float
    work_s: float
    lost_s: float
    more_s: float
    misses: float
    spares: bool


class OutputPart(NamedTuple):
    """What of a prediction hangs on the decode worker alone. `own_s`: the time of its steps; `own_misses` of its own pace,
    `misses` of the `rows` that run there."""

    tpot_s: float
    queue_s: float
    missing: float
    own_s: float
    slowed_s: float
    rows: int
    own_misses: float
    misses: float
    tpot_bound_s: float


def prompt_part(prompt: PromptSide, expected: float, goals: Goals) -> PromptPart:
    """For `whole` and `paired`."""
    ahead_s, compute_s, own_s, rows, tpot_s, fixed_s, is_paced = prompt
    more_s = 0.0 if is_paced else own_s / (expected if expected > 1.0 else 1.0)
    misses = rows * miss(tpot_s + more_s, goals.running_tpot_s) if rows else 0.0
    lost = rows * own_s * (SPARED if is_paced else 1.0)
    return _new(PromptPart, (ahead_s, compute_s, own_s, own_s + fixed_s, lost, more_s, misses, is_paced or not rows))


def output_part(output: OutputSide, expected: float, goals: Goals) -> OutputPart:
    """For `whole` and `paired`."""
    tpot_s, row_s, rows, queue_s, missing, alone_s, is_paced = output
    goal_s, bound_s = goals.tpot_s, 0.0
    misses = rows * miss(tpot_s, goals.running_tpot_s) if rows else 0.0
    if goal_s is not None:
        bound_s = max(tpot_s, PACE_TARGET * goal_s)
    slowed = rows * expected * row_s * (SPARED if is_paced else 1.0)
    own_s = expected * (row_s + alone_s)
    return _new(OutputPart, (tpot_s, queue_s, missing, own_s, slowed, rows, miss(tpot_s, goal_s), misses, bound_s))


def whole_prediction(prompt: PromptPart, output: OutputPart, over: Overhead, gaps: float, goals: Goals) -> Prediction:
    """What `local` says; `gaps` as for `paired`."""
    before_s, after_s, stretch = over
    ttft_s, steps_tpot_s = prompt.compute_s + before_s, output.tpot_s + after_s / gaps
    tpot_s = steps_tpot_s * stretch
    if goals.tpot_s is not None and tpot_s > output.tpot_bound_s:
        tpot_s = output.tpot_bound_s
    misses = miss(ttft_s, goals.ttft_s) + output.own_misses
    if output.rows:
        misses += output.rows * miss(output.tpot_s + prompt.more_s, goals.running_tpot_s)
    delay_s, work_s = prompt.lost_s + output.slowed_s, prompt.work_s + output.own_s
    return _new(Prediction, (ttft_s, tpot_s, delay_s, work_s, prompt.ahead_s, misses, steps_tpot_s, prompt.spares))


def paired(prompt: PromptPart, output: OutputPart, over: Overhead, gaps: float, goals: Goals) -> Prediction:
    """What `remote` says; `gaps`: between the expected tokens, at least 1."""
    before_s, after_s, stretch = over
    ttft_s, after_s = prompt.compute_s + before_s, after_s * output.missing
    behind_s = output.queue_s - prompt.own_s
    steps_tpot_s = output.tpot_s + (after_s + (behind_s if behind_s > 0.0 else 0.0)) / gaps
    tpot_s = steps_tpot_s * stretch
    if goals.tpot_s is not None and tpot_s > output.tpot_bound_s:
        tpot_s = output.tpot_bound_s
    misses = miss(ttft_s, goals.ttft_s) + miss(tpot_s if tpot_s < steps_tpot_s else steps_tpot_s, goals.tpot_s)
    misses = misses + prompt.misses + output.misses
    work_s = prompt.work_s + output.own_s + before_s + after_s
    delay_s = prompt.lost_s + output.slowed_s
    return _new(Prediction, (ttft_s, tpot_s, delay_s, work_s, prompt.ahead_s, misses, steps_tpot_s, prompt.spares))
