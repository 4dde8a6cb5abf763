"""What a worker may rely on, whichever engine computes: refusals by state, counts, progress, adapters, constraints, ends."""

from __future__ import annotations

import asyncio
import math
import re
from dataclasses import astuple, replace
from pathlib import Path

import pytest

from pdmesh.adapter_id import AdapterId
from pdmesh.engine.errors import (
    AdapterRefused,
    DuplicateRequest,
    EngineStopped,
    InvalidRequest,
    InvalidState,
    RequestTooLarge,
    UnknownAdapter,
    UnknownRequest,
)
from pdmesh.engine.interface import ReservedBlocks
from pdmesh.engine.kv_cache.retention import Retention
from pdmesh.engine.outputs import FinishReason, KVReady
from pdmesh.text.block_hash import hash_prompt
from pdmesh.text.tokenizer import Tokenizer
from pdmesh.worker.engines.base import Lack
from pdmesh.worker.token_request import ModelGrammars
from tests.engine.test_model_transformers import reference
from tests.support.adapters import make_adapter
from tests.support.waiting import eventually
from tests.worker.engines import harness
from tests.worker.engines.engines import Kind
from tests.worker.engines.harness import GREEDY, SAMPLED, Followed, Opened, handed_over, prompt, request

LONG = replace(GREEDY, max_tokens=300)


# Before the first step


async def test_what_is_said_before_the_first_step(kind: Kind) -> None:
    async with kind.open() as it:
        engine, stats = it.engine, it.first
        assert stats.num_free_blocks == stats.num_total_blocks == engine.facts.num_blocks
        assert it.prior is not None and it.prior.num_steps == 0
        assert all(math.isfinite(price_s) and price_s >= 0 for price_s in astuple(it.prior)[:5]) and it.prior.fixed_s > 0
        assert engine.expert_counts() is None  # the model has none
        if engine.pacer is not None:
            engine.pacer.set_cost(it.prior)
            engine.pacer.set_cost(replace(it.prior, fixed_s=math.nan))
        assert len((await it.run(request("r"))).output) == 8


# Refusals


async def test_a_queued_request_is_refused_by_its_name(kind: Kind) -> None:
    async with kind.open() as it:
        facts, engine = it.engine.facts, it.engine
        with pytest.raises((RequestTooLarge, InvalidRequest)):
            await engine.add(request("long", facts.max_context + 1))
        with pytest.raises(InvalidRequest, match="prompt"):
            await engine.add(replace(request("odd"), prompt=(facts.vocab_size,)))
        for call in (engine.add, engine.reserve):
            with pytest.raises(UnknownAdapter):
                await call(replace(request("adapted"), adapter=AdapterId("missing", "0" * 64)))
        assert await engine.add(request("twice", 40, LONG))
        for wait in (engine.add(request("twice")), engine.reserve(request("twice")), engine.reserve_local(request("twice"))):
            with pytest.raises(DuplicateRequest):
                await wait
        assert await engine.release("twice") and not await engine.release("twice") and not await engine.release("never")


async def test_a_full_engine_says_so_and_keeps_nothing(kind: Kind) -> None:
    async with kind.open() as it:
        names: list[str] = []
        while await it.engine.add(request(f"r{len(names)}", 20, LONG, salt=len(names))):
            names.append(f"r{len(names)}")
            assert len(names) <= it.engine.facts.max_num_seqs
        assert names and not await it.engine.release(f"r{len(names)}")
        for name in names:
            await it.engine.release(name)


async def test_a_reservation_takes_what_was_reserved_for_and_only_once(kind: Kind) -> None:
    """What is refused leaves it as it was."""
    asked = request("r", 40, LONG)
    async with kind.open() as it:
        engine = it.engine
        for call in (engine.restate, engine.run_local):
            with pytest.raises(UnknownRequest):
                await call("gone", asked)
        assert await engine.reserve(asked) is not None
        other = replace(asked, prompt=prompt(40, salt=1))
        for call in (engine.restate, engine.run_local):
            with pytest.raises(InvalidRequest):
                await call("r", other)
        with pytest.raises(InvalidRequest):
            await engine.start("r", {1: 5})
        assert (await engine.stats()).num_reserved == 1
        followed = it.follow("r")
        await engine.run_local("r", asked)
        await eventually(lambda: followed.output, timeout_s=60)
        for call in (engine.restate, engine.run_local):
            with pytest.raises(InvalidState):
                await call("r", asked)
        with pytest.raises(InvalidState):
            await engine.start("r", {0: 5})
        assert not followed.finished and await engine.release("r")


