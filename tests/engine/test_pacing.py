"""How much of prompts a step holds beside sequences that were promised a pace."""

from __future__ import annotations

import pytest

from pdmesh.engine.kv_cache.block_manager import BlockManager
from pdmesh.engine.kv_cache.block_pool import BlockPool
from pdmesh.engine.request import EngineRequest
from pdmesh.engine.scheduler.scheduler import Scheduler
from pdmesh.engine.scheduler.sequence import Phase, Sequence, SequenceGroup
from pdmesh.engine.scheduler.tpot_limiter import StepCost, TpotLimiter
from pdmesh.engine.speculation.draft import Draft
from pdmesh.sampling_params import SamplingParams
from pdmesh.step_sharing import (
    FORGIVEN,
    LEAST_TOKENS,
    LEAST_TOKENS_DRAFTING,
    MAX_SHARE,
    MOST_WITHOUT_DRAFTING,
    PACE_TARGET,
    SPREAD,
)
from tests.support.mock_engine import hash_block

COST = StepCost(
    fixed_s=0.008, per_prefill_token_s=0.001, per_prefill_context_s=0.0, per_sequence_s=0.002, per_context_token_s=0.0
)
GOAL_S = 0.05
MS = 1_000_000


class Machine:
    """A scheduler whose steps take exactly what `COST` says, on a clock of its own."""

    def __init__(self, cost: StepCost | None = COST, budget: int = 512) -> None:
        self.pacer, self.cost = TpotLimiter(), cost or COST
        self.pacer.cost = cost
        allocator = BlockManager(BlockPool(512), 16, hash_block, prefix_caching=False)
        self.scheduler = Scheduler(allocator, budget, self.pacer)
        self.now_ns = 1
        self.num_arrived = 0
        self.tokens_per_step = 1  # of the first that arrived

    def add(self, num_tokens: int, goal_s: float = 0.0, unpaced_from_ns: int = 0) -> Sequence:
        request = EngineRequest(
            str(self.num_arrived),
            tuple(range(num_tokens)),
            SamplingParams(max_tokens=9999),
            tpot_goal_s=goal_s,
            unpaced_from_ns=unpaced_from_ns,
        )
        group = SequenceGroup(request, self.num_arrived, Phase.ACTIVE)
        self.num_arrived += 1
        self.scheduler.wait(group.sequences[0])
        return group.sequences[0]

    def step(self, extra_ns: int = 0) -> int:
        """Returns the prompt tokens in it."""
        plan = self.scheduler.schedule(self.now_ns)
        num_prompt = sum(piece.num_tokens for piece in plan.pieces if not piece.sequence.is_decoding)
        num_rows = sum(piece.sequence.is_decoding for piece in plan.pieces)
        cost = self.cost
        self.now_ns += int(1e9 * (cost.fixed_s + cost.per_prefill_token_s * num_prompt + 0.002 * num_rows)) + extra_ns
        for piece in plan.pieces:
            piece.sequence.num_computed += piece.num_tokens
            if not piece.sequence.num_remaining:
                is_first = piece.sequence.group.arrival == 0 and bool(piece.sequence.output)
                piece.sequence.num_computed += self.tokens_per_step - 1 if is_first else 0
                piece.sequence.output += [9] * (self.tokens_per_step if is_first else 1)
        return num_prompt


def running(goal_s: float = GOAL_S, cost: StepCost | None = COST) -> tuple[Machine, Sequence]:
    machine = Machine(cost)
    sequence = machine.add(4, goal_s)
    machine.step()
    return machine, sequence


def test_a_step_with_prompts_is_as_long_as_the_pace_allows() -> None:
    machine, _ = running()
    machine.add(1000)
    assert machine.step() == pytest.approx((PACE_TARGET * GOAL_S - 0.010) / 0.001, abs=1)


def test_the_pace_holds_over_many_prompts() -> None:
    machine, sequence = running()
    began_ns, had = machine.now_ns, len(sequence.output)
    for _ in range(5):
        machine.add(1000)
    while machine.step() and len(sequence.output) - had < 120:
        pass
    assert len(sequence.output) - had == 120
    assert (machine.now_ns - began_ns) / 1e9 / 120 == pytest.approx(PACE_TARGET * GOAL_S, rel=0.03)


