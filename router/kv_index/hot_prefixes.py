"""The prompts that this router sent lately, and their most used prefixes, which a worker that starts should have first."""

import itertools
import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from pdmesh.adapter_id import AdapterId
from pdmesh.v1 import common_pb2, worker_pb2
from router.routing.worker_reports import kind_of
from router.tokenization.prepared_request import PreparedRequest

MAX_PROMPTS = 1024
MAX_TOKENS = 1 << 19
"""Of all prompts that are kept, which bounds the memory (some 20 MB), and the time of a selection (tens of milliseconds)."""
HALF_LIFE_S = 600.0
"""Time after which a use counts half."""
KEPT_S = 1800.0
"""Time after which a prompt is forgotten."""
TENANT_SHARE = 0.5
"""What one tenant has at most of the kept prompts, of their tokens, and of the blocks and prefixes to fetch, where others have
some, too."""
MAX_PREFIXES = 64

T = TypeVar("T")


def block_kind(info: worker_pb2.WorkerInfo) -> Hashable | None:
    """Return what workers have in common whose blocks have equal names; None where nothing is known of that."""
    kind = kind_of(info)
    return None if kind is None else (kind, info.layout.block_size)


@dataclass(eq=False)
class RecentPrompt:
    """Hold one prompt, and the short hashes of its full blocks by kind of worker. `at`: its last use, monotonic seconds."""

    model: str
    tokens: tuple[int, ...]
    tenant: str
    cache_salt: str
    adapter: AdapterId | None
    at: float
    session_id: str = ""
    names: dict[Hashable, Sequence[int]] = field(default_factory=dict)

    def token_request(self, num_tokens: int) -> common_pb2.TokenRequest:
        """Return a request whose prompt is the first `num_tokens` tokens."""
        return common_pb2.TokenRequest(
            model=self.model,
            prompt_token_ids=self.tokens[:num_tokens],
            sampling=common_pb2.SamplingParams(seed=0, max_tokens=1),
            tenant=self.tenant,
            cache_salt=self.cache_salt,
            adapter=self.adapter.name if self.adapter else "",
            adapter_digest=self.adapter.digest if self.adapter else "",
        )


@dataclass(frozen=True)
class HotPrefix:
    """Hold the first blocks of a prompt. `weight`: its uses, the older ones counting less."""

    prompt: RecentPrompt
    names: Sequence[int]
    weight: float


class RecentPrompts:
    """Keep the latest prompts, bounded in number and in tokens: the tenant that has most gives up its oldest first. They are
    kept until their session ends, `KEPT_S` at most."""

    def __init__(self, max_prompts: int = MAX_PROMPTS, max_tokens: int = MAX_TOKENS) -> None:
        self._max_prompts = max_prompts
        self._max_tokens = max_tokens
        self._prompts: dict[str, OrderedDict[str, RecentPrompt]] = {}  # by tenant and request, the oldest first
        self._num_prompts, self._num_tokens = Counter[str](), Counter[str]()  # by tenant, none of them 0

    def __len__(self) -> int:
        return self._num_prompts.total()

    def note(self, prepared: PreparedRequest, info: worker_pb2.WorkerInfo, names: Sequence[int], now: float) -> None:
        """Record that a request was sent to a worker. It counts once, also where it is sent to several, or again. One whose
        session was released meanwhile is not kept."""
        kind = block_kind(info)
        if kind is None or not names or prepared.is_released:
            return
        kept = self._prompts.get(prepared.tenant)
        known = kept.get(prepared.request_id) if kept is not None else None
        if known is None or known.tokens is not prepared.prompt:
            known = self._put(prepared, now)
        known.names[kind] = names

    def expire(self, now: float) -> None:
        """Forget the prompts that are too old."""
        for tenant, prompts in list(self._prompts.items()):
            while prompts and now - next(iter(prompts.values())).at >= KEPT_S:
                self._remove(tenant, next(iter(prompts)))

    def forget(self, tenant: str, session_id: str, model: str = "") -> None:
        """Forget the prompts of a session that has ended, or those for one model."""
        for request_id, prompt in list(self._prompts.get(tenant, {}).items()):
            if prompt.session_id == session_id and model in ("", prompt.model):
                self._remove(tenant, request_id)

    def hottest(self, kind: Hashable, max_blocks: int, now: float) -> list[HotPrefix]:
        """Return the prefixes to fetch for a worker of this kind, in their order, `max_blocks` different blocks in all."""
        self.expire(now)
        kept = (prompt for prompts in self._prompts.values() for prompt in prompts.values())
        return hottest([prompt for prompt in kept if kind in prompt.names], kind, max_blocks, now)

    def _put(self, prepared: PreparedRequest, now: float) -> RecentPrompt:
        self.expire(now)
        tenant, request_id = prepared.tenant, prepared.request_id
        if request_id in self._prompts.get(tenant, {}):
            self._remove(tenant, request_id)
        prompt = RecentPrompt(
            prepared.model.name, prepared.prompt, tenant, prepared.cache_salt, prepared.adapter, now, prepared.session_id
        )
        self._prompts.setdefault(tenant, OrderedDict())[request_id] = prompt
        self._num_prompts[tenant] += 1
        self._num_tokens[tenant] += len(prompt.tokens)
        for counts, limit in ((self._num_prompts, self._max_prompts), (self._num_tokens, self._max_tokens)):
            while len(self) > 1 and (most := _beyond(counts, limit)) is not None:
                self._remove(most, next(iter(self._prompts[most])))
        return prompt

    def _remove(self, tenant: str, request_id: str) -> None:
        self._num_tokens[tenant] -= len(self._prompts[tenant].pop(request_id).tokens)
        self._num_prompts[tenant] -= 1
        if not self._prompts[tenant]:
            del self._prompts[tenant], self._num_prompts[tenant], self._num_tokens[tenant]


