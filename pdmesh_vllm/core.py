"""vLLM's EngineCore as an engine that pdmesh steps: requests go in, and every step returns a batch of new tokens.

One thread owns it, and drives `EngineCore.step()` itself. vLLM schedules, allocates, caches prefixes and computes; what a request
of pdmesh means (reservation, attempts, histories, draws, ends) is kept here. vLLM gets each choice as a greedy request whose
tokens the draw decides (sampling.py), with all end tokens, so both agree on its end.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING

from torch import Tensor
from vllm.v1.request import RequestStatus

from pdmesh.engine.errors import DuplicateRequest, EngineStopped, IntegrityError, InvalidRequest, InvalidState, UnknownRequest
from pdmesh.engine.interface import ReservedBlocks
from pdmesh.engine.kv_cache.events import KVEvents
from pdmesh.engine.outputs import EngineStats, FinishReason, KVReady, SequenceUpdate, StartClock, StepResult
from pdmesh.engine.request import EngineRequest
from pdmesh.engine.request_validation import Limits, check_request
from pdmesh.engine.sampling.sampler import NO_TOKEN, SampledToken, SampleRow
from pdmesh_vllm.link import Link
from pdmesh_vllm.prefix_cache import PrefixIndex
from pdmesh_vllm.requests import Choice, Group, Pending, State, answer, as_vllm, open_group, refuse, take_over
from pdmesh_vllm.stats import NO_WORK, Counters, started_of, stats_of, took_part, work_of

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.engine import EngineCoreOutput
    from vllm.v1.engine.core import EngineCore

RESERVE_WAIT_S = 1.0
"""How long a reserve() waits for a step in which vLLM looks for blocks: a step may be full of prompts."""

LoraOf = Callable[[EngineRequest], "LoRARequest | None"]
AdmitLora = Callable[[EngineRequest], None]
Sample = Callable[[Tensor, Sequence[SampleRow]], list[SampledToken]]


class VllmCore:
    """Own an EngineCore and the requests on it."""

    def __init__(
        self,
        core: EngineCore,
        link: Link,
        limits: Limits,
        *,
        sample: Sample,
        lora_of: LoraOf,
        admit_lora: AdmitLora,
        index: PrefixIndex,
        zero: Callable[[Sequence[int]], None],
    ) -> None:
        """`sample` draws from logits (pdmesh/engine/sampling/); `lora_of` returns a request's adapter as vLLM takes it;
        `admit_lora` raises UnknownAdapter for a new request whose adapter is not offered; `index` gets vLLM's KV events;
        `zero` clears blocks that may hold garbage."""
        self.core = core
        self.index = index
        self.exports = KVEvents(len(link.caches))
        self.counters = Counters()
        self._link = link
        self._limits = limits
        self._sample = sample
        self._lora_of = lora_of
        self._admit_lora = admit_lora
        self._zero = zero
        self._groups: dict[str, Group] = {}
        self._choices: dict[str, Choice] = {}  # by their names in vLLM
        self._serial = itertools.count(1)
        self._plan: dict[str, tuple[int, int]] = {}  # of the running step: name → tokens before it, tokens in it
        self._work = NO_WORK
        self._lost: list[Choice] = []  # prefill_only, preempted in the running step
        self._has_changed = False  # something may be scheduled that could not be before
        self._is_paused = False
        link.on_granted, link.on_plan, link.layer_done = self._granted, self._planned, self._layer_done
        link.on_asked = self._asked
        link.is_awaited = lambda: self.exports.is_announcing
        link.draws = self

    # Requests.

    def reserve(self, request: EngineRequest) -> Future[ReservedBlocks | None]:
        """Ask vLLM for the blocks of prompt and history; the answer comes with a step. None: no room, and nothing is held.

        Raises what ServingEngine.reserve raises.
        """
        if request.sampling.n > 1:
            raise InvalidRequest(f"sampling.n: {request.sampling.n} choices cannot be handed off to vLLM; have it computed here")
        self._admit_lora(request)
        return self._reserved(request)

    def _reserved(self, request: EngineRequest) -> Future[ReservedBlocks | None]:
        group = None if self._is_paused else self._opened(request, State.RESERVING)
        answer: Future[ReservedBlocks | None] = Future()
        if group is None:
            answer.set_result(None)
            return answer
        group.pending = Pending(answer, time.monotonic() + RESERVE_WAIT_S)
        self._submit(group, waits_for_kv=True)
        return answer

    def restate(self, request_id: str, request: EngineRequest) -> Future[ReservedBlocks | None]:
        """Reserve for the same request with more history. Raises UnknownRequest, InvalidState or InvalidRequest."""
        self._check_restated(request_id, request)
        self.release(request_id)
        return self._reserved(request)

    def reserve_local(self, request: EngineRequest) -> tuple[ReservedBlocks, int] | None:
        """Queue a request to be computed here, if there is room for its prompt now; return its time of entry as well."""
        num_tokens = len(request.prompt) + max(map(len, request.emitted), default=0)
        if self._num_blocks(num_tokens) > self.num_free_blocks - self._num_blocks_due():
            check_request(request, self._limits)
            return None
        now_ns = time.monotonic_ns()
        if not self.add(request, now_ns):
            return None
        return ReservedBlocks(request, (), 0, num_tokens), now_ns

    def start(self, request_id: str, first_tokens: Mapping[int, int]) -> None:
        """Decode: the KV has arrived. Raises UnknownRequest, InvalidState or InvalidRequest."""
        group = self._found(request_id, State.RESERVED)
        [choice] = group.choices
        token = first_tokens.get(choice.index)
        if token is None or not 0 <= token < self._limits.vocab_size:
            raise InvalidRequest(f"first_tokens: {dict(first_tokens)}; give one of the vocabulary for choice {choice.index}")
        group.state, group.clock = State.ACTIVE, StartClock(time.monotonic_ns(), remote=True)
        self._report(choice)
        if self._limits.finish_reason(group.request, [*choice.output, token]) is not None:
            self.release(request_id)
            return
        take_over(choice, self._scheduler.requests[choice.name], token)

    def run_local(self, request_id: str, request: EngineRequest) -> int:
        """Compute here what was to come from elsewhere; return the time of entry. Raises what ServingEngine.run_local raises."""
        self._check_restated(request_id, request)
        now_ns = time.monotonic_ns()
        self.release(request_id)
        self._added(request, now_ns)
        return now_ns

    def add(self, request: EngineRequest, now_ns: int | None = None) -> bool:
        """Queue a request to be computed here. False: all seats are taken. Raises what ServingEngine.add raises."""
        self._admit_lora(request)
        return self._added(request, now_ns or time.monotonic_ns())

    def _added(self, request: EngineRequest, now_ns: int) -> bool:
        if request.prefill_only and request.sampling.n > 1:
            raise InvalidRequest(f"sampling.n: vLLM hands off one choice, not {request.sampling.n}; have it computed on decode")
        group = self._opened(request, State.ACTIVE)
        if group is None:
            return False
        group.clock = StartClock(now_ns, remote=False)
        self._submit(group, waits_for_kv=False)
        return True

    def release(self, request_id: str) -> bool:
        """End a request in any state; its blocks are free after the next step. False: it is not here (any more)."""
        group = self._groups.pop(request_id, None)
        if group is None:
            return False
        if group.pending is not None:
            answer(group.pending.answer, None)
        for choice in group.choices:
            self._drop(choice, group)
        return True

    def set_paused(self, *, is_paused: bool) -> None:
        """Have no reservation wait for a step that does not come: those that wait, and later ones, find no room."""
        self._is_paused = is_paused
        for request_id in [name for name, group in self._groups.items() if is_paused and group.pending is not None]:
            self.release(request_id)

    def abandon(self, reason: str) -> None:
        """Fail the reservations that wait for blocks, once the thread has ended: no step will answer them."""
        for group in self._groups.values():
            if group.pending is not None:
                refuse(group.pending.answer, EngineStopped(reason))

    def uses(self, adapter: object) -> int:
        """Return how many requests have this adapter."""
        return sum(group.request.adapter == adapter for group in self._groups.values())

    @property
    def num_free_blocks(self) -> int:
        return int(self._scheduler.kv_cache_manager.block_pool.get_num_free_blocks())

    # Steps.

    def step(self) -> StepResult | None:
        """Run steps until one has results. None: nothing to do until another call changes that."""
        while self._has_work:
            result = self._one_step()
            if result is not None:
                return result
        return None

    @property
    def _has_work(self) -> bool:
        scheduler = self._scheduler
        if scheduler.running or scheduler.finished_req_ids or self._link.outcomes:
            return True
        return any(group.pending for group in self._groups.values()) or (self._has_changed and bool(self._groups))

    def _one_step(self) -> StepResult | None:
        self._has_changed = bool(self._link.outcomes)  # what they free may be scheduled in the step after
        self._plan, self._lost = {}, []
        started_ns = time.monotonic_ns()
        outputs, has_computed = self.core.step()
        self.core.post_step(has_computed)
        ended_ns = time.monotonic_ns()
        ready = self.exports.end()
        self._refuse_those_without_room()
        self._give_way()
        rows = [(self._choices[name], *counts) for name, counts in self._plan.items()]
        groups = took_part(rows, self.counters, started_ns, ended_ns)
        updates = [update for each in outputs.values() for output in each.outputs for update in self._taken(output)]
        updates += [self._gave_up(choice) for choice in self._lost]
        if not has_computed and not updates:
            return None
        self.counters.num_steps += 1
        return StepResult(
            step=self.counters.num_steps,
            started_ns=started_ns,
            ended_ns=ended_ns,
            num_tokens=sum(count for _, count in self._plan.values()),
            work=self._work,
            updates=tuple(updates),
            started=started_of(groups, updates),
            ready=ready,
            stats=self.stats(),
        )

    def draw(self, logits: Tensor, names: Sequence[str | None]) -> Sequence[int]:
        """Return a token for each row: drawn, or 0 where a prompt goes on (vLLM drops those)."""
        tokens, drawing = [0] * len(names), []
        for row, name in enumerate(names):
            choice = self._choices.get(name) if name is not None else None
            if choice is None or not self._ends_prompt(choice):
                continue
            drawing.append((row, choice))
        if drawing:
            picked = logits if len(drawing) == len(names) else logits[[row for row, _ in drawing]]
            sampled = self._sample(picked.contiguous(), [choice.sample_row(self._limits) for _, choice in drawing])
            for (row, choice), drawn in zip(drawing, sampled, strict=True):
                choice.logprobs, choice.is_not_finite = drawn.logprobs, drawn.token_id == NO_TOKEN
                tokens[row] = max(drawn.token_id, 0)
        return tokens

    def stats(self) -> EngineStats:
        """Return counts of now and since start."""
        return stats_of(self._scheduler, self._groups.values(), self.counters, len(self.index))

    def check_integrity(self) -> None:
        """Raise IntegrityError unless vLLM holds nothing of requests that are not here any more. Call it between steps."""
        strange = set(self._scheduler.requests) - set(self._choices) - self._link.outcomes.received - self._link.outcomes.sent
        if strange:
            raise IntegrityError(f"vLLM holds requests that have ended: {sorted(strange)[:5]}")

    # What vLLM asks and tells within a step.

    def _asked(self, name: str) -> None:
        choice = self._choices.get(name)
        if choice is not None and choice.group.pending is not None:
            choice.group.pending.was_asked = True

    def _granted(self, name: str, block_ids: Sequence[int], num_external: int) -> None:
        choice = self._choices[name]
        group, num_tokens = choice.group, choice.num_tokens
        choice.blocks = list(block_ids[: self._num_blocks(num_tokens)])
        choice.num_cached = num_tokens - num_external
        self.counters.num_prefix_hit_tokens += choice.num_cached
        pending, group.pending, group.state = group.pending, None, State.RESERVED
        granted = ReservedBlocks(group.request, tuple(choice.blocks), choice.num_cached, num_tokens)
        if pending is not None:
            answer(pending.answer, granted)

    def _planned(self, plan: SchedulerOutput) -> None:
        for new in plan.scheduled_new_reqs:
            self._enter(new.req_id, list(new.block_ids[0]), new.num_computed_tokens, plan)
        again = plan.scheduled_cached_reqs
        for name, blocks, num_computed in zip(again.req_ids, again.new_block_ids, again.num_computed_tokens, strict=True):
            choice = self._choices.get(name)
            if choice is None:
                continue
            more = blocks[0] if blocks is not None else []
            if name in again.resumed_req_ids:
                choice.blocks = list(more)
            else:
                choice.blocks.extend(more)
            self._enter(name, choice.blocks, num_computed, plan)
        self._work = work_of([(self._choices[name], *counts) for name, counts in self._plan.items()])
        for name in plan.preempted_req_ids or ():
            self._preempted(name)
        self.exports.begin_with(tuple(self._readiness(name) for name in self._plan if self._is_prefill_only(name)))

    def _enter(self, name: str, blocks: list[int], num_computed: int, plan: SchedulerOutput) -> None:
        choice = self._choices.get(name)
        if choice is None:
            return
        if not choice.has_run and not choice.is_reported:
            choice.num_cached = num_computed
            self.counters.num_prefix_hit_tokens += num_computed
        choice.blocks, choice.has_run = blocks, True
        self._plan[name] = (num_computed, plan.num_scheduled_tokens[name])

    def _preempted(self, name: str) -> None:
        choice = self._choices.get(name)
        if choice is not None:
            self.counters.num_preemptions += 1
            choice.blocks = []
            if choice.group.request.prefill_only:
                self._lost.append(choice)

    def _is_prefill_only(self, name: str) -> bool:
        return self._choices[name].group.request.prefill_only

    def _readiness(self, name: str) -> KVReady:
        choice, (num_computed, count) = self._choices[name], self._plan[name]
        return KVReady(choice.group.request.request_id, choice.blocks, num_computed, num_computed + count, 0)

    def _layer_done(self, index: int) -> None:
        if self.exports.is_announcing:
            self.exports.signal.layer_done(index)

    def _ends_prompt(self, choice: Choice) -> bool:
        num_computed, count = self._plan.get(choice.name, (0, 0))
        return count > 0 and num_computed + count >= choice.num_tokens

    # What a step's end changes.

    def _taken(self, output: EngineCoreOutput) -> Iterator[SequenceUpdate]:
        """Yield the update for a choice's new token, and close the choice if it has ended."""
        choice = self._choices.get(output.request_id)
        if choice is None:
            return
        if choice.is_not_finite or not output.new_token_ids:
            self._withdraw(choice)
            self._close(choice)
            yield self._update(choice, (), FinishReason.ERROR)
            return
        [token] = output.new_token_ids
        choice.output.append(token)
        self.counters.num_generated_tokens += 1
        reason = self._reason(choice)
        if choice.group.request.prefill_only:
            choice.group.state = State.HELD
        elif reason is not None or output.finish_reason is not None:
            reason = reason or FinishReason.LENGTH
            self._close(choice)
        yield self._update(choice, (token,), reason)

    def _reason(self, choice: Choice) -> FinishReason | None:
        """Return the finish reason after the output. STOP means that a constrained output is complete."""
        _ = choice.matcher  # takes the new token: the reason depends on whether the grammar is lost by it
        reason = self._limits.finish_reason(choice.group.request, choice.output)
        return FinishReason.LENGTH if reason is FinishReason.STOP and choice.has_lost_grammar else reason

    def _update(self, choice: Choice, tokens: tuple[int, ...], reason: FinishReason | None) -> SequenceUpdate:
        logprobs = (choice.logprobs,) if tokens and choice.logprobs is not None else ()
        index = len(choice.output) - len(tokens)
        return SequenceUpdate(choice.group.request.request_id, choice.index, index, tokens, logprobs, reason)

    def _gave_up(self, choice: Choice) -> SequenceUpdate:
        """End a prefill whose blocks vLLM has given to others: what was announced of it does not hold any more."""
        self.release(choice.group.request.request_id)
        return self._update(choice, (), FinishReason.PREEMPTED)

    def _withdraw(self, choice: Choice) -> None:
        """Let no other prompt find the blocks of a choice whose logits are not finite, and clear those that no other has."""
        pool = self._scheduler.kv_cache_manager.block_pool
        pool.evict_blocks(set(choice.blocks))
        num_own = int(choice.name in self._scheduler.requests)
        self._zero([block for block in choice.blocks if pool.blocks[block].ref_cnt <= num_own])

    def _close(self, choice: Choice) -> None:
        """Take an ended choice out of its group, and out of vLLM, if that still has it or its blocks."""
        group = choice.group
        self._drop(choice, group)
        group.choices.remove(choice)
        if not group.choices:
            self._groups.pop(group.request.request_id, None)

    def _refuse_those_without_room(self) -> None:
        now = time.monotonic()
        for group in list(self._groups.values()):
            pending = group.pending
            if pending is None:
                continue
            is_behind = not self._plan  # another waits for blocks before it, and nothing runs that could free some
            has_no_room = (pending.was_asked or is_behind) and not self._has_changed  # else blocks became free in this step
            pending.was_asked = False
            if has_no_room or now > pending.until or pending.answer.cancelled():
                self.release(group.request.request_id)

    def _give_way(self) -> None:
        """Begin one choice anew that waits for a block behind its KV, where nothing runs that could free one.

        vLLM preempts running requests alone. Several whose KV has filled the pool would wait for each other for ever.
        """
        scheduler = self._scheduler
        waiting = [each.request_id for each in scheduler.kv_holding_waiting if each.status == RequestStatus.WAITING]
        if scheduler.running or self._has_changed or not (names := [name for name in waiting if name in self._choices]):
            return
        choice = self._choices[names[-1]]
        self._drop(choice, choice.group)
        self.counters.num_preemptions += 1
        choice.name, choice.blocks = f"{choice.group.request.request_id}#{next(self._serial)}", []
        choice.num_in_prompt, choice.is_taken_over = len(choice.output), False
        self._enqueue(choice)

    # Requests in vLLM.

    def _opened(self, request: EngineRequest, state: State) -> Group | None:
        """Return a group for a valid new request; None: all seats are taken."""
        check_request(request, self._limits)
        if request.sampling.prompt_logprobs is not None:
            raise InvalidRequest("sampling.prompt_logprobs: workers with vLLM do not give those of prompts; leave it out")
        if request.request_id in self._groups:
            raise DuplicateRequest(f"request_id: {request.request_id!r} is in the engine already; release it first")
        names = [f"{request.request_id}#{next(self._serial)}" for _ in range(request.sampling.n)]
        group = open_group(request, state, names)
        num_taken = sum(other.num_seats for other in self._groups.values())
        return group if num_taken + group.num_seats <= self._limits.max_num_seqs else None

    def _submit(self, group: Group, *, waits_for_kv: bool) -> None:
        request = group.request
        self._groups[request.request_id] = group
        self._has_changed = True
        try:
            for choice in group.choices:
                if waits_for_kv:
                    self._link.waits_for_kv.add(choice.name)
                if request.prefill_only:
                    self._link.holds_blocks.add(choice.name)
                self._enqueue(choice)
        except BaseException:
            self.release(request.request_id)
            raise

    def _enqueue(self, choice: Choice) -> None:
        self._choices[choice.name] = choice
        asked = as_vllm(choice, self._limits, self._lora_of(choice.group.request))
        self.core.add_request(*self.core.preprocess_add_request(asked))

    def _report(self, choice: Choice) -> None:
        """Tell vLLM, once, that nothing writes into a reservation's blocks any more."""
        if choice.is_reported:
            return
        choice.is_reported = True
        self._link.waits_for_kv.discard(choice.name)
        self._link.outcomes.received.add(choice.name)

    def _drop(self, choice: Choice, group: Group) -> None:
        """End a choice in vLLM, whatever it does there. Blocks that were perhaps filled in part, or with garbage, are cleared:
        vLLM's kernels multiply what stands behind the tokens of a block's next owner by zero, which leaves NaN."""
        self._has_changed = True
        if group.state is State.RESERVED:
            self._zero(choice.blocks[choice.num_cached // self._limits.block_size :])
        self._link.holds_blocks.discard(choice.name)
        held = self._scheduler.requests.get(choice.name)
        if held is not None and held.is_finished():
            self._link.outcomes.sent.add(choice.name)
        elif held is not None:
            waits = held.status == RequestStatus.WAITING_FOR_REMOTE_KVS
            self.core.abort_requests([choice.name])
            if waits and choice.name in self._scheduler.requests:
                self._report(choice)
        self._forget(choice)

    def _forget(self, choice: Choice) -> None:
        self._choices.pop(choice.name, None)
        self._link.waits_for_kv.discard(choice.name)
        self._link.holds_blocks.discard(choice.name)

    def _found(self, request_id: str, state: State) -> Group:
        group = self._groups.get(request_id)
        if group is None:
            raise UnknownRequest(f"request {request_id!r} is not in the engine")
        if group.state is not state:
            raise InvalidState(f"request {request_id!r} is {group.state.value}, not {state.value}")
        return group

    def _check_restated(self, request_id: str, request: EngineRequest) -> None:
        """Raise unless `request` continues the tokens of a reservation."""
        group = self._found(request_id, State.RESERVED)
        check_request(request, self._limits)
        before, [choice] = group.request, group.choices
        if request.request_id != before.request_id or request.block_root != before.block_root:
            raise InvalidRequest("request_id, cache_root, adapter: not those of the reservation")
        history = request.emitted[choice.index] if request.emitted else ()
        if request.prompt != before.prompt or list(history[: len(choice.output)]) != choice.output:
            raise InvalidRequest("prompt, emitted: do not begin with the tokens that were reserved for")

    def _num_blocks_due(self) -> int:
        """Return how many blocks the prompts take that are queued and have none yet."""
        active = [group for group in self._groups.values() if group.state is State.ACTIVE]
        return sum(self._num_blocks(each.num_tokens) for group in active for each in group.choices if not each.blocks)

    def _num_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self._limits.block_size)

    @property
    def _scheduler(self) -> Scheduler:
        return self.core.scheduler