def test_slack_is_spent_bit_by_bit() -> None:
    machine, _ = running()
    for _ in range(20):
        machine.step()
    machine.add(4000)
    chunks = [machine.step() for _ in range(40)]
    slack_s = 20 * (PACE_TARGET * GOAL_S - 0.010)
    assert chunks[0] == pytest.approx((PACE_TARGET * GOAL_S + slack_s / SPREAD - 0.010) / 0.001, rel=0.1)
    assert chunks == sorted(chunks, reverse=True)
    assert chunks[-1] == pytest.approx((PACE_TARGET * GOAL_S - 0.010) / 0.001, abs=2)


def test_who_is_behind_catches_up_while_prompts_go_on() -> None:
    machine, _ = running()
    machine.add(4000)
    machine.step(extra_ns=500 * MS)  # the machine stalled
    chunks = [machine.step() for _ in range(60)]
    assert LEAST_TOKENS in chunks[:SPREAD] and min(each for each in chunks if each) == LEAST_TOKENS
    assert chunks[-1] == pytest.approx((PACE_TARGET * GOAL_S - 0.010) / 0.001, rel=0.1)


@pytest.mark.parametrize("per_token_s", [0.003, 0.005, 0.012, 0.030])
def test_the_pace_holds_where_few_tokens_of_a_prompt_take_as_long_as_it_is(per_token_s: float) -> None:
    """A pass of them takes up to six paces, and others make up for it; prompts get all that is left."""
    machine, _ = running(cost=COST._replace(per_prefill_token_s=per_token_s))
    for _ in range(5):
        machine.add(1000)
    began_ns, chunks = machine.now_ns, list[int]()
    while len(chunks) < 200:
        chunks.append(machine.step())
    took_s = (machine.now_ns - began_ns) / 1e9
    assert took_s / 200 == pytest.approx(PACE_TARGET * GOAL_S, rel=0.05)
    assert {each for each in chunks if each} == {LEAST_TOKENS} or min(each for each in chunks if each) > LEAST_TOKENS
    assert sum(chunks) == pytest.approx((took_s - 200 * 0.010) / per_token_s, rel=0.05)


def test_the_end_of_a_prompt_that_fits_waits_for_nothing() -> None:
    machine, _ = running(cost=COST._replace(per_prefill_token_s=0.008))
    machine.add(3)
    assert machine.step() == 3


def test_prompts_go_on_beside_an_objective_that_just_can_be_kept() -> None:
    """A step without prompts takes 49 ms of an objective of 50: of SPREAD steps one has some tokens of a prompt."""
    machine, _ = running(cost=COST._replace(fixed_s=0.047))
    machine.add(1000)
    chunks = [machine.step() for _ in range(10 * SPREAD)]
    assert all(any(chunks[first : first + SPREAD]) for first in range(len(chunks) - SPREAD))
    assert set(chunks) == {0, LEAST_TOKENS}


def test_what_a_long_stall_took_is_lost_and_not_owed_by_prompts() -> None:
    machine, sequence = running()
    machine.add(4000)
    machine.step(extra_ns=60_000 * MS)
    machine.step()
    pace = machine.pacer.tightest([sequence], machine.now_ns)
    assert pace is not None and pace.slack_s == pytest.approx(-FORGIVEN * PACE_TARGET * GOAL_S, rel=0.05)


def test_prompts_get_a_share_of_steps_that_are_nearly_too_long() -> None:
    """Steps of 38 ms, a pace of 45: of the objective of 50, 95 % leave 9.5 ms, and they are used."""
    machine = Machine(COST._replace(fixed_s=0.036))
    sequence = machine.add(4, GOAL_S)
    machine.step()
    machine.add(1000)
    plan = machine.scheduler.schedule(machine.now_ns)
    num_prompt = sum(piece.num_tokens for piece in plan.pieces if piece.sequence is not sequence)
    assert num_prompt == pytest.approx(9, abs=1)
    machine.pacer.cost = COST._replace(fixed_s=0.028)

    def told(behind_ms: int) -> int | None:
        return machine.pacer.prompt_tokens([sequence], machine.scheduler.running[-1], machine.now_ns + behind_ms * MS)

    assert told(60) == pytest.approx(30 * (1 - MAX_SHARE) / MAX_SHARE, abs=1)
    assert [told(900) for _ in range(SPREAD)] == [0] * (SPREAD - 1) + [LEAST_TOKENS], "behind the objective, not the pace alone"


