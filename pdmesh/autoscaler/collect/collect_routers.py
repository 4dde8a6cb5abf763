"""Which router processes there are, and which of them have been heard. Pure.

An address may be several processes (`python -m router --processes N`), and a connection reaches any of them. A process is
forgotten when its address is listed no more, or when others have taken its place there: then as many as share the port have been
heard since it was.
"""

from collections.abc import Collection
from dataclasses import dataclass, field

from pdmesh.autoscaler.collect.collect_counts import Key


@dataclass(eq=False)
class _Place:
    num_processes: int = 1
    heard_s: dict[Key, float] = field(default_factory=dict)  # the latest is last


class Routers:
    """By address."""

    def __init__(self) -> None:
        self._places: dict[str, _Place] = {}

    def listed(self, addresses: Collection[str]) -> set[Key]:
        """All there are; returns the processes that are gone with theirs."""
        gone = {key for address, place in self._places.items() if address not in addresses for key in place.heard_s}
        self._places = {address: self._places.get(address, _Place()) for address in addresses}
        return gone - self.keys

    def heard(self, address: str, key: Key, num_processes: int, now_s: float) -> set[Key]:
        """A process has answered; returns those whose place it has taken."""
        place = self._places.setdefault(address, _Place())
        place.num_processes = max(1, num_processes)
        place.heard_s.pop(key, None)
        place.heard_s[key] = now_s
        replaced = list(place.heard_s)[: -place.num_processes]
        for each in replaced:
            del place.heard_s[each]
        return set(replaced) - self.keys

    @property
    def keys(self) -> set[Key]:
        """Of all processes that are known."""
        return {key for place in self._places.values() for key in place.heard_s}

    def num_missing(self, address: str, since_s: float) -> int:
        """Processes there that have not been heard since then."""
        place = self._places[address]
        return place.num_processes - sum(heard_s >= since_s for heard_s in place.heard_s.values())

    def unknown(self) -> list[str]:
        """Addresses that have processes of which nothing was ever heard."""
        return [address for address, place in self._places.items() if len(place.heard_s) < place.num_processes]
