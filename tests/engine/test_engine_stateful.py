"""Any interleaving of calls on an engine with a tiny pool, between steps and inside of them, gives every request the oracle's
tokens and leaves the pool whole."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from unittest import mock

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from torch import Tensor

from pdmesh.engine import engine as engine_module
from pdmesh.engine.engine import Engine, EngineStep
from pdmesh.engine.errors import RequestTooLarge
from pdmesh.engine.interface import ReservedBlocks
from pdmesh.engine.kv_cache.claims import BlockClaims
from pdmesh.engine.kv_cache.retention import Retention
from pdmesh.engine.request import EngineRequest
from pdmesh.engine.runner.model_runner import SampledOutput
from pdmesh.engine.scheduler.scheduler import SchedulerOutput
from pdmesh.engine.scheduler.sequence import Sequence
from pdmesh.sampling_params import SamplingParams
from tests.support.ahead_model import AheadMock
from tests.support.guesser import Guesser
from tests.support.kept_input import KeptWatch
from tests.support.mock_engine import Answer, Collector, FreeRows, answer, hash_block, make_engine, run_to_end, write_kv

MAX_CONTEXT = 40
HISTORY = st.sampled_from([0, 0, 0, 2, 5])  # tokens emitted elsewhere before
BEGINNINGS = ((), (4, 5, 6, 7) * 3, (8, 4, 8, 5) * 3)  # few, so that prompts share prefixes, long after they were evicted as well


@dataclass
class Reserved:
    """A reservation of which `num_pushed` tokens' KV has arrived, if any."""

    request: EngineRequest
    granted: ReservedBlocks


SESSIONS = st.sampled_from(["x", "y"])


def retentions(tenant: str) -> st.SearchStrategy[Retention | None]:
    some = st.builds(Retention, st.just(tenant), SESSIONS, st.sampled_from([0, 5, 60]), st.sampled_from([False, False, True]))
    return st.one_of(st.none(), some)


@st.composite
def requests(draw: st.DrawFn) -> EngineRequest:
    n = draw(st.sampled_from([1, 1, 1, 2, 3]))
    max_tokens = draw(st.integers(1, 14))
    sampling = SamplingParams(
        temperature=draw(st.sampled_from([0.0, 1.0])),
        max_tokens=max_tokens,
        min_tokens=draw(st.integers(0, max_tokens)),
        seed=draw(st.integers(0, 3)),
        n=n,
        ignore_eos=draw(st.sampled_from([True, True, False])),
        stop_token_ids=draw(st.sampled_from([(), (), (9, 10)])),
    )
    beginning = draw(st.sampled_from(BEGINNINGS))[: draw(st.integers(0, 12))]
    rest = draw(st.lists(st.integers(4, 7), min_size=1, max_size=4))
    tenant = draw(st.sampled_from(["", "", "tenant"]))
    return EngineRequest("", (*beginning, *rest), sampling, cache_root=tenant.encode(), retention=draw(retentions(tenant)))


def stop_clocks(engine: Engine) -> None:
    """Let all drafts and all steps take the same time. It decides what is drafted, with that when requests end, and so which
    rules are possible: an example would run differently on a machine that is busy."""
    speculator = engine.speculator
    if speculator is not None:
        learn = speculator.learn
        speculator._clock_ns = lambda: 0

        def timeless(
            plan: SchedulerOutput,
            draws: Mapping[Sequence, list[SampledOutput]],
            started_ns: int,
            step_ns: int,
            num_prompt_tokens: int,
        ) -> None:
            learn(plan, draws, -1_000_000, 1_000_000, num_prompt_tokens)

        speculator.learn = timeless  # type: ignore[method-assign]


