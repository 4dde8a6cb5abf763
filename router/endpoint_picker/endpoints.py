"""The endpoints of a pool: what each last said of its load, what was sent there since, and snapshots that the policy compares.
Pure; the time is passed in.

    found ──► read_metrics ──► ready ──┬─► sent ──► answered ──► ended      each makes a new snapshot
                                       └─► failed max_failures times: gets nothing until its metrics come again

An endpoint whose metrics have not been read yet is not ready, nor is one that answers 503: it stops, or has no model yet. One
that has none (404) is: it is known by its requests alone.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from itertools import islice

from kvtransfer.layout import Layout, Transports
from router.endpoint_picker.prompts import Prompt
from router.endpoint_picker.server_metrics import ServerLoad, ServerSpeed
from router.kv_index.block_map import BlockMap
from router.routing.fleet_snapshot import FleetSnapshot
from router.routing.worker_snapshot import WorkerKey, WorkerSnapshot

POOL_MODEL = ""
"""All endpoints of a pool serve the same models, so the policy sees one; an adapter's blocks have other names."""
UNKNOWN_BLOCKS = 1 << 24
TYPICAL_PROMPT = 512
_IDENTITY: tuple[object, ...] = ("pool",)
_LAYOUT, _TRANSPORTS = Layout(16, "unknown"), Transports.of({})
_LEARN = 0.1


@dataclass(eq=False)
class SentRequest:
    """Hold a request that is at an endpoint. `computed_tokens`: of its prompt, estimated; `at`: when it was sent."""

    key: WorkerKey
    prompt: Prompt
    computed_tokens: int
    at: float
    is_answered: bool = False


@dataclass(eq=False)
class Endpoint:
    """Hold one model server. `read_at`: when its latest reading began, 0: none; `is_ready`: it may get requests."""

    address: str
    epoch: int
    load: ServerLoad = field(default_factory=ServerLoad)
    read_at: float = 0.0
    is_ready: bool = False
    num_failures: int = 0
    speed: ServerSpeed = field(default_factory=ServerSpeed)
    sent: set[SentRequest] = field(default_factory=set)
    ended: list[SentRequest] = field(default_factory=list)  # those that the reading still contains
    mean_prompt: float = float(TYPICAL_PROMPT)

    @property
    def key(self) -> WorkerKey:
        """Return the key of this incarnation."""
        return (self.address, self.epoch)


