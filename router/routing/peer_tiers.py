"""The worker whose tiers another one may fetch from: it restores what its pool lacks, and sends it then. Pure."""

from collections.abc import Callable
from typing import NamedTuple

from router.routing.cost_model import RESTORE_S
from router.routing.filters import RoutingRequest
from router.routing.worker_snapshot import WorkerKey, WorkerSnapshot


class PeerTiers(NamedTuple):
    """Hold a worker that has `num_tokens` of a prompt in its pool and its tiers together, the last `num_tier_tokens` in tiers
    alone, each of which comes in `restore_token_s`."""

    key: WorkerKey
    num_tokens: int
    num_tier_tokens: int
    restore_token_s: float

    @property
    def restore_s(self) -> float:
        """Return how long it restores."""
        return RESTORE_S + self.num_tier_tokens * self.restore_token_s


def peer_tiers(
    routing_request: RoutingRequest, view_of: Callable[[WorkerKey], WorkerSnapshot | None], least: int, most: int
) -> PeerTiers | None:
    """Return the worker with most of a prompt, and more than `least` tokens, in pool and tiers; of equal ones the one that
    restores it soonest. None: no worker has more.

    Tokens beyond `most` do not count. `view_of` returns None for workers that cannot send."""
    found = list[PeerTiers]()
    for key, tokens in routing_request.restorable_tokens.items():
        num_tokens = min(tokens, most)
        num_tier_tokens = num_tokens - min(num_tokens, routing_request.cached_tokens.get(key, 0))
        view = view_of(key) if num_tokens > least and num_tier_tokens else None
        if view is not None and view.restore_token_s and not view.private_tiers:
            found.append(PeerTiers(key, num_tokens, num_tier_tokens, view.restore_token_s))
    return max(found, key=lambda each: (each.num_tokens, -each.restore_s, each.key), default=None)