async def test_a_cancelled_reserve_is_released_whatever_became_of_it(kind: Kind) -> None:
    async with kind.open() as it:
        for turns in range(4):
            reserving = asyncio.create_task(it.engine.reserve(request("r")))
            for _ in range(turns):
                await asyncio.sleep(0)
            reserving.cancel()
            await asyncio.gather(reserving, return_exceptions=True)
            await it.engine.release("r")
            await it.until_whole()
        assert len((await it.run(request("r"))).output) == 8


# Counts


async def test_what_was_computed_adds_up(kind: Kind) -> None:
    async with kind.open() as it:
        size = it.engine.facts.block_size
        await it.run(request("first", 2 * size + 8))
        await it.run(request("again", 2 * size + 8))
        stats = await it.engine.stats()
        before = it.first
        assert stats.num_generated_tokens - before.num_generated_tokens == 16
        assert stats.num_prefix_hit_tokens - before.num_prefix_hit_tokens == 2 * size
        assert stats.num_preemptions == before.num_preemptions
        assert stats.num_prefilled_tokens - before.num_prefilled_tokens == 2 * size + 8 + 8
        assert [step.step for step in it.steps] == list(range(before.num_steps + 1, stats.num_steps + 1))
        assert sum(step.work.prefill_tokens for step in it.steps) == 2 * size + 8 + 8
        assert sum(step.work.num_decoding for step in it.steps) == 16 - 2  # each first token comes of a prompt
        assert all(step.started_ns <= step.ended_ns for step in it.steps)
        assert all(one.ended_ns <= next_.ended_ns for one, next_ in zip(it.steps, it.steps[1:], strict=False))


async def test_the_time_in_the_engine_begins_when_it_took_the_request(kind: Kind) -> None:
    async with kind.open() as it:
        later = it.follow("later")
        assert await it.engine.reserve(request("later")) is not None
        later_ns = await it.engine.run_local("later", request("later"))
        once = it.follow("once")
        granted = await it.engine.reserve_local(request("once"))
        assert granted is not None and granted[0].num_tokens == 40
        for followed, opened_ns in ((later, later_ns), (once, granted[1])):
            await it.finished(followed)
            [started] = followed.started
            assert started.timing is not None and started.timing.opened_ns == opened_ns


async def test_a_goal_is_paced_or_the_lack_is_said(kind: Kind) -> None:
    async with kind.open() as it:
        followed = await it.run(replace(request("r"), tpot_goal_s=30.0))
        assert len(followed.output) == 8
        paces = {step.stats.pace_s for step in it.steps if step.stats is not None} - {0.0}
        assert bool(paces) == (Lack.PACES not in it.engine.facts.lacks)


# Choices and constraints


async def test_only_choices_that_go_on_are_continued(kind: Kind) -> None:
    sampling = replace(SAMPLED, n=2)
    async with kind.open() as it:
        whole = await it.run(request("whole", sampling=sampling))
        history = (tuple(whole.tokens[0][:3]), tuple(whole.tokens[1][:5]))
        followed = it.follow("rest")
        assert await it.engine.add(request("rest", sampling=sampling, emitted=history, finished=(True, False)))
        await it.finished(followed)
        assert set(followed.tokens) == set(followed.finished) == {1}
        assert [*history[1], *followed.tokens[1]] == whole.tokens[1] and followed.indexes[1] == [5, 6, 7]