class EngineMachine(RuleBasedStateMachine):
    """Plays router, prefill worker and clients on one engine."""

    @initialize(
        num_blocks=st.integers(6, 12),
        block_size=st.sampled_from([2, 4]),
        budget=st.sampled_from([1, 3, 8, 64]),
        prefix_caching=st.sampled_from([True, True, False]),
        right=st.sampled_from([None, 0.0, 0.5, 0.5, 1.0]),
        branches=st.booleans(),
        ahead=st.booleans(),
        share=st.sampled_from([0.0, 0.25, 0.5]),
    )
    def open(
        self,
        num_blocks: int,
        block_size: int,
        budget: int,
        prefix_caching: bool,
        right: float | None,
        branches: bool,
        ahead: bool,
        share: float,
    ) -> None:
        self.now = 0.0
        self.most_retained = int(share * num_blocks) if prefix_caching else 0
        with mock.patch.object(engine_module, "measure_curve", return_value=FreeRows((1,), (1.0,))):  # a third of all time
            self.engine = make_engine(
                num_blocks=num_blocks,
                block_size=block_size,
                max_num_seqs=6,
                max_num_batched_tokens=budget,
                max_context=MAX_CONTEXT,
                prefix_caching=prefix_caching,
                proposers=[] if right is None else [Guesser(right, branches=branches)],
                draft_length=0 if branches else 4,
                model=AheadMock() if ahead else None,
                max_retained_share=share,
                clock=lambda: self.now,
            )
        stop_clocks(self.engine)
        KeptWatch(self.engine)
        self.collector = Collector()
        self.running: dict[str, EngineRequest] = {}  # whatever is to be answered, or was
        self.prefilling: dict[str, EngineRequest] = {}
        self.reserved: dict[str, Reserved] = {}
        self.expected: dict[str, Reserved] = {}  # blocks that another worker writes, for the prefix cache
        self.pinned: dict[str, tuple[tuple[int, ...], Tensor]] = {}  # blocks that another worker reads, and what is in them
        self.claiming: list[EngineRequest] = []  # that the engine does not have yet
        self.under_way: EngineStep | None = None
        self.is_computed = False  # the step under way
        self.to_release: list[str] = []  # behind it
        self.num_requests = 0

    def named(self, request: EngineRequest) -> EngineRequest:
        self.num_requests += 1
        return replace(request, request_id=f"r{self.num_requests}")

    def with_history(self, request: EngineRequest, num_tokens: int) -> EngineRequest:
        """As if the first tokens had been emitted elsewhere; choices that they end are finished. Unchanged if all would be."""
        emitted, finished = [], []
        for choice in range(request.sampling.n):
            got = self.answer(request, choice)
            tokens = got.token_ids[: num_tokens + choice % 2 if num_tokens else 0]
            emitted.append(tokens)
            finished.append(len(tokens) == len(got.token_ids))
        return request if all(finished) else replace(request, emitted=tuple(emitted), finished=tuple(finished))

    def answer(self, request: EngineRequest, choice: int, max_new: int | None = None) -> Answer:
        return answer(request, choice, max_context=MAX_CONTEXT, max_new=max_new)

    @rule(
        burst=st.lists(requests(), min_size=1, max_size=5),
        num_emitted=HISTORY,
        prefill_only=st.sampled_from([False, False, True]),
    )
    def add(self, burst: list[EngineRequest], num_emitted: int, prefill_only: bool) -> None:
        for request in burst:
            if not (prefill_only and request.sampling.n > 1):
                request = self.with_history(request, num_emitted)
            request = replace(self.named(request), prefill_only=prefill_only)
            with contextlib.suppress(RequestTooLarge):
                if self.engine.add(request):
                    (self.prefilling if prefill_only else self.running)[request.request_id] = request

    @rule(burst=st.lists(requests(), min_size=1, max_size=3), num_emitted=HISTORY)
    def reserve(self, burst: list[EngineRequest], num_emitted: int) -> None:
        for request in burst:
            request = self.named(request if request.sampling.n > 1 else self.with_history(request, num_emitted))
            with contextlib.suppress(RequestTooLarge):
                granted = self.engine.reserve(request)
                if granted is not None:
                    assert granted.num_cached_tokens < granted.num_tokens
                    self.reserved[request.request_id] = Reserved(request, granted)

    @precondition(lambda self: self.reserved)
    @rule(data=st.data(), share=st.floats(0, 1))
    def push_in_part(self, data: st.DataObject, share: float) -> None:
        each = self.reserved[data.draw(st.sampled_from(sorted(self.reserved)))]
        self.write(each, int(share * each.granted.num_tokens))

    @precondition(lambda self: self.reserved)
    @rule(data=st.data())
    def push_and_start(self, data: st.DataObject) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.reserved)))
        each = self.reserved.pop(request_id)
        self.write(each, each.granted.num_tokens)
        drawn = {choice: self.answer(each.request, choice, max_new=1) for choice in range(each.request.sampling.n)}
        first = {choice: got.token_ids[0] for choice, got in drawn.items()}
        finished = {choice for choice, got in drawn.items() if got.finish_reason is not None}
        named_finished = {choice for choice in finished if data.draw(st.booleans())}
        self.engine.start(request_id, {c: t for c, t in first.items() if c not in named_finished}, named_finished)
        history = each.request.emitted or ((),) * each.request.sampling.n
        emitted = tuple((*tokens, first[choice]) for choice, tokens in enumerate(history))
        flags = tuple(choice in finished for choice in range(each.request.sampling.n))
        self.running[request_id] = replace(each.request, emitted=emitted, finished=flags)

    def write(self, each: Reserved, end: int) -> None:
        history = each.request.emitted[0] if each.request.emitted and each.request.sampling.n == 1 else ()
        tokens = (*each.request.prompt, *history)
        assert len(tokens) == each.granted.num_tokens
        write_kv(self.engine, each.granted.block_ids, tokens[:end], each.granted.num_cached_tokens)

    @precondition(lambda self: self.reserved)
    @rule(data=st.data(), num_emitted=st.sampled_from([0, 1, 4]))
    def run_local(self, data: st.DataObject, num_emitted: int) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.reserved)))
        each = self.reserved.pop(request_id)
        num_known = len(each.request.emitted[0]) if each.request.emitted else 0
        request = self.with_history(replace(each.request, emitted=(), finished=()), max(num_known, num_emitted))
        if not request.emitted:  # that much history would have ended it
            request = each.request
        self.engine.run_local(request_id, request)
        self.running[request_id] = request

    @precondition(lambda self: self.reserved)
    @rule(data=st.data(), num_more=st.sampled_from([1, 3]))
    def restate(self, data: st.DataObject, num_more: int) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.reserved)))
        each = self.reserved[request_id]
        num_known = len(each.request.emitted[0]) if each.request.emitted else 0
        request = self.with_history(replace(each.request, emitted=(), finished=()), num_known + num_more)
        if request.sampling.n > 1 or not request.emitted:
            return
        granted = self.engine.restate(request_id, request)
        if granted is not None:
            assert granted.block_ids[: len(each.granted.block_ids)] == each.granted.block_ids
            self.reserved[request_id] = Reserved(request, granted)

    @rule(request=requests())
    def expect(self, request: EngineRequest) -> None:
        """The first blocks of a prompt are to come from another worker."""
        size = self.engine.config.block_size
        tokens = request.prompt[: len(request.prompt) // size * size]
        if not tokens:
            return
        wanted = self.named(EngineRequest("", tokens, SamplingParams(max_tokens=1), cache_root=request.cache_root))
        with contextlib.suppress(RequestTooLarge):
            expected = self.engine.sharing.expect(wanted)
            if expected is not None:
                granted = expected.reserved
                assert len(expected.hashes) == (granted.num_tokens - granted.num_cached_tokens) // size > 0
                self.expected[wanted.request_id] = Reserved(wanted, granted)

    @precondition(lambda self: self.expected)
    @rule(data=st.data(), share=st.floats(0, 1), is_rounded=st.booleans())
    def take_in(self, data: st.DataObject, share: float, is_rounded: bool) -> None:
        """Some of them have come, or none: then nothing is published."""
        request_id = data.draw(st.sampled_from(sorted(self.expected)))
        each, size = self.expected.pop(request_id), self.engine.config.block_size
        come = int(share * each.granted.num_tokens) // size * size
        if come > each.granted.num_cached_tokens:
            self.write(each, come)
            self.engine.sharing.take_in(request_id, come, is_rounded=is_rounded)
        assert self.engine.release(request_id)

    @rule(request=requests())
    def claim(self, request: EngineRequest) -> None:
        """Blocks come for a request before the engine has it; it may never get it."""
        request = self.named(request)
        self.engine.sharing.claim(request)
        assert request.request_id in self.claims
        self.claiming.append(request)

    @precondition(lambda self: self.claiming)
    @rule(data=st.data(), how=st.sampled_from(["add", "reserve", "release"]))
    def end_claim(self, data: st.DataObject, how: str) -> None:
        request = self.claiming.pop(data.draw(st.integers(0, len(self.claiming) - 1)))
        try:
            if how == "add" and self.engine.add(request):
                self.running[request.request_id] = request
                return  # it ends when that is admitted
            granted = self.engine.reserve(request) if how == "reserve" else None
        except RequestTooLarge:
            granted = None
        if granted is not None:
            self.reserved[request.request_id] = Reserved(request, granted)
        else:
            self.engine.release(request.request_id)
        assert request.request_id not in self.claims

    @property
    def claims(self) -> BlockClaims:
        return self.engine._pool.claims

    @rule(request=requests())
    def pin(self, request: EngineRequest) -> None:
        """Another worker reads the first blocks of a prompt, as far as they are here."""
        size, hashes, parent = self.engine.config.block_size, list[bytes](), request.cache_root
        for start in range(0, len(request.prompt) // size * size, size):
            hashes.append(parent := hash_block(parent, request.prompt[start : start + size]))
        pin_id = f"pin {self.num_requests}"
        self.num_requests += 1
        block_ids = self.engine.sharing.pin(pin_id, hashes)
        assert all(map(self.engine._allocator.pool.is_exact, hashes[: len(block_ids)]))
        self.pinned[pin_id] = block_ids, self.content(block_ids)

    @precondition(lambda self: self.pinned)
    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        self.check_pinned(data.draw(st.sampled_from(sorted(self.pinned))))

    def check_pinned(self, pin_id: str) -> None:
        """What was read is what was there when it was pinned."""
        block_ids, content = self.pinned.pop(pin_id)
        assert self.content(block_ids).equal(content)
        self.engine.sharing.unpin(pin_id)
        self.engine.sharing.unpin(pin_id)

    def content(self, block_ids: tuple[int, ...]) -> Tensor:
        return self.engine.kv.tensor[:, :, list(block_ids)].clone()

    @precondition(lambda self: self.running or self.prefilling or self.reserved)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        request_id = data.draw(st.sampled_from(sorted({**self.running, **self.prefilling, **self.reserved})))
        if self.engine.try_release(request_id) is None:
            assert self.under_way is not None and request_id not in self.reserved
            self.to_release.append(request_id)
        else:
            assert not self.engine.try_release(request_id)
        for table in (self.running, self.prefilling, self.reserved):
            table.pop(request_id, None)

    @precondition(lambda self: self.under_way is None)
    @rule(is_computed=st.booleans())
    def begin_step(self, is_computed: bool) -> None:
        """Other rules come before the kernels of the step, or after them."""
        self.under_way, self.is_computed = self.engine.schedule_step(), False
        if is_computed:
            self.compute()

    @precondition(lambda self: self.under_way is not None and not self.is_computed)
    @rule()
    def compute(self) -> None:
        if self.under_way is not None:
            self.engine.run_step(self.under_way)
            self.is_computed = True

    @precondition(lambda self: self.under_way is not None)
    @rule()
    def end_step(self) -> None:
        step, self.under_way = self.under_way, None
        if step is None:
            return
        if not self.is_computed:
            self.engine.run_step(step)
        self.collector.take(self.engine.postprocess_step(step))
        for request_id in self.to_release:
            self.engine.release(request_id)
        self.to_release.clear()

    @rule(num_steps=st.integers(1, 15))
    def step(self, num_steps: int) -> None:
        self.end_step()
        for _ in range(num_steps):
            result = self.engine.step()
            self.collector.take(result)
            if result is None:
                stats = self.engine.stats()
                stuck = self.engine.has_work and not (stats.num_reserved or stats.num_held or self.pinned)
                assert not stuck, f"it has work and all the room there is: {stats}"

    @rule(tenant=st.sampled_from(["", "tenant"]), session=SESSIONS)
    def release_retained(self, tenant: str, session: str) -> None:
        assert 0 <= self.engine.release_retained(tenant, session) <= self.most_retained
        assert not self.engine.release_retained(tenant, session)

    @rule(seconds=st.sampled_from([1.0, 5.0, 60.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @invariant()
    def is_whole(self) -> None:
        if hasattr(self, "engine"):
            self.engine.check_integrity()
            stats = self.engine.stats()
            assert stats.num_retained_blocks <= min(2 * self.most_retained, stats.num_cached_blocks)
            assert stats.num_running + stats.num_waiting + stats.num_reserved <= 6

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        self.end_step()
        for request_id in (*self.reserved, *self.expected):
            assert self.engine.release(request_id)
        for pin_id in list(self.pinned):
            self.check_pinned(pin_id)
        self.finish()
        for request in self.claiming:
            self.engine.release(request.request_id)
        assert not len(self.claims) and not self.claims.hashes
        stats = self.engine.stats()
        assert stats.num_free_blocks == stats.num_total_blocks
        self.now += 60
        assert self.engine.stats().num_retained_blocks == 0
        assert (stats.num_running, stats.num_waiting, stats.num_reserved, stats.num_held) == (0, 0, 0, 0)
        self.engine.kv.close()

    def finish(self) -> None:
        """Runs everything to its end; held requests are checked and released as a prefill service would, which makes room."""
        while self.prefilling or self.engine.has_work:
            run_to_end(self.engine, self.collector)
            for request_id in [r for r in self.prefilling if (r, 0) in self.collector.choices or self.is_held(r)]:
                self.check(self.prefilling.pop(request_id), max_new=1)
                assert self.engine.release(request_id)
        for request in self.running.values():
            self.check(request)

    def is_held(self, request_id: str) -> bool:
        return any((request_id, choice) in self.collector.choices for choice in range(3))

    def check(self, request: EngineRequest, max_new: int | None = None) -> None:
        for choice in range(request.sampling.n):
            expected = self.answer(request, choice, max_new)
            if request.finished and request.finished[choice]:
                expected = Answer((), None)
            assert self.collector.answer(request.request_id, choice) == expected, (request, choice)


EngineMachine.TestCase.settings = settings(max_examples=50, stateful_step_count=40, deadline=None)
TestEngine = EngineMachine.TestCase
