"""What is kept from one decode step to the next is what would be built anew, and gives the same tokens."""

from __future__ import annotations

import random
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from pdmesh.adapter_id import AdapterId
from pdmesh.engine.engine import Engine
from pdmesh.engine.errors import RequestTooLarge
from pdmesh.engine.request import EngineRequest
from pdmesh.engine.runner.batch import StepBatch
from pdmesh.engine.runner.decode_batch import DecodeBatch
from pdmesh.engine.runner.model_runner import KeptInput, build_batch
from pdmesh.engine.scheduler.scheduler import ScheduledSequence, SchedulerOutput
from pdmesh.engine.scheduler.sequence import Phase, Sequence, SequenceGroup
from pdmesh.sampling_params import SamplingParams
from tests.engine.backends import BACKENDS
from tests.engine.constrained import Model, requests, run, tokens
from tests.support.guesser import Guesser
from tests.support.kept_input import KeptWatch, assert_same_batch
from tests.support.mock_engine import Collector, answer, make_engine, run_to_end, write_kv

MAX_CONTEXT = 120
HOST = torch.device("cpu")


def some_request(chance: random.Random, name: str) -> EngineRequest:
    """Of few beginnings, so that prompts find each other's blocks."""
    beginning = chance.choice([(), (4, 5, 6, 7) * 4, (8, 4, 8, 5) * 6])
    sampling = SamplingParams(
        temperature=chance.choice([0.0, 1.0]),
        max_tokens=chance.randint(1, 60),
        seed=chance.randint(0, 3),
        n=chance.choice([1, 1, 1, 2]),
        ignore_eos=True,
        presence_penalty=chance.choice([0.0, 0.0, 0.5]),
        stop_token_ids=chance.choice([(), (), (9,)]),
    )
    return EngineRequest(name, (*beginning, *(chance.randint(4, 7) for _ in range(chance.randint(1, 5)))), sampling)


def bring(engine: Engine, request: EngineRequest, running: dict[str, EngineRequest]) -> None:
    """Start a request as behind a hand-off, if there is room: its KV and its first tokens come from elsewhere."""
    granted = engine.reserve(request)
    if granted is None:
        return
    write_kv(engine, granted.block_ids, request.prompt, granted.num_cached_tokens)
    first = {
        choice: answer(request, choice, max_context=MAX_CONTEXT, max_new=1).token_ids for choice in range(request.sampling.n)
    }
    engine.start(request.request_id, {choice: ids[0] for choice, ids in first.items()})
    running[request.request_id] = replace(request, emitted=tuple(first.values()))