def test_steps_that_take_nearly_all_of_the_objective_leave_prompts_half_of_the_rest() -> None:
    """Steps alone take 48 ms of 50, and a prompt token 0.05 ms: some twenty go into each step, not eight into every eighth."""
    cost = COST._replace(fixed_s=0.046, per_prefill_token_s=5e-5)
    machine, sequence = running(cost=cost)
    machine.add(4000)
    machine.step()
    began_ns, num_prompt = machine.now_ns, sum(machine.step() for _ in range(100))
    assert num_prompt > 1000 and 0.048 < (machine.now_ns - began_ns) / 100e9 < 0.0495, sequence


@pytest.mark.parametrize("fixed_s", [0.030, 0.035, 0.040])
def test_beside_prompts_without_end_an_objective_is_kept_with_something_to_spare(fixed_s: float) -> None:
    """Steps alone take 64 to 84 % of it: a mean of the objective itself would be late by whatever a machine adds."""
    machine, sequence = running(cost=COST._replace(fixed_s=fixed_s))
    machine.add(4000)
    machine.step()
    began_ns, num_prompt = machine.now_ns, sum(machine.step() for _ in range(200))
    tpot_s = (machine.now_ns - began_ns) / 200e9
    assert PACE_TARGET * GOAL_S * 0.99 < tpot_s < 0.96 * GOAL_S and num_prompt > 200, sequence


def test_an_objective_that_cannot_be_met_holds_nobody_up() -> None:
    machine = Machine()
    for goal_s in (0.001, GOAL_S):
        machine.add(4, goal_s)
    machine.step()
    machine.add(1000)
    assert machine.step() == pytest.approx((PACE_TARGET * GOAL_S - 0.012) / 0.001, abs=1)


def test_a_pace_that_cannot_be_kept_is_not_told_to_routers_either() -> None:
    """They would think prompts slow that nobody holds up."""
    machine = Machine()
    hopeless = machine.add(4, 0.001)
    machine.step()
    machine.step()
    assert machine.pacer.tightest([hopeless], machine.now_ns) is None
    assert machine.pacer.promised_s([hopeless], [hopeless]) == 0
    assert machine.pacer.promised_s([hopeless, machine.add(4, GOAL_S)], [hopeless]) == PACE_TARGET * GOAL_S


def test_who_was_preempted_begins_anew() -> None:
    machine, sequence = running()
    assert sequence.paced_from_ns == 0
    machine.step()
    assert sequence.paced_from_ns
    machine.scheduler._preempt(sequence, machine.scheduler.schedule(machine.now_ns))
    assert sequence.paced_from_ns == 0


@pytest.mark.parametrize(("goal_s", "cost"), [(0.0, COST), (GOAL_S, None)])
def test_without_a_promise_or_a_price_steps_are_full(goal_s: float, cost: StepCost | None) -> None:
    machine, _ = running(goal_s, cost)
    machine.add(1000)
    assert machine.step() == 511


def test_the_tightest_decides_and_the_first_prompt_s_context_counts() -> None:
    machine = Machine(COST._replace(per_prefill_context_s=1e-6))
    for goal_s in (0.0, 0.2, 0.05):
        machine.add(4, goal_s)
    machine.step()
    prompt = machine.add(2000)
    assert machine.step() == pytest.approx((PACE_TARGET * 0.05 - 0.014) / 0.001, abs=2)
    decoding, room_s = machine.scheduler.running[:3], PACE_TARGET * 0.05 - 0.014
    slack_s = PACE_TARGET * 0.05 - (machine.now_ns - decoding[-1].paced_from_ns) / 1e9
    prompt.num_computed = 1000
    machine.pacer.start(decoding, machine.now_ns)
    told = machine.pacer.prompt_tokens(decoding, prompt, machine.now_ns)
    assert told == pytest.approx((room_s + slack_s / SPREAD) / (0.001 + 1e-6 * 1005), abs=1)


