"""The modelled worker with speculation: tokens as often as drafts bring them, and none lost or made up."""

from __future__ import annotations

import random
import statistics
from dataclasses import replace

import pytest

from pdmesh.planning.latency_model import NO_DRAFTS, Drafts
from pdmesh.simulator.workers.spec import WorkerSpec, spec_of
from pdmesh.simulator.workers.worker import ModelledWorker, figures_of
from tests.simulator.naive_worker import Job
from tests.simulator.specs import LARGE, SPEED
from tests.simulator.test_worker import Recorder

DRAFTS = Drafts(1.6, 2.5)
DRAFTING = replace(LARGE, tokens_per_row=DRAFTS.tokens_per_row, computed_per_row=DRAFTS.computed_per_row)
NUM_OUT = 400
LONG = Job(0.01, 8000, 1, is_prefill=True)


def decode_s(spec: WorkerSpec, num_rows: int, beside: tuple[Job, ...] = ()) -> tuple[float, ModelledWorker]:
    """From the last first token to the last one of `num_rows` that decode together."""
    recorder = Recorder(spec, [*(Job(0.0, 16, NUM_OUT) for _ in range(num_rows)), *beside])
    times = recorder.run()[:num_rows]
    firsts, lasts = [first for first, _ in times if first is not None], [last for _, last in times if last is not None]
    assert len(firsts) == len(lasts) == num_rows
    assert recorder.worker.room.num_free == spec.num_blocks and recorder.worker.is_empty
    assert recorder.worker.counters.num_generated == num_rows * NUM_OUT + len(beside)
    return max(lasts) - max(firsts), recorder.worker


def test_a_lone_sequence_gets_its_tokens_as_fast_as_drafts_bring_them() -> None:
    took_s, worker = decode_s(DRAFTING, 1)
    contexts = range(17, 17 + NUM_OUT - 1)
    wanted_s = sum(DRAFTING.drafts.token_s(SPEED, 1, SPEED.decode_s(1, context)) for context in contexts)
    assert took_s == pytest.approx(wanted_s)
    assert worker.drafting.latest == DRAFTING.drafts


def test_a_batch_for_which_drafts_do_not_pay_has_none() -> None:
    dear = replace(DRAFTING, tokens_per_row=1.05, computed_per_row=4.0)
    assert decode_s(dear, 8)[0] == decode_s(LARGE, 8)[0]
    assert decode_s(dear, 8)[1].drafting.latest == NO_DRAFTS
    assert decode_s(DRAFTING, 8)[0] < 0.9 * decode_s(LARGE, 8)[0]


def test_steps_with_prompts_give_as_many_tokens_in_the_mean() -> None:
    """While a long prompt is computed, rows go on getting what drafts bring from each step."""
    few = {"max_num_batched_tokens": 72}  # so that the prompt takes most of the steps
    drafting, plain = replace(DRAFTING, **few), replace(LARGE, **few)  # type: ignore[arg-type]
    prompt_s = SPEED.per_prefill_token_s * LONG.num_input + SPEED.per_prefill_context_s * LONG.num_input**2 / 2
    for spec in (drafting, plain):
        (alone_s, _), (beside_s, _) = decode_s(spec, 4), decode_s(spec, 4, (LONG,))
        assert beside_s == pytest.approx(alone_s + prompt_s, rel=0.02)


@pytest.mark.parametrize("drafts", [DRAFTS, Drafts(3.0, 4.0), Drafts(1.2, 6.0)])
@pytest.mark.parametrize(("gap_s", "goal_s"), [(0.1, 0.0), (0.03, 0.0), (0.03, 0.03)])
def test_a_worker_that_drafts_is_no_slower(drafts: Drafts, gap_s: float, goal_s: float) -> None:
    """Prompts come all the time, and rows end all the time: a step beside prompts costs by what its drafts bring."""
    rng = random.Random(7)
    jobs = [Job(gap_s * number, 100, rng.randint(20, 100), goal_s) for number in range(300)]
    spec = replace(LARGE, tokens_per_row=drafts.tokens_per_row, computed_per_row=drafts.computed_per_row)
    took, ends = [], []
    for each in (LARGE, spec):
        recorder = Recorder(each, jobs)
        times = [(first, last) for first, last in recorder.run() if first is not None and last is not None]
        assert recorder.worker.is_empty and recorder.worker.room.num_free == each.num_blocks
        took.append(statistics.fmean(last - first for first, last in times))
        ends.append(max(last for _, last in times))
    assert took[1] <= 1.01 * took[0] and ends[1] <= 1.05 * ends[0]
    if drafts == DRAFTS and gap_s == 0.1:
        assert took[1] < 0.9 * took[0]


def test_drafts_that_do_not_fit_into_a_step_are_none() -> None:
    narrow = {"max_num_batched_tokens": 16, "max_num_seqs": 12}
    drafting, plain = replace(DRAFTING, **narrow), replace(LARGE, **narrow)  # type: ignore[arg-type]
    assert decode_s(drafting, 4)[0] < 0.9 * decode_s(plain, 4)[0]
    assert decode_s(drafting, 8)[0] > 0.95 * decode_s(plain, 8)[0]


def test_a_worker_without_blocks_to_spare_loses_none() -> None:
    tight = replace(DRAFTING, num_blocks=120, max_num_seqs=8, block_size=8, prefix_tokens=0)
    recorder = Recorder(tight, [Job(0.05 * number, 60, 200) for number in range(12)])
    ended = [last for _, last in recorder.run() if last is not None]
    assert recorder.worker.counters.num_preemptions > 0 and len(ended) + recorder.num_refused == 12
    assert recorder.worker.room.num_free == 120


def test_routers_hear_of_the_drafts_of_the_latest_step() -> None:
    recorder = Recorder(DRAFTING, [Job(0.0, 16, NUM_OUT)])
    assert figures_of(recorder.worker, 0.0).drafts is None, "it has decoded nothing"
    recorder.events.run(until_s=0.2)
    assert figures_of(recorder.worker, 0.2).drafts == DRAFTING.drafts


def test_a_file_says_what_drafts_bring() -> None:
    table = {name: getattr(SPEED, name) for name in ("fixed_s", "per_prefill_token_s", "per_prefill_context_s")}
    table |= {"per_sequence_s": SPEED.per_sequence_s, "per_context_token_s": SPEED.per_context_token_s}
    assert spec_of({**table, "tokens_per_row": 1.5, "computed_per_row": 2}).drafts.tokens_per_row == 1.5
    assert spec_of(table).drafts == NO_DRAFTS
    with pytest.raises(ValueError, match=r"^tokens_per_row: "):
        spec_of({**table, "tokens_per_row": 0.5})
    with pytest.raises(ValueError, match=r"^computed_per_row: "):
        spec_of({**table, "tokens_per_row": 4.0})
    with pytest.raises(ValueError, match=r"^computed_per_row: "):
        spec_of({**table, "computed_per_row": "two"})