@pytest.mark.parametrize("right", [None, 0.3], ids=["no drafts", "drafts"])
@pytest.mark.parametrize("seed", range(6))
def test_kept_input_is_what_would_be_built(seed: int, right: float | None) -> None:
    """Requests come, by themselves and with KV from elsewhere; they end, are released and are preempted, in any order."""
    chance = random.Random(seed)
    engine = make_engine(
        num_blocks=chance.choice([24, 60, 200]),
        block_size=4,
        max_num_seqs=6,
        max_num_batched_tokens=chance.choice([7, 64]),
        max_context=MAX_CONTEXT,
        proposers=[] if right is None else [Guesser(right)],
        draft_length=0 if right is None else 2,
    )
    watch, collector, running, released = KeptWatch(engine), Collector(), dict[str, EngineRequest](), set[str]()
    for step in range(400):
        if chance.random() < 0.06:
            request = some_request(chance, f"r{step}")
            try:
                if chance.random() < 0.5:
                    bring(engine, request, running)
                elif engine.add(request):
                    running[request.request_id] = request
            except RequestTooLarge:
                pass
        if chance.random() < 0.01 and running:
            released.add(name := chance.choice(sorted(running)))
            engine.release(name)
        collector.take(engine.step())
    run_to_end(engine, collector)
    engine.check_integrity()
    for name, request in running.items():
        for choice in range(request.sampling.n) if name not in released else ():
            history = request.emitted[choice] if request.emitted else ()
            expected = answer(replace(request, emitted=()), choice, max_context=MAX_CONTEXT).token_ids[len(history) :]
            assert collector.answer(name, choice).token_ids == expected
    if right is None:
        assert watch.num_repeats > 50
        assert seed or engine.stats().num_prefix_hit_tokens


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_same_tokens_as_without(backend: str, tmp_path: Path) -> None:
    """Grammars, seeds, log-probabilities and several choices, over more blocks than a row of the tables has to spare."""
    model = Model.make(tmp_path, backend)
    long = EngineRequest("long", tuple(range(5, 25)), SamplingParams(max_tokens=600, ignore_eos=True, logprobs=1, seed=3))
    penalized = replace(
        long, request_id="p", sampling=replace(long.sampling, max_tokens=90, frequency_penalty=0.7, logprobs=None)
    )
    asked = [*requests(model), long, penalized]
    engine, plain = model.engine(), model.engine()
    watch = KeptWatch(engine)
    plain._scheduler._repeated = lambda now_ns: None  # type: ignore[method-assign]
    answers, expected = run(engine, *asked), run(plain, *asked)
    assert tokens(answers) == tokens(expected)
    assert answers["long", 0].logprobs == expected["long", 0].logprobs
    assert watch.num_repeats > 500


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_idle_engine_keeps_nothing_of_its_last_steps(backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the batch nor the logits; while sequences run it keeps both."""
    model = Model.make(tmp_path, backend)
    engine, seen, forward = model.engine(), list[weakref.ref[object]](), model.loaded.model.forward

    def watched(batch: StepBatch, *rest: Any) -> Tensor:
        logits = forward(batch, *rest)
        seen[:] = [weakref.ref(batch), weakref.ref(logits)]
        return logits

    monkeypatch.setattr(model.loaded.model, "forward", watched)
    request = EngineRequest("a", tuple(range(5, 25)), SamplingParams(max_tokens=9, ignore_eos=True))
    assert engine.add(request)
    while engine.has_work:
        assert engine.step() is not None
    batch, _ = seen
    assert isinstance(batch(), DecodeBatch)
    assert engine.step() is None
    assert [each() for each in seen] == [None, None]
    monkeypatch.undo()
    assert tokens(run(engine, request)) == tokens(run(model.engine(), request))


def decoding(name: str, num_tokens: int, blocks: list[int], adapter: AdapterId | None = None) -> Sequence:
    """A sequence that has computed all of its tokens but the last, which was drawn."""
    request = EngineRequest(name, tuple(range(num_tokens - 1)), SamplingParams(max_tokens=10_000), adapter=adapter)
    [sequence] = SequenceGroup(request, 0, Phase.ACTIVE).sequences
    sequence.output.append(7)
    sequence.block_ids, sequence.num_computed = blocks, num_tokens - 1
    return sequence


def plan_of(sequences: list[Sequence]) -> SchedulerOutput:
    plan = SchedulerOutput(64)
    for sequence in sequences:
        plan.add(ScheduledSequence(sequence, 1))
    return plan


def test_a_row_of_the_tables_that_is_full_makes_a_new_batch() -> None:
    sequences = [decoding("a", 5, list(range(100, 400))), decoding("b", 40, list(range(500, 800)))]
    kept, batches = KeptInput(plan_of(sequences), []), set[int]()
    held: list[DecodeBatch] = []
    for number in range(400):
        batch = kept.batch_of_next(4, {})
        assert_same_batch(batch, build_batch(kept.plan.pieces, 4, HOST))
        if id(batch) not in batches:
            held.append(batch)  # so that no other gets its id
            batches.add(id(batch))
        for sequence in sequences:
            sequence.output.append(number)
            sequence.num_computed += 1
    assert 2 <= len(held) < 8


def test_an_adapter_that_has_moved_makes_a_new_batch() -> None:
    adapter = AdapterId("x", "digest")
    kept = KeptInput(plan_of([decoding("a", 5, [1, 2]), decoding("b", 5, [3, 4], adapter)]), [])
    first = kept.batch_of_next(4, {adapter: 0})
    assert first.adapter_slots == (-1, 0)
    assert kept.batch_of_next(4, {adapter: 0}) is first
    assert kept.batch_of_next(4, {adapter: 1}).adapter_slots == (-1, 1)
