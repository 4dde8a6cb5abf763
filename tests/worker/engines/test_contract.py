"""What a worker may rely on, whichever engine computes. Every test runs on each engine that is installed here."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvtransfer.manifest import check_memory
from pdmesh.engine.errors import AdapterRefused, DuplicateRequest, EngineStopped, InvalidRequest, RequestTooLarge, UnknownRequest
from pdmesh.engine.outputs import FinishReason
from pdmesh.text.block_hash import hash_prompt
from pdmesh.v1 import worker_pb2
from pdmesh.worker.description import identity_of, layout_of
from pdmesh.worker.engines.base import Lack, WorkerEngine
from pdmesh.worker.engines.builtin import BuiltinEngine
from router.routing.filters import compatible
from router.routing.worker_reports import describe, snapshot_of
from router.routing.worker_snapshot import WorkerSnapshot
from tests.support.worker_mesh import load_tiny
from tests.worker.engines import harness
from tests.worker.engines.engines import Kind
from tests.worker.engines.harness import GREEDY, SAMPLED, handed_over, prompt, request

# Facts


async def test_the_pool_is_what_identity_and_layout_promise(kind: Kind) -> None:
    async with kind.open() as it:
        facts, memory = it.engine.facts, it.engine.memory
        check_memory(memory, identity_of(facts, "m"), layout_of(facts))
        assert memory.num_blocks >= facts.num_blocks == (await it.engine.stats()).num_total_blocks
        assert facts.max_context <= facts.num_blocks * facts.block_size
        limits = it.engine.limits()
        assert limits is not None and limits.bytes_per_s > 0


async def test_workers_pair_where_their_engines_are_of_one_kind(kind: Kind) -> None:
    """As a router sees them, beside our own engine with the same weights."""
    ours = BuiltinEngine(load_tiny(kind.folder).engine())
    async with kind.open_two() as (same, other):
        views = [_seen(each, name) for name, each in (("same", same.engine), ("other", other.engine), ("ours", ours))]
    assert compatible(views[0], views[1]) and compatible(views[1], views[0])
    is_ours = same.engine.facts.name == ours.facts.name
    assert compatible(views[0], views[2]) is is_ours and compatible(views[2], views[0]) is is_ours
    assert (views[0].kind == views[2].kind) is is_ours  # a request that has begun on the one never goes on at the other
    ours.close()


def _seen(engine: WorkerEngine, name: str) -> WorkerSnapshot:
    """A router's view of a worker around this engine."""
    facts = engine.facts
    registered = worker_pb2.WorkerInfo(
        worker_id=name,
        address=name,
        epoch=1,
        identity=identity_of(facts, "m"),
        layout=layout_of(facts),
        transports=["tcp"],
        engine=facts.name,
        lacks=sorted(lack.value for lack in facts.lacks),
    )
    view = snapshot_of(describe(registered), worker_pb2.LoadReport(), decode=True)
    assert view.engine == facts.name and view.is_reproducible is (Lack.REPRODUCIBLE not in facts.lacks)
    return view


# Computing here


async def test_tokens_come_once_in_order_and_end(kind: Kind) -> None:
    async with kind.open() as it:
        nine = replace(GREEDY, max_tokens=9)
        followed = await it.run(request("r", sampling=nine))
        assert followed.indexes[0] == list(range(9)) and followed.finished == {0: FinishReason.LENGTH}
        assert (await it.run(request("again", sampling=nine))).output == followed.output
        assert (await it.run(request("reserved", sampling=nine), by="reserve_local")).output == followed.output


async def test_the_parts_of_the_time_to_the_first_token_add_up(kind: Kind) -> None:
    async with kind.open() as it:
        followed = await it.run(request("r", 100))
        [started] = followed.started
        assert started.timing is not None
        step = next(step for step in it.steps if any(each.request_id == "r" for each in step.started))
        assert started.timing.opened_ns + started.timing.queue_ns + started.timing.compute_ns == step.ended_ns
        assert started.timing.num_cached_tokens == 0 and started.timing.num_computed_tokens == 100


