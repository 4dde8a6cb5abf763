"""Claims of requests on cached blocks that they wait to use: what was brought for a request, from a tier or from another worker,
is to be there still when the engine admits it.

Claimed blocks are as free as others, but evicted after all others, so a claim makes no request wait. Where nothing else is free,
the oldest claim is given up as a whole. A claim names hashes: it holds for blocks that are here, and for those that come.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence


class BlockClaims:
    """Hold the claims by request, the oldest first."""

    def __init__(self) -> None:
        self.hashes: dict[bytes, int] = {}  # how many requests claim each
        self._of_request: OrderedDict[str, tuple[bytes, ...]] = OrderedDict()

    def __len__(self) -> int:
        """Return the number of requests with a claim."""
        return len(self._of_request)

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._of_request

    def add(self, request_id: str, hashes: Sequence[bytes]) -> None:
        """Add the claim of a request that has none."""
        self._of_request[request_id] = tuple(hashes)
        for block_hash in hashes:
            self.hashes[block_hash] = self.hashes.get(block_hash, 0) + 1

    def drop(self, request_id: str) -> list[bytes]:
        """Give up a claim; return the hashes that no request claims any more, in the order of the prompt."""
        dropped = []
        for block_hash in self._of_request.pop(request_id, ()):
            self.hashes[block_hash] -= 1
            if not self.hashes[block_hash]:
                del self.hashes[block_hash]
                dropped.append(block_hash)
        return dropped

    def drop_oldest(self) -> list[bytes]:
        """Do `drop` for the oldest claim. There must be one."""
        return self.drop(next(iter(self._of_request)))