async def test_choices_are_handed_over_or_the_lack_is_said(kind: Kind) -> None:
    asked = request("r", 50, replace(SAMPLED, n=2))
    async with kind.open_two() as (prefill, decode):
        if Lack.CHOICES_HANDOFF in prefill.engine.facts.lacks:
            with pytest.raises(InvalidRequest, match="n"):
                await prefill.engine.add(replace(asked, prefill_only=True))
            return
        alone = await prefill.run(replace(asked, request_id="alone", cache_root=b"alone" + harness.root))
        granted = await decode.engine.reserve(asked)
        assert granted is not None
        first, ready = await prefill.prefilled(replace(asked, cache_root=b"prefill" + harness.root))
        handed_over(prefill.engine, ready, decode.engine, granted)
        followed = decode.follow("r")
        await decode.engine.start("r", {choice: tokens[0] for choice, tokens in first.tokens.items()}, {0: b"no state at all"})
        await decode.finished(followed, 2)
        await prefill.engine.release("prefill r")
        for choice in (0, 1):
            assert first.tokens[choice] + followed.tokens[choice] == alone.tokens[choice]


async def test_a_constrained_output_is_a_sentence_and_goes_on_from_its_history(kind: Kind) -> None:
    async with kind.open() as it:
        grammar = ModelGrammars(it.engine.facts).compile("regex", "[ab]{3}c[0-9]{2}")
        sampling = replace(SAMPLED, max_tokens=20, ignore_eos=False)
        whole = await it.run(request("whole", sampling=sampling, grammar=grammar))
        text = Tokenizer.load(it.engine.facts.model).decode(whole.output)
        assert grammar.first_stray(whole.output) is None and re.fullmatch("[ab]{3}c[0-9]{2}", text)
        assert whole.finished == {0: FinishReason.STOP} and whole.output[-1] in it.engine.facts.eos_token_ids
        rest = await it.run(request("rest", sampling=sampling, grammar=grammar, emitted=(tuple(whole.output[:4]),)))
        assert rest.output == whole.output[4:]


async def test_logits_that_are_not_finite_end_one_request(kind: Kind) -> None:
    async with kind.open() as it:
        other = it.follow("other")
        assert await it.engine.add(request("other", 40, LONG, cache_root=b"other"))
        granted = await it.engine.reserve(request("r", 40))
        assert granted is not None
        _fill(it, granted.block_ids, b"\xff")  # not a number, in every kind of floats
        followed = it.follow("r")
        await it.engine.start("r", {0: 5})
        await it.finished(followed)
        assert (followed.finished, followed.output) == ({0: FinishReason.ERROR}, [])
        await it.finished(other)
        assert len(other.output) == 300


def _fill(it: Opened, blocks: tuple[int, ...], byte: bytes) -> None:
    memory = it.engine.memory
    for layer in range(memory.num_layers):
        for plane in range(memory.num_planes):
            for block in blocks:
                view = memory.block_view(layer, plane, block)
                view[:] = byte * len(view)


# Progress of prefill


async def test_what_is_ready_grows_layer_by_layer_and_is_final(kind: Kind) -> None:
    """Each layer's tokens only grow, up to all tokens of all layers; and what was ready is what is there at the end."""
    async with kind.open() as it:
        engine = it.engine
        engine.notify_every(1)
        seen: list[tuple[KVReady, bytes]] = []
        followed = it.follow("r")
        followed.on_ready = lambda ready: seen.append((ready, _first_block(it, ready)))  # type: ignore[method-assign]
        it.dispatcher.remove("r")
        it.dispatcher.add("r", followed, followed.on_ready)
        assert await engine.add(replace(request("r", 150), prefill_only=True))
        await eventually(lambda: followed.output and seen and seen[-1][0].num_tokens == 150, timeout_s=60)
        num_layers = engine.facts.num_layers
        covered = [[_covered(ready, layer) for ready, _ in seen] for layer in range(num_layers)]
        assert all(each == sorted(each) and each[-1] == 150 for each in covered)
        assert all(ready.block_ids == seen[-1][0].block_ids and ready.num_layers <= num_layers for ready, _ in seen)
        final = _first_block(it, seen[-1][0])
        assert all(block in (b"", final) for _, block in seen) and final
        assert await engine.release("r")


def _covered(ready: KVReady, layer: int) -> int:
    return max(ready.num_tokens, ready.num_step_tokens if layer < ready.num_layers else 0)


def _first_block(it: Opened, ready: KVReady) -> bytes:
    """The first layer's first block; nothing before it is ready."""
    if _covered(ready, 0) < it.engine.facts.block_size:
        return b""
    return bytes(it.engine.memory.block_view(0, 0, ready.block_ids[0]))


# Prefix cache