async def test_a_stop_token_is_the_last_and_not_before_min_tokens(kind: Kind) -> None:
    async with kind.open() as it:
        free = await it.run(request("free", sampling=replace(SAMPLED, max_tokens=12)))
        third = free.output[2]
        first = free.output.index(third)
        stopped = await it.run(request("stop", sampling=replace(SAMPLED, max_tokens=12, stop_token_ids=(third,))))
        assert (stopped.output, stopped.finished) == (free.output[: first + 1], {0: FinishReason.STOP})
        late = replace(SAMPLED, max_tokens=12, stop_token_ids=(third,), min_tokens=first + 2)
        longer = await it.run(request("late", sampling=late))
        assert third not in longer.output[: first + 2] and longer.output[:first] == free.output[:first]


async def test_log_probabilities_are_of_the_raw_logits(kind: Kind) -> None:
    async with kind.open() as it:
        followed = await it.run(request("r", sampling=replace(SAMPLED, logprobs=3)))
        assert len(followed.logprobs[0]) == len(followed.output)
        for token, logprobs in zip(followed.output, followed.logprobs[0], strict=True):
            assert logprobs.chosen[0] == token and logprobs.chosen[1] <= 0 and len(logprobs.top) == 3
            assert [value for _, value in logprobs.top] == sorted((value for _, value in logprobs.top), reverse=True)
        assert (await it.run(request("plain", sampling=SAMPLED))).output == followed.output


async def test_choices_of_one_request_differ_and_are_those_of_any_engine(kind: Kind) -> None:
    async with kind.open() as it:
        both = await it.run(request("two", sampling=replace(SAMPLED, n=2)))
        assert set(both.tokens) == {0, 1} and both.tokens[0] != both.tokens[1]
        assert (await it.run(request("one", sampling=SAMPLED))).output == both.tokens[0]


async def test_a_request_goes_on_from_its_history(kind: Kind) -> None:
    """Moved to another worker after any token, with penalties and seeds: the same tokens, at the same indexes."""
    sampling = replace(SAMPLED, presence_penalty=0.4, frequency_penalty=0.3, repetition_penalty=1.1, max_tokens=10)
    async with kind.open() as it:
        whole = await it.run(request("whole", sampling=sampling))
        for cut in (1, 4, 9):
            rest = await it.run(request(f"cut {cut}", sampling=sampling, emitted=(tuple(whole.output[:cut]),)))
            assert whole.output[:cut] + rest.output == whole.output
            assert rest.indexes[0] == list(range(cut, 10))


# Reservations


async def test_a_reservation_holds_the_blocks_of_the_prompt_and_gives_them_back(kind: Kind) -> None:
    async with kind.open() as it:
        size = it.engine.facts.block_size
        granted = await it.engine.reserve(request("r", 2 * size + 3))
        assert granted is not None
        assert len(granted.block_ids) >= 3 and len(set(granted.block_ids)) == len(granted.block_ids)
        assert (granted.num_tokens, granted.num_cached_tokens) == (2 * size + 3, 0)
        stats = await it.engine.stats()
        assert stats.num_reserved == 1 and stats.num_free_blocks == stats.num_total_blocks - len(granted.block_ids)
        assert await it.engine.release("r") and not await it.engine.release("r")


async def test_no_room_is_said_at_once_and_nothing_is_held(kind: Kind) -> None:
    async with kind.open() as it:
        facts = it.engine.facts
        half = facts.num_blocks * facts.block_size // 2 + facts.block_size
        half = min(half, facts.max_context - 8)
        names: list[str] = []
        while (await it.engine.reserve(request(f"r{len(names)}", half, salt=len(names)))) is not None:
            names.append(f"r{len(names)}")
        assert names
        assert (await it.engine.stats()).num_reserved == len(names)
        for name in names:
            assert await it.engine.release(name)