def test_what_is_told_of_it() -> None:
    machine, sequence = running()
    pacer, decoding = machine.pacer, [sequence]
    assert pacer.tightest(decoding, machine.now_ns) is None and pacer.promised_s(decoding, []) == PACE_TARGET * GOAL_S
    for _ in range(3):
        machine.step()
    pace = pacer.tightest(decoding, machine.now_ns)
    assert pace is not None and pace.pace_s == PACE_TARGET * GOAL_S
    assert pace.slack_s == pytest.approx(3 * (PACE_TARGET * GOAL_S - 0.010))
    assert pacer.promised_s([], []) == 0


def test_off_means_that_nobody_is_promised_anything() -> None:
    machine, sequence = running()
    machine.scheduler._pacer = pacer = TpotLimiter(is_on=False)
    pacer.cost, sequence.paced_from_ns = COST, 0
    machine.add(1000)
    assert machine.step() == 511 and pacer.promised_s([sequence], []) == 0


def guessed(goal_s: float, tokens_per_step: int, *others: float) -> tuple[Machine, Sequence]:
    """One whose guesses come true, after thirty steps without prompts."""
    machine = Machine()
    machine.tokens_per_step = tokens_per_step
    first = machine.add(4, goal_s)
    for other_s in others:
        machine.add(4, other_s)
    for _ in range(30):
        machine.step()
    return machine, first


def test_a_pace_that_only_kept_guesses_can_keep_is_kept() -> None:
    """Steps of 10 ms and more, of three tokens each: one every 8 ms, beside prompts without end."""
    machine, sequence = guessed(0.008, 3)
    pace = machine.pacer.tightest([sequence], machine.now_ns)
    assert pace is not None and pace.pace_s == machine.pacer.promised_s([sequence], [sequence]) == PACE_TARGET * 0.008
    assert pace.tokens_per_step == pytest.approx(3.0, abs=0.5)
    machine.add(6000)
    began_ns, had = machine.now_ns, len(sequence.output)
    num_prompt = sum(machine.step() for _ in range(200))
    token_s = (machine.now_ns - began_ns) / 1e9 / (len(sequence.output) - had)
    assert 0.9 * PACE_TARGET * 0.008 < token_s < 0.008
    assert num_prompt > 200 * 8


def test_kept_guesses_leave_prompts_steps_that_are_so_many_times_longer() -> None:
    machine, sequence = guessed(GOAL_S, 2)
    machine.add(8000)
    for _ in range(30):  # what it got ahead before is spent
        machine.step()
    began_ns, had, num_prompt = machine.now_ns, len(sequence.output), 0
    for _ in range(15):
        num_prompt += machine.step()
    assert (machine.now_ns - began_ns) / 1e9 / (len(sequence.output) - had) == pytest.approx(PACE_TARGET * GOAL_S, rel=0.05)
    assert num_prompt / 15 == pytest.approx((2 * PACE_TARGET * GOAL_S - 0.010) / 0.001, rel=0.05)


def test_one_sequence_s_guesses_make_no_other_s_objective_possible() -> None:
    machine, _ = guessed(GOAL_S, 3, 0.006)
    machine.add(1000)
    pace = machine.pacer.tightest(machine.scheduler.running[:2], machine.now_ns)
    assert pace is not None and pace.pace_s == PACE_TARGET * GOAL_S


def test_guesses_beside_prompts_are_part_of_the_step() -> None:
    machine, sequence = running()
    prompt = machine.add(1000)
    machine.scheduler.schedule(machine.now_ns)
    plain = machine.pacer.prompt_tokens([sequence], prompt, machine.now_ns)
    draft = Draft.chain([7] * 5, [1.0] * 5, "test")
    plan = machine.scheduler.schedule(machine.now_ns, {sequence: draft})
    piece = plan.piece_of(prompt)
    assert plain is not None and piece is not None
    assert piece.num_tokens == pytest.approx(plain - 5 * 2, abs=1)