async def test_routers_learn_what_was_evicted(kind: Kind) -> None:
    async with kind.open() as it:
        facts, root = it.engine.facts, b"\1" * 32
        await it.run(request("r", 3 * facts.block_size + 1, cache_root=root))
        names = set(hash_prompt(root, prompt(3 * facts.block_size + 1), facts.block_size)[:3])
        await it.cache.take_changes()
        number, most = 0, min(facts.max_context, facts.num_blocks * facts.block_size) - 8
        while await it.engine.reserve(request(f"big{number}", most, salt=number + 1, cache_root=b"\2" * 32)) is not None:
            number += 1
        for each in range(number):
            await it.engine.release(f"big{each}")
        changes = await it.cache.take_changes()
        _, blocks = await it.cache.blocks()
        assert changes is not None and not set(changes.stored) & set(changes.evicted)
        gone = names & set(changes.evicted)
        assert gone and names - gone <= set(blocks) and not gone & set(blocks)


async def test_sessions_retain_blocks_or_the_lack_is_said(kind: Kind) -> None:
    async with kind.open() as it:
        asked = request("r", retention=Retention("t", "s", 600))
        followed = await it.run(asked)
        stats = await it.engine.stats()
        block_size = it.engine.facts.block_size
        num_full = (len(asked.prompt) + len(followed.output) - 1) // block_size
        expected = 0 if Lack.RETENTION in it.engine.facts.lacks else num_full
        assert stats.num_retained_blocks == expected
        assert await it.engine.release_retained("t", "other") == 0
        assert await it.engine.release_retained("t", "s") == expected
        assert (await it.engine.stats()).num_retained_blocks == 0


# Adapters


async def test_adapters_come_and_go_while_it_runs(kind: Kind, tmp_path: Path) -> None:
    folders = {name: make_adapter(tmp_path / name, reference(kind.folder), "all-linear", seed=n) for n, name in enumerate("ab")}
    async with kind.open_with_adapters() as it:
        engine = it.engine
        assert (engine.adapters.max_adapters, list(engine.adapters.at_start)) == (1, [])
        plain = await it.run(request("plain", 60))
        [(first, rank)] = await engine.adapters.load("a", folders["a"])
        assert (first.name, rank) == ("a", 8)
        with pytest.raises(AdapterRefused):
            await engine.adapters.load("b", folders["b"])
        adapted = await _adapted(it, "a1", first)
        assert adapted.output != plain.output and (await _adapted(it, "a2", first)).output == adapted.output
        assert (await it.run(request("plain again", 60))).output == plain.output  # KV of the one is not the other's
        running = it.follow("running")
        assert await engine.add(replace(request("running", 60, LONG), adapter=first))
        assert await engine.adapters.unload("a") == 1
        with pytest.raises(UnknownAdapter):
            await engine.reserve(replace(request("meanwhile"), adapter=first))
        await it.finished(running)
        assert running.output[:8] == adapted.output
        with pytest.raises(UnknownAdapter):
            await engine.add(replace(request("late"), adapter=first))
        [(second, _)] = await engine.adapters.load("b", folders["b"])
        assert (await _adapted(it, "b", second)).output not in (plain.output, adapted.output)
        with pytest.raises((ValueError, OSError)):
            await engine.adapters.load("c", tmp_path / "missing")


async def _adapted(it: Opened, name: str, adapter: AdapterId) -> Followed:
    return await it.run(replace(request(name, 60), adapter=adapter))


# The end


async def test_what_was_called_before_the_end_is_answered_and_ends_are_idempotent(kind: Kind) -> None:
    async with kind.open() as it:
        reserving = asyncio.create_task(it.engine.reserve(request("r")))
        await asyncio.sleep(0)
        releasing = asyncio.create_task(it.engine.release("r"))
        await asyncio.sleep(0)
        await it.engine.stop()
        answers = await asyncio.gather(reserving, releasing, return_exceptions=True)
        assert answers[0] is None or (isinstance(answers[0], (ReservedBlocks, EngineStopped)) and answers[1] is True)
        await it.engine.stop()
        for call in (it.engine.stats(), it.engine.release("r"), it.engine.start("r", {0: 1}), it.engine.add(request("r"))):
            with pytest.raises(EngineStopped):
                await call
