"""Where KV may come from that a worker would have to compute: tiers beneath its own pool, and other workers.

The prefill service asks before it queues a prompt, and the decode service before it computes one itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from pdmesh.engine.request import EngineRequest
from pdmesh.runtime.errors import InvalidArgument
from pdmesh.v1 import common_pb2, prefill_pb2


@dataclass(frozen=True)
class Brought:
    """Hold what came into the prefix cache for a request, in tokens, and how long that took, whether something came or not.
    `fetch_failed`: the holder was asked, and did not send."""

    num_restored_tokens: int = 0
    restore_ns: int = 0
    num_fetched_tokens: int = 0
    fetch_ns: int = 0
    fetch_failed: bool = False

    def put(self, timings: common_pb2.PrefillTimings) -> None:
        """Write it into the timings of the request."""
        timings.restore_ns, timings.num_restored_tokens = self.restore_ns, self.num_restored_tokens
        timings.fetch_ns, timings.num_fetched_tokens = self.fetch_ns, self.num_fetched_tokens
        timings.fetch_failed = self.fetch_failed


NOTHING = Brought()


class KVSources(Protocol):
    """Bring KV into the prefix cache."""

    async def bring(self, request: EngineRequest, holder: prefill_pb2.KVHolder | None) -> Brought:
        """Bring what the pool lacks of a request, as far as that is quicker than computing it. The request claims it until the
        engine admits it, or is told to release it. Nothing that goes wrong is an error, but for an engine that has stopped.
        Raises EngineStopped."""

    @property
    def is_moving(self) -> bool:
        """Return whether blocks of the pool are held now for KV that comes or goes, and are given back soon."""


def check_holder(holder: prefill_pb2.KVHolder, num_tokens: int) -> None:
    """Check the holder of a request of so many tokens. Raises InvalidArgument naming the field."""
    for name, given in (("address", holder.address), ("epoch", holder.epoch)):
        if not given:
            raise InvalidArgument(f"holder.{name}", "missing")
    if not 0 < holder.num_tokens < num_tokens:
        raise InvalidArgument("holder.num_tokens", f"{holder.num_tokens} is not 1 to {num_tokens - 1}, fewer than asked for")
    if holder.num_tier_tokens > holder.num_tokens:
        raise InvalidArgument("holder.num_tier_tokens", f"{holder.num_tier_tokens} are more than its {holder.num_tokens} tokens")
    if not 0 <= holder.restore_token_s <= 1:
        raise InvalidArgument("holder.restore_token_s", f"{holder.restore_token_s} is not 0 to 1 second")
