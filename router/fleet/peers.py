"""The other routers, as their messages tell; and this one's part of what all of them may give out. Pure: time is passed in.

What they sent to a worker counts here until the worker's own report is younger than its arrival, as what this router sent does.
A router that has been silent for `MAX_SILENCE_S` is gone, with all it said: its part goes to the others. But when this router
does not even hear itself, it is the messages that fail, not the routers: parts stay as they were last.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import replace

from router.fleet.peer_message import MAX_TENANTS, PeerMessage, named
from router.fleet.worker import Dispatched
from router.routing.worker_snapshot import WorkerKey

MAX_SILENCE_S = 0.8
SENT_SILENCE_S = 0.5
"""Workers' reports will have told of what was sent long ago."""
JOINING_S = 0.3
"""After its first own message a router knows all others: they speak more often than that."""
JOINING_SHARE = 0.5
ALONE_AFTER_S = 1.0
"""One that starts while no messages pass takes itself for the only one."""
RETURN_GRACE_S = 3.0
FLOOR = 0.1
MAX_PEERS = 1024


class Peers:
    """What one router knows of the others. `run` is its own."""

    def __init__(self, router_id: str, run: int, now: float) -> None:
        self._own = (router_id, run)
        self._messages: dict[tuple[str, int], PeerMessage] = {}
        self._heard_at: dict[tuple[str, int], float] = {}
        self._started_at = now
        self._joined_at: float | None = None

    @property
    def num_others(self) -> int:
        """Routers that were heard lately, without this one."""
        return len(self._messages) - (self._own in self._messages)

    def heard(self, message: PeerMessage, now: float) -> None:
        """Also of what this router says itself."""
        key = (message.router_id, message.run)
        if key == self._own:
            self._heard_itself(now)
        elif key not in self._messages and len(self._messages) >= MAX_PEERS:
            return
        self._messages[key] = message
        self._heard_at[key] = now

    def _heard_itself(self, now: float) -> None:
        if self._joined_at is None:
            self._joined_at = now
        elif not self.hears_itself(now):  # messages pass again: the others have their back-offs to end before they speak
            self._heard_at = dict.fromkeys(self._heard_at, now + RETURN_GRACE_S)

    def tick(self, now: float) -> None:
        """Forget who is silent, unless everybody is."""
        if not self.hears_itself(now):
            return
        for key in [key for key, at in self._heard_at.items() if now - at > MAX_SILENCE_S]:
            del self._messages[key], self._heard_at[key]

    def hears_itself(self, now: float) -> bool:
        """Do messages pass?"""
        return now - self._heard_at.get(self._own, float("-inf")) <= SENT_SILENCE_S

    def sent(self, now: float) -> dict[WorkerKey, list[Dispatched]]:
        """By worker, what the others sent to it; new objects, for the receiver to count down."""
        found: dict[WorkerKey, list[Dispatched]] = {}
        for key, message in self._messages.items():
            if key == self._own or now - self._heard_at[key] > SENT_SILENCE_S:
                continue
            for worker, all_sent in message.sent.items():
                found.setdefault(worker, []).extend(replace(sent, num_reports=0) for sent in all_sent)
        return found

    def share(self, tenant: str, now: float) -> float:
        """This router's part of the tenant's limits, in (0, 1]. Parts of routers with the same messages are 1 together."""
        own = self._messages.get(self._own)
        if own is None or self._joined_at is None:
            return 1.0 if now - self._started_at > ALONE_AFTER_S else JOINING_SHARE
        if now - self._joined_at < JOINING_S:
            return min(JOINING_SHARE, self._part(own, tenant))
        return self._part(own, tenant)

    def _part(self, own: PeerMessage, tenant: str) -> float:
        name = named(tenant)
        return part(own.demand.get(name, 0.0), [message.demand.get(name, 0.0) for message in self._messages.values()])


def part(own: float, demands: list[float]) -> float:
    """The part of one of several who ask for `demands`, its own among them: a floor for each, so that who is asked for the first
    time has something to give; the rest as they ask."""
    num, asked = len(demands), sum(demands)
    if asked <= 0:
        return 1.0 / num
    return FLOOR / num + (1.0 - FLOOR) * (own / asked)


class DemandMeter:
    """Tokens per second that each tenant asks for, over about the last `WINDOW_S` seconds. To count a request costs the same
    with any number of tenants; of more than `MAX_TENANTS` those who have asked last are known."""

    WINDOW_S = 1.0
    FORGET_BELOW = 0.01

    def __init__(self) -> None:
        self._levels: OrderedDict[str, tuple[float, float]] = OrderedDict()  # the rate, and when it was so much

    def asked(self, tenant: str, tokens: float, now: float) -> None:
        """A request came, whatever becomes of it."""
        self._levels[tenant] = (self._level(tenant, now) + tokens / self.WINDOW_S, now)
        self._levels.move_to_end(tenant)
        if len(self._levels) > MAX_TENANTS:
            self._levels.popitem(last=False)

    def rates(self, now: float) -> Mapping[str, float]:
        """By tenant; those who ask for nothing are not there."""
        rates = {name: self._level(name, now) for name in self._levels}
        for name in [name for name, rate in rates.items() if rate <= self.FORGET_BELOW]:
            del rates[name], self._levels[name]
        return rates

    def _level(self, tenant: str, now: float) -> float:
        rate, at = self._levels.get(tenant, (0.0, now))
        return rate * math.exp2(-max(0.0, now - at) / self.WINDOW_S)
