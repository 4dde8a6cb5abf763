"""The prediction of a candidate from two parts, one for each worker: bit for bit the numbers of `local` and `remote` in
`router/routing/cost_model.py`. Dozens of candidates are compared for a request, and each worker is part of several. Pure."""

import math
from typing import NamedTuple

from pdmesh.step_sharing import PACE_TARGET
from router.routing.cost_model import SPARED, Goals, OutputSide, Overhead, Prediction, PromptSide, PromptWays, miss

_new = tuple.__new__  # as in router/routing/cost_model.py


class PromptPart(NamedTuple):
    """Hold the part of a prediction that depends only on the worker that computes the prompt. `work_s`: the prompt's steps;
    `more_s`: what it adds to the TPOT of sequences there; `misses`: their missed objectives. `ways` that were compared; None:
    computing was the only one."""

    ahead_s: float
    compute_s: float
    own_s: float
    work_s: float
    lost_s: float
    more_s: float
    misses: float
    spares: bool
    ways: PromptWays | None = None


class OutputPart(NamedTuple):
    """Hold the part of a prediction that depends only on the decode worker. `own_s`: the request's share of its steps;
    `own_misses`: of the request's TPOT objective; `misses`: of the `rows` sequences that run there. `keeps_pace`: its engine
    bounds the request's TPOT by `tpot_bound_s`, whatever shares its steps."""

    tpot_s: float
    queue_s: float
    missing: float
    own_s: float
    slowed_s: float
    rows: int
    own_misses: float
    misses: float
    tpot_bound_s: float
    keeps_pace: bool


def prompt_part(prompt: PromptSide, expected: float, goals: Goals) -> PromptPart:
    """Return the part of the worker that computes the prompt."""
    ahead_s, compute_s, own_s, rows, tpot_s, fixed_s, is_paced = prompt
    more_s = 0.0 if is_paced else own_s / (expected if expected > 1.0 else 1.0)
    misses = rows * miss(tpot_s + more_s, goals.running_tpot_s) if rows else 0.0
    lost = rows * own_s * (SPARED if is_paced else 1.0)
    return _new(PromptPart, (ahead_s, compute_s, own_s, own_s + fixed_s, lost, more_s, misses, is_paced or not rows, None))


def output_part(output: OutputSide, expected: float, goals: Goals) -> OutputPart:
    """Return the part of the decode worker."""
    tpot_s, row_s, rows, queue_s, missing, alone_s, is_paced, keeps_pace = output
    goal_s, bound_s = goals.tpot_s, 0.0
    misses = rows * miss(tpot_s, goals.running_tpot_s) if rows else 0.0
    if goal_s is not None:
        bound_s = max(tpot_s, PACE_TARGET * goal_s) if keeps_pace else math.inf
    slowed = rows * expected * row_s * (SPARED if is_paced else 1.0)
    own_s = expected * (row_s + alone_s)
    own_misses = miss(tpot_s, goal_s)
    return _new(OutputPart, (tpot_s, queue_s, missing, own_s, slowed, rows, own_misses, misses, bound_s, keeps_pace))


def local_prediction(prompt: PromptPart, output: OutputPart, over: Overhead, gaps: float, goals: Goals) -> Prediction:
    """Return what `local` returns. `gaps`: the number of gaps between the expected tokens, at least 1."""
    before_s, after_s, stretch, ttft_stretch = over
    plain_s, steps_tpot_s = prompt.compute_s + before_s, output.tpot_s + after_s / gaps
    ttft_s = plain_s * ttft_stretch
    tpot_s = steps_tpot_s * stretch
    if goals.tpot_s is not None and tpot_s > output.tpot_bound_s:
        tpot_s = output.tpot_bound_s
    misses = miss(ttft_s, goals.ttft_s) + (output.own_misses if output.keeps_pace else miss(tpot_s, goals.tpot_s))
    if output.rows:
        misses += output.rows * miss(output.tpot_s + prompt.more_s, goals.running_tpot_s)
    delay_s, work_s = prompt.lost_s + output.slowed_s, prompt.work_s + output.own_s
    ahead_s = prompt.ahead_s * ttft_stretch
    return _new(Prediction, (ttft_s, tpot_s, delay_s, work_s, ahead_s, misses, steps_tpot_s, prompt.spares, plain_s))


def remote_prediction(prompt: PromptPart, output: OutputPart, over: Overhead, gaps: float, goals: Goals) -> Prediction:
    """Return what `remote` returns. `gaps` as for `local_prediction`."""
    before_s, after_s, stretch, ttft_stretch = over
    plain_s, after_s = prompt.compute_s + before_s, after_s * output.missing
    ttft_s = plain_s * ttft_stretch
    behind_s = output.queue_s - prompt.own_s
    steps_tpot_s = output.tpot_s + (after_s + (behind_s if behind_s > 0.0 else 0.0)) / gaps
    tpot_s = steps_tpot_s * stretch
    if goals.tpot_s is not None and tpot_s > output.tpot_bound_s:
        tpot_s = output.tpot_bound_s
    own_s = steps_tpot_s if output.keeps_pace and steps_tpot_s < tpot_s else tpot_s
    misses = miss(ttft_s, goals.ttft_s) + miss(own_s, goals.tpot_s)
    misses = misses + prompt.misses + output.misses
    work_s = prompt.work_s + output.own_s + before_s + after_s
    delay_s = prompt.lost_s + output.slowed_s
    ahead_s = prompt.ahead_s * ttft_stretch
    return _new(Prediction, (ttft_s, tpot_s, delay_s, work_s, ahead_s, misses, steps_tpot_s, prompt.spares, plain_s))
