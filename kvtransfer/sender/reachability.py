"""Endpoints that did not answer lately, or were of no use: asked last, lest every push wait for a port that swallows packets."""

import time

from pdmesh.v1 import common_pb2

REMEMBER_S = 10.0


class Silent:
    """Of one sender. What it remembers puts an endpoint behind the others, it rules out none; another epoch is asked
    anew."""

    def __init__(self, remember_s: float = REMEMBER_S) -> None:
        self._remember_s = remember_s
        self._since: dict[tuple[str, str, int], float] = {}

    def note(self, endpoint: common_pb2.TransferEndpoint, epoch: int) -> None:
        """It did not answer just now."""
        now = time.monotonic()
        self._since = {key: since for key, since in self._since.items() if now - since < self._remember_s}
        self._since[endpoint.transport, endpoint.address, epoch] = now

    def holds(self, endpoint: common_pb2.TransferEndpoint, epoch: int) -> bool:
        """Did it fail to answer within the last `remember_s` seconds?"""
        since = self._since.get((endpoint.transport, endpoint.address, epoch))
        return since is not None and time.monotonic() - since < self._remember_s