async def test_what_never_fits_or_is_wrong_is_refused_by_its_name(kind: Kind) -> None:
    async with kind.open() as it:
        facts = it.engine.facts
        with pytest.raises((RequestTooLarge, InvalidRequest)):
            await it.engine.reserve(request("long", facts.max_context + 1))
        with pytest.raises(InvalidRequest, match="prompt"):
            await it.engine.reserve(replace(request("odd"), prompt=(1, facts.vocab_size)))
        assert await it.engine.reserve(request("twice")) is not None
        with pytest.raises(DuplicateRequest):
            await it.engine.reserve(request("twice"))
        await it.engine.release("twice")
        with pytest.raises(UnknownRequest):
            await it.engine.start("gone", {0: 1})


async def test_a_reservation_can_be_computed_here_after_all(kind: Kind) -> None:
    async with kind.open() as it:
        alone = await it.run(request("alone"))
        asked = request("r")
        followed = it.follow("r")
        assert await it.engine.reserve(asked) is not None
        await it.engine.run_local("r", asked)
        await it.finished(followed)
        assert followed.output == alone.output


# Hand-off


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("num_tokens", [37, 64, 200])
async def test_prefilled_there_and_decoded_here_are_the_tokens_of_one_engine(
    kind: Kind, sampling: object, num_tokens: int
) -> None:
    asked = request("r", num_tokens, sampling)  # type: ignore[arg-type]
    async with kind.open_two() as (prefill, decode):
        alone = await prefill.run(replace(asked, request_id="alone", cache_root=b"alone" + harness.root))
        granted = await decode.engine.reserve(asked)
        assert granted is not None
        first, ready = await prefill.prefilled(replace(asked, cache_root=b"prefill" + harness.root))
        assert first.output == alone.output[:1]
        assert ready.num_layers == prefill.engine.facts.num_layers
        handed_over(prefill.engine, ready, decode.engine, granted)
        followed = decode.follow("r")
        await decode.engine.start("r", {0: first.output[0]})
        assert (await prefill.engine.stats()).num_held == 1
        assert await prefill.engine.release("prefill r")
        await decode.finished(followed)
        assert first.output + followed.output == alone.output
        assert followed.indexes[0] == list(range(1, len(alone.output)))
        [started] = followed.started
        assert started.timing is None and started.decode_queue_ns >= 0


async def test_the_pushed_prefix_is_found_and_pinned(kind: Kind) -> None:
    async with kind.open_two() as (prefill, decode):
        size = decode.engine.facts.block_size
        asked = request("r", 4 * size + 5)
        granted = await decode.engine.reserve(asked)
        assert granted is not None
        first, ready = await prefill.prefilled(replace(asked, cache_root=b"prefill" + harness.root))
        handed_over(prefill.engine, ready, decode.engine, granted)
        followed = decode.follow("r")
        await decode.engine.start("r", {0: first.output[0]})
        await decode.finished(followed)
        await prefill.engine.release("prefill r")
        second = await decode.engine.reserve(replace(asked, request_id="second", prompt=(*asked.prompt, 5, 6, 7)))
        assert second is not None and second.num_cached_tokens == 4 * size
        assert second.block_ids[:4] == granted.block_ids[:4]
        await decode.engine.release("second")


async def test_a_failed_attempt_is_filled_again_with_more_history(kind: Kind) -> None:
    asked = request("r", 50)
    async with kind.open_two() as (prefill, decode):
        alone = await prefill.run(replace(asked, request_id="alone", cache_root=b"alone" + harness.root))
        assert await decode.engine.reserve(asked) is not None
        later = replace(asked, emitted=(tuple(alone.output[:1]),))
        granted = await decode.engine.restate("r", later)
        assert granted is not None and granted.num_tokens == 51
        first, ready = await prefill.prefilled(replace(later, cache_root=b"prefill" + harness.root))
        handed_over(prefill.engine, ready, decode.engine, granted)
        followed = decode.follow("r")
        await decode.engine.start("r", {0: first.output[0]})
        await decode.finished(followed)
        await prefill.engine.release("prefill r")
        assert alone.output[:1] + first.output + followed.output == alone.output