def speculating(goal_s: float = GOAL_S) -> Machine:
    """One whose sequence has had three tokens of each step for long, and is gone."""
    machine, sequence = guessed(goal_s, 3)
    for _ in range(70):
        machine.step()
    machine.scheduler.discard(sequence)
    machine.pacer._num_guessed = 1e-9
    return machine


def test_a_new_sequence_is_taken_to_be_like_those_before_it() -> None:
    machine = speculating()
    machine.add(4, GOAL_S)
    machine.step()
    machine.add(1000)
    assert machine.step() == pytest.approx((3 * PACE_TARGET * GOAL_S - 0.010) / 0.001, rel=0.05)


def test_a_sequence_that_drafts_of_others_keep_from_its_objective_holds_no_prompt_back() -> None:
    """A step of both takes 12 ms, and 72 ms with thirty drafted tokens: one token of each in 50 ms is out of reach."""
    machine, _ = guessed(GOAL_S, 1, GOAL_S)
    prompt, decoding = machine.add(4000), machine.scheduler.running[:2]
    held = machine.pacer.prompt_tokens(decoding, prompt, machine.now_ns, 30)
    assert held is not None
    for _ in range(100):  # such steps are usual now
        told = machine.pacer.prompt_tokens(decoding, prompt, machine.now_ns, 30)
    assert told is None, "as many as fit"


def test_where_sequences_speculate_prompts_come_in_larger_pieces() -> None:
    for tokens_per_step, least in ((1, LEAST_TOKENS), (3, LEAST_TOKENS_DRAFTING)):
        machine, _ = guessed(0.0135 / tokens_per_step, tokens_per_step)
        machine.pacer._num_guessed = 1e-9 * (tokens_per_step - 1)
        machine.add(4000)
        pieces = [piece for _ in range(200) if (piece := machine.step())]
        assert min(pieces) == least


def test_where_sequences_speculate_every_second_step_has_prompts() -> None:
    """Also where a sequence is behind for long. Elsewhere it is one of SPREAD."""
    for machine, most_without in ((speculating(), MOST_WITHOUT_DRAFTING), (running()[0], SPREAD)):
        machine.add(4, GOAL_S)
        machine.step()
        machine.step(extra_ns=1000 * MS)
        machine.add(4000)
        pieces = [machine.step() for _ in range(2 * SPREAD)]
        assert [bool(piece) for piece in pieces] == ([False] * (most_without - 1) + [True]) * (2 * SPREAD // most_without)


@pytest.mark.parametrize(("unpaced_ms", "is_whole"), [(0, False), (1, True), (200, True), (600, False)])
def test_a_prompt_that_might_miss_its_own_objective_waits_for_no_pace(unpaced_ms: int, is_whole: bool) -> None:
    """It takes 300 ms alone. Where no sequence speculates, TPOT objectives come first."""
    for machine, speculates in ((speculating(), True), (running()[0], False)):
        machine.add(4, GOAL_S)
        machine.step()
        machine.add(300, unpaced_from_ns=machine.now_ns + unpaced_ms * MS if unpaced_ms else 0)
        assert (machine.step() == 300) is (is_whole and speculates)


def test_a_prompt_that_has_had_its_first_token_waits_as_ever() -> None:
    """It lost its blocks to others."""
    machine = speculating()
    machine.add(4, GOAL_S)
    machine.step()
    prompt = machine.add(300, unpaced_from_ns=1)
    prompt.output.append(9)
    assert machine.step() < 300


def test_what_others_had_fades() -> None:
    machine = speculating()
    machine.add(4, GOAL_S)
    for _ in range(200):
        machine.step()
    machine.add(400)
    machine.step()
    assert machine.pacer._typical == pytest.approx(1.0, abs=0.05)


def test_tokens_that_a_grammar_forces_make_no_other_sequence_longer() -> None:
    """It has had more tokens a step, and nothing was drafted."""
    machine = speculating()
    machine.pacer._num_guessed = 0.0
    machine.add(4, GOAL_S)
    machine.step()
    machine.add(1000)
    assert machine.step() == pytest.approx((PACE_TARGET * GOAL_S - 0.010) / 0.001, abs=1)