class Endpoints:
    """Hold the endpoints of one pool, their snapshots and the blocks of prompts that were sent to them."""

    def __init__(self, *, max_num_seqs: int, max_failures: int, index_blocks: int, tokens_per_block: int) -> None:
        self.fleet = FleetSnapshot()
        self.blocks = BlockMap(index_blocks)
        self._max_num_seqs, self._max_failures, self._tokens_per_block = max_num_seqs, max_failures, max(1, tokens_per_block)
        self._by_address: dict[str, Endpoint] = {}
        self._num_found = 0

    def __len__(self) -> int:
        return len(self._by_address)

    @property
    def num_ready(self) -> int:
        """Return the number of endpoints that may get requests."""
        return len(self.fleet)

    def all(self) -> Iterable[Endpoint]:
        """Return the endpoints."""
        return self._by_address.values()

    def get(self, address: str) -> Endpoint | None:
        """Return the endpoint at an address."""
        return self._by_address.get(address)

    def found(self, addresses: Collection[str]) -> None:
        """Take these as the pool's endpoints: new ones are not ready, and those that are missing are forgotten."""
        for address in set(self._by_address) - set(addresses):
            self.blocks.forget(self._by_address.pop(address).key)
            self.fleet.put(address, None)
        for address in addresses:
            if address not in self._by_address:
                self._num_found += 1
                self._by_address[address] = Endpoint(address, self._num_found)

    def read(self, address: str, load: ServerLoad | None, began: float, now: float) -> None:
        """Note a reading that began at `began`; a load of None: the server is there and says nothing of its load."""
        endpoint = self._by_address.get(address)
        if endpoint is None:
            return
        endpoint.is_ready, endpoint.num_failures = True, 0
        if load is not None:
            endpoint.load, endpoint.read_at = load, began
            endpoint.ended = [each for each in endpoint.ended if each.at > began]
            endpoint.speed.observe(load, now)
        else:
            endpoint.load, endpoint.read_at, endpoint.ended = ServerLoad(), 0.0, []
        self._renew(endpoint)

    def failed(self, address: str) -> bool:
        """Note that an endpoint did not answer; return True if it gets no requests because of that, from now on."""
        endpoint = self._by_address.get(address)
        if endpoint is None:
            return False
        endpoint.num_failures += 1
        if not endpoint.is_ready:
            return endpoint.num_failures == self._max_failures and not endpoint.read_at
        if endpoint.num_failures < self._max_failures:
            return False
        endpoint.is_ready = False
        self.blocks.forget(endpoint.key)  # it may have started anew
        self._renew(endpoint)
        return True

    def left(self, address: str) -> None:
        """Note that an endpoint wants no more requests: it is about to stop, or has no model yet."""
        endpoint = self._by_address.get(address)
        if endpoint is not None:
            endpoint.is_ready = False
            self._renew(endpoint)

    def others(self, addresses: Collection[str]) -> frozenset[WorkerKey]:
        """Return the keys of all endpoints but those at `addresses`."""
        return frozenset(endpoint.key for address, endpoint in self._by_address.items() if address not in addresses)

    def cached_tokens(self, prompt: Prompt) -> dict[WorkerKey, int]:
        """Return how many tokens of a prompt each endpoint is likely to have in its prefix cache."""
        return {key: int(count * prompt.block_tokens) for key, count in self.blocks.match(prompt.blocks).items()}

    def sent(self, address: str, prompt: Prompt, cached_tokens: int, now: float) -> SentRequest | None:
        """Note that a request goes to an endpoint, which will have its prompt cached; None: it is gone."""
        endpoint = self._by_address.get(address)
        if endpoint is None:
            return None
        computed = max(1, prompt.num_tokens - cached_tokens)
        endpoint.mean_prompt += _LEARN * (computed - endpoint.mean_prompt)
        request = SentRequest(endpoint.key, prompt, computed, now)
        endpoint.sent.add(request)
        if prompt.blocks:
            self.blocks.touch(endpoint.key, prompt.blocks)
            self.blocks.add(endpoint.key, prompt.blocks)
            self._forget_evicted(endpoint)
        self._renew(endpoint)
        return request

    def answered(self, request: SentRequest) -> None:
        """Note that the response of a request has begun: its prompt is computed."""
        endpoint = self._by_address.get(request.key[0])
        request.is_answered = True
        if endpoint is not None and endpoint.key == request.key:
            self._renew(endpoint)

    def ended(self, request: SentRequest) -> None:
        """Note that a request has ended."""
        endpoint = self._by_address.get(request.key[0])
        if endpoint is None or endpoint.key != request.key or request not in endpoint.sent:
            return
        endpoint.sent.remove(request)
        if request.at <= endpoint.read_at:
            endpoint.ended.append(request)
        self._renew(endpoint)

    def _forget_evicted(self, endpoint: Endpoint) -> None:
        """Forget the oldest blocks beyond what the endpoint's cache holds."""
        if not endpoint.load.num_blocks:
            return
        most = max(1, endpoint.load.num_blocks * endpoint.load.block_size // self._tokens_per_block)
        held = self.blocks.blocks_of(endpoint.key)
        if len(held) > most:
            self.blocks.remove(endpoint.key, list(islice(held, len(held) - most)))

    def _renew(self, endpoint: Endpoint) -> None:
        self.fleet.put(endpoint.address, self._snapshot(endpoint) if endpoint.is_ready else None)

    def _snapshot(self, endpoint: Endpoint) -> WorkerSnapshot:
        load, num_blocks = endpoint.load, endpoint.load.num_blocks or UNKNOWN_BLOCKS
        new = [each for each in endpoint.sent if each.at > endpoint.read_at]
        prompts = [each for each in new if not each.is_answered]
        seqs = sum(each.prompt.num_choices for each in new) - sum(each.prompt.num_choices for each in endpoint.ended)
        tokens = sum(each.prompt.num_tokens for each in new) - sum(each.prompt.num_tokens for each in endpoint.ended)
        used = round(load.used * num_blocks) if load.num_blocks or load.used >= 1 else 0
        return WorkerSnapshot(
            worker_id=endpoint.address,
            address=endpoint.address,
            epoch=endpoint.epoch,
            model=POOL_MODEL,
            prefill=False,
            decode=True,
            identity=_IDENTITY,
            layout=_LAYOUT,
            transports=_TRANSPORTS,
            host_id="",
            block_size=load.block_size,
            max_context=UNKNOWN_BLOCKS,
            max_num_seqs=max(self._max_num_seqs, load.num_running),
            num_total_blocks=UNKNOWN_BLOCKS,  # lengths are estimates: an endpoint says itself what it can never hold
            num_free_blocks=num_blocks - used,
            num_seqs=load.num_running + load.num_waiting,
            num_waiting_tokens=round(load.num_waiting * endpoint.mean_prompt),
            num_prefilling=load.num_waiting,
            num_decoding=load.num_running,
            decode_context=used * load.block_size,
            num_starting=load.num_waiting,
            latency=endpoint.speed.model,
            figures_at=endpoint.read_at,
            dispatched_seqs=seqs,
            dispatched_blocks=tokens // load.block_size,
            dispatched_tokens=sum(each.computed_tokens for each in prompts),
            dispatched_decodes=seqs,
            dispatched_context=tokens,
            keeps_pace=False,
            shares_prompts=False,
            engine="http",
        )
