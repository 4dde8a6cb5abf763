"""The prompts that this router sent lately, and their most used prefixes, which a worker that starts should have first."""

import heapq
import itertools
from collections import OrderedDict
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field

from pdmesh.adapter_id import AdapterId
from pdmesh.v1 import common_pb2, worker_pb2
from router.routing.worker_reports import kind_of
from router.tokenization.prepared_request import PreparedRequest

MAX_PROMPTS = 1024
MAX_TOKENS = 1 << 19
"""Of all prompts that are kept, which bounds the memory (some 20 MB), and the time of a selection (tens of milliseconds)."""
HALF_LIFE_S = 600.0
"""Time after which a use counts half."""
MIN_USES = 2
"""A prefix that one request alone had is not worth fetching."""
MAX_PREFIXES = 64

PromptKey = tuple[str, str]


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
    """Keep the latest prompts, bounded in number and in tokens."""

    def __init__(self, max_prompts: int = MAX_PROMPTS, max_tokens: int = MAX_TOKENS) -> None:
        self._max_prompts = max_prompts
        self._max_tokens = max_tokens
        self._num_tokens = 0
        self._prompts: OrderedDict[PromptKey, RecentPrompt] = OrderedDict()

    def __len__(self) -> int:
        return len(self._prompts)

    def note(self, prepared: PreparedRequest, info: worker_pb2.WorkerInfo, names: Sequence[int], now: float) -> None:
        """Record that a request was sent to a worker. It counts once, also where it is sent to several, or again."""
        kind = block_kind(info)
        if kind is None or not names:
            return
        key = (prepared.tenant, prepared.request_id)
        known = self._prompts.get(key)
        if known is None or known.tokens is not prepared.prompt:
            known = self._put(key, prepared, now)
        known.names[kind] = names

    def _put(self, key: PromptKey, prepared: PreparedRequest, now: float) -> RecentPrompt:
        if (before := self._prompts.pop(key, None)) is not None:
            self._num_tokens -= len(before.tokens)
        prompt = self._prompts[key] = RecentPrompt(
            prepared.model.name, prepared.prompt, prepared.tenant, prepared.cache_salt, prepared.adapter, now
        )
        self._num_tokens += len(prompt.tokens)
        while len(self._prompts) > self._max_prompts or (self._num_tokens > self._max_tokens and len(self._prompts) > 1):
            self._num_tokens -= len(self._prompts.popitem(last=False)[1].tokens)
        return prompt

    def hottest(self, kind: Hashable, max_blocks: int, now: float) -> list[HotPrefix]:
        """Return the prefixes to fetch for a worker of this kind, in their order, `max_blocks` different blocks in all."""
        return hottest([prompt for prompt in self._prompts.values() if kind in prompt.names], kind, max_blocks, now)


def hottest(prompts: Sequence[RecentPrompt], kind: Hashable, max_blocks: int, now: float) -> list[HotPrefix]:
    """Return the most used prefixes of some prompts, the hottest first, and a prefix before what continues it.

    The blocks with most uses are taken, of equal ones those nearer to the beginning. A block has no more uses than the one before
    it, so what is taken begins at the beginning. One chain of blocks gives a prefix wherever its number of uses falls.
    """
    weights, depths = _weights(prompts, kind, now)
    taken = set(heapq.nsmallest(max_blocks, weights, key=lambda name: (-weights[name], depths[name])))
    found: dict[int, HotPrefix] = {}
    for prompt in prompts:
        names = list(itertools.takewhile(taken.__contains__, prompt.names[kind]))
        for end in _falls([weights[name] for name in names]):
            found.setdefault(names[end - 1], HotPrefix(prompt, names[:end], weights[names[end - 1]]))
    return heapq.nsmallest(MAX_PREFIXES, found.values(), key=lambda prefix: (-prefix.weight, len(prefix.names)))


def _weights(prompts: Iterable[RecentPrompt], kind: Hashable, now: float) -> tuple[dict[int, float], dict[int, int]]:
    """Return by block that has enough uses their sum, the older ones counting less, and its place in its prompts."""
    uses, weights, depths = dict[int, int](), dict[int, float](), dict[int, int]()
    for prompt in prompts:
        weight = 0.5 ** ((now - prompt.at) / HALF_LIFE_S)
        for depth, name in enumerate(prompt.names[kind]):
            uses[name] = uses.get(name, 0) + 1
            weights[name] = weights.get(name, 0.0) + weight
            depths[name] = depth
    return {name: weights[name] for name, count in uses.items() if count >= MIN_USES}, depths


def _falls(weights: Sequence[float]) -> list[int]:
    """Return the numbers of blocks behind which the weight is less, or the blocks end."""
    return [end for end in range(1, len(weights) + 1) if end == len(weights) or weights[end] < weights[end - 1]]