def _beyond(counts: Counter[str], limit: int) -> str | None:
    """Return the tenant that has most, where it has more than its share or all have more than `limit`."""
    [(tenant, most)] = counts.most_common(1)
    return tenant if counts.total() > limit or most > _share(limit, len(counts)) else None


def _share(limit: int, num_tenants: int) -> int:
    return limit if num_tenants < 2 else math.ceil(limit * TENANT_SHARE)


def hottest(prompts: Sequence[RecentPrompt], kind: Hashable, max_blocks: int, now: float) -> list[HotPrefix]:
    """Return the most used prefixes of some prompts, a prefix before what continues it: the hottest of each tenant, the hotter
    ones first, then the second of each.

    The blocks with most uses are taken, of equal ones those nearer to the beginning. A block has no more uses than the one before
    it, so what is taken begins at the beginning. One chain of blocks gives a prefix wherever its number of uses falls.
    """
    blocks = _shared_blocks(prompts, kind, now)
    ordered = sorted(blocks, key=lambda name: (-blocks[name].weight, blocks[name].depth))
    taken = set(_within_shares(ordered, lambda name: blocks[name].tenant, max_blocks))
    found: dict[int, HotPrefix] = {}
    for prompt in prompts:
        names = list(itertools.takewhile(taken.__contains__, prompt.names[kind]))
        for end in _falls([blocks[name].weight for name in names]):
            found.setdefault(names[end - 1], HotPrefix(prompt, names[:end], blocks[names[end - 1]].weight))
    prefixes = sorted(found.values(), key=lambda prefix: (-prefix.weight, len(prefix.names)))
    return _in_turn(_within_shares(prefixes, lambda prefix: prefix.prompt.tenant, MAX_PREFIXES))


def _within_shares(ordered: Sequence[T], tenant_of: Callable[[T], str], limit: int) -> list[T]:
    """Return the first `limit`, without those of a tenant that are beyond its share."""
    share = _share(limit, len({tenant_of(each) for each in ordered}))
    counts, taken = Counter[str](), list[T]()
    for each in ordered:
        tenant = tenant_of(each)
        if len(taken) < limit and counts[tenant] < share:
            counts[tenant] += 1
            taken.append(each)
    return taken


def _in_turn(prefixes: Sequence[HotPrefix]) -> list[HotPrefix]:
    """Return the prefixes so that each tenant's first come before the second of any: time may end before all have come."""
    turns, counts = list[tuple[int, HotPrefix]](), Counter[str]()
    for prefix in prefixes:
        turns.append((counts[prefix.prompt.tenant], prefix))
        counts[prefix.prompt.tenant] += 1
    return [prefix for _, prefix in sorted(turns, key=lambda turn: turn[0])]


@dataclass(slots=True)
class _Block:
    """Hold what is known of a block: the session that used it first, whether another one has, its uses with the older ones
    counting less, and its place in its prompts. Its name depends on its tenant."""

    tenant: str
    user: Hashable
    depth: int
    weight: float = 0.0
    is_shared: bool = False


def _shared_blocks(prompts: Iterable[RecentPrompt], kind: Hashable, now: float) -> dict[int, _Block]:
    """Return the blocks that are worth fetching: those that two sessions have, or two requests without any. The turns of one
    session go where it was."""
    blocks = dict[int, _Block]()
    for number, prompt in enumerate(prompts):
        weight = 0.5 ** ((now - prompt.at) / HALF_LIFE_S)
        user = prompt.session_id or number
        for depth, name in enumerate(prompt.names[kind]):
            block = blocks.get(name)
            if block is None:
                block = blocks[name] = _Block(prompt.tenant, user, depth)
            block.weight += weight
            block.is_shared = block.is_shared or block.user != user
    return {name: block for name, block in blocks.items() if block.is_shared}


def _falls(weights: Sequence[float]) -> list[int]:
    """Return the numbers of blocks behind which the weight is less, or the blocks end."""
    return [end for end in range(1, len(weights) + 1) if end == len(weights) or weights[end] < weights[end - 1]]