async def test_a_failed_attempt_is_computed_here_with_more_history(kind: Kind) -> None:
    asked = request("r", 50)
    async with kind.open() as it:
        alone = await it.run(replace(asked, request_id="alone", cache_root=b"alone" + harness.root))
        assert await it.engine.reserve(asked) is not None
        followed = it.follow("r")
        await it.engine.run_local("r", replace(asked, emitted=(tuple(alone.output[:2]),)))
        await it.finished(followed)
        assert alone.output[:2] + followed.output == alone.output


@pytest.mark.parametrize("state", ["queued", "reserved", "started", "local", "held"])
async def test_a_release_in_any_state_frees_everything(kind: Kind, state: str) -> None:
    asked = request("r", 150, replace(GREEDY, max_tokens=100))
    async with kind.open() as it:
        if state == "held":
            await it.prefilled(asked)
        elif state == "queued":
            assert await it.engine.add(asked)
        else:
            granted = await it.engine.reserve(asked)
            assert granted is not None
            if state == "started":
                await it.engine.start("r", {0: 5})
            elif state == "local":
                await it.engine.run_local("r", asked)
        assert await it.engine.release("prefill r" if state == "held" else "r")
        await it.until_whole()
        assert len((await it.run(request("after"))).output) == 8


async def test_corrupt_kv_of_an_attempt_that_failed_never_reaches_the_prefix_cache(kind: Kind) -> None:
    async with kind.open() as it:
        alone = await it.run(request("alone", 100, cache_root=b"elsewhere"))
        granted = await it.engine.reserve(request("r", 100))
        assert granted is not None
        for block in granted.block_ids:
            it.engine.memory.block_view(0, 0, block)[:] = b"\x7f" * len(it.engine.memory.block_view(0, 0, block))
        await it.engine.release("r")
        assert (await it.run(request("after", 100))).output == alone.output


# Prefix cache


async def test_routers_learn_the_names_of_cached_blocks(kind: Kind) -> None:
    async with kind.open() as it:
        size = it.engine.facts.block_size
        root = b"\1" * 32
        await it.run(request("r", 3 * size + 1, cache_root=root))
        names = hash_prompt(root, prompt(3 * size + 1), size)[:3]
        assert it.cache.has_changes
        changes = await it.cache.take_changes()
        assert changes is not None and set(names) <= set(changes.stored)
        sequence, blocks = await it.cache.blocks()
        assert sequence == changes.sequence and set(names) <= set(blocks)


async def test_tenants_share_no_prefix(kind: Kind) -> None:
    async with kind.open() as it:
        size = it.engine.facts.block_size
        await it.run(request("r", 4 * size, cache_root=b"a" * 32))
        other = await it.engine.reserve(request("other", 4 * size, cache_root=b"b" * 32))
        same = await it.engine.reserve(request("same", 4 * size, cache_root=b"a" * 32))
        assert other is not None and same is not None
        assert (other.num_cached_tokens, same.num_cached_tokens) == (0, 3 * size)
        await it.engine.release("other")
        await it.engine.release("same")


# Ends


async def test_what_an_engine_cannot_do_it_says(kind: Kind) -> None:
    async with kind.open() as it:
        engine = it.engine
        assert engine.facts.lacks <= set(Lack)
        if not engine.adapters.max_adapters:
            with pytest.raises((AdapterRefused, ValueError, OSError)):
                await engine.adapters.load("x", kind.folder)
        assert (engine.pacer is None) == (Lack.PACES in engine.facts.lacks)
        assert await it.is_whole()


async def test_calls_after_the_end_say_so(kind: Kind) -> None:
    async with kind.open() as it:
        pass
    with pytest.raises(EngineStopped):
        await it.engine.reserve(request("late"))
