"""What all requests of one router share."""

import asyncio
from dataclasses import dataclass, field

from router.admission import Admission
from router.background import Background
from router.config import RouterConfig
from router.fleet import Fleet
from router.gate import Gate
from router.prefix_index import PrefixIndex
from router.room_line import RoomLine
from router.served_model import ServedModel


@dataclass(eq=False)
class Core:
    """The parts of a router process. `num_token_mismatches` counts repeated indexes whose token differed: not 0 is a bug."""

    config: RouterConfig
    router_id: str
    models: dict[str, ServedModel]
    fleet: Fleet
    gate: Gate
    prefixes: PrefixIndex
    room: RoomLine = field(default_factory=RoomLine)
    background: Background = field(default_factory=Background)
    num_token_mismatches: int = 0

    @classmethod
    def build(cls, config: RouterConfig, router_id: str, models: dict[str, ServedModel], fleet: Fleet) -> "Core":
        """Empty queues and memories from the configuration."""
        gate = Gate(Admission(config.max_inflight, config.max_queued))
        return cls(config, router_id, models, fleet, gate, PrefixIndex(config.prefix_index_blocks))

    def max_context(self, model: ServedModel) -> int:
        """Tokens that a request to `model` may have: the model's, or what the largest worker known has been given."""
        largest = self.fleet.max_context(model.name)
        return model.max_context if largest is None else min(model.max_context, largest)


def time_left_s(deadline: float | None) -> float | None:
    """Seconds until `deadline` (event-loop time), at least a millisecond; None without one."""
    return None if deadline is None else max(0.001, deadline - asyncio.get_running_loop().time())


def time_left_ms(deadline: float | None) -> int:
    """As it travels: milliseconds, 0 without a deadline."""
    left_s = time_left_s(deadline)
    return 0 if left_s is None else max(1, round(left_s * 1000))
