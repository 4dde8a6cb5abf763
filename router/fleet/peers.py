"""The other routers, by their messages, and this router's part of the tenants' limits that all of them give out. Pure: time is
passed in.

What other routers sent to a worker counts here until the worker's own heartbeat is newer than its arrival, like what this router
sent. A router that has been silent for `MAX_SILENCE_S` is gone, with all that it said, and its part goes to the others. But when
this router does not even receive its own messages, the messages fail and not the routers: the parts stay as they were.
"""

from __future__ import annotations

import json
import math
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from itertools import accumulate
from operator import add

from router.fleet.worker import Dispatched
from router.routing.worker_snapshot import WorkerKey

# The message of one router to the others, ten times a second: what it has sent to workers, and what its tenants ask of it.
#
# Each message replaces the one before of the same router, a lost one costs a tenth of a second, and one that cannot be read
# counts as lost. Times travel as ages, so that clocks need not agree.

MAX_BYTES = 256 << 10
MAX_WORKERS = 4096
AGES_MS = (0, 100, 300, 700, 1500)
"""Bounds of the age classes by which the amounts sent to a worker are summed. A sum has the age of its youngest part, so that all
of it counts for long enough."""
MAX_PER_WORKER = len(AGES_MS) + 1
MAX_TENANTS = 1024
MAX_NAME_BYTES = 32
MAX_COUNT = 10**9
"""Bounds each amount, in both directions: what has ended counts negatively."""
MAX_AMOUNT = 1e12
MAX_TEXT = 512


class UnreadableMessage(ValueError):
    """Report a message that no router sent; the text says why."""


@dataclass(frozen=True)
class PeerMessage:
    """Hold one message.

    `run` tells incarnations of a router apart. `sent`: by worker, what is not surely contained in its heartbeats; each
    `arrived_at` is on the receiver's clock. `demand`: tokens per second that each tenant asked for; in a received
    message tenants have the name that `named` returns.
    """

    router_id: str
    run: int
    sent: Mapping[WorkerKey, tuple[Dispatched, ...]] = field(default_factory=dict)
    demand: Mapping[str, float] = field(default_factory=dict)


def encode(message: PeerMessage, now: float) -> bytes:
    """Return the message as bytes, at most MAX_BYTES: with too many workers age classes are merged, then the workers with least
    are left out. `now`: monotonic seconds. Entries without a known arrival are as young as the message."""
    greatest = sorted(message.demand.items(), key=lambda item: -item[1])[:MAX_TENANTS]
    demand = {named(tenant): round(min(rate, MAX_AMOUNT / 2), 3) for tenant, rate in greatest}
    head = {"router": message.router_id, "run": f"{message.run:016x}", "demand": demand}
    start = json.dumps(head, separators=(",", ":"))[:-1]
    workers = _workers(message.sent, now, MAX_BYTES - len(start) - len(',"workers":[]}'))
    return f'{start},"workers":[{",".join(workers)}]}}'.encode()


def named(tenant: str) -> str:
    """Return the tenant's name in messages: a hash replaces long or unprintable names, so that a message's size is bounded."""
    plain = len(tenant) <= MAX_NAME_BYTES and tenant.isascii() and tenant.isprintable() and not tenant.startswith("#")
    if plain:
        return tenant
    return "#" + blake2b(tenant.encode("utf-8", "surrogatepass"), digest_size=12).hexdigest()


def _workers(sent: Mapping[WorkerKey, tuple[Dispatched, ...]], now: float, budget: int) -> list[str]:
    """Return what was sent to each worker, as JSON; with commas at most `budget` bytes."""
    written: list[str] = []
    for ages_ms in (AGES_MS, AGES_MS[:2], ()):
        written = [text for key, all_sent in sent.items() if (text := _worker(key, all_sent, ages_ms, now))]
        if len(written) <= MAX_WORKERS and sum(map(len, written)) + len(written) <= budget:
            return written
    written = sorted(written, key=len, reverse=True)[:MAX_WORKERS]  # longer text has more digits: more was sent
    ends = accumulate(len(text) + 1 for text in written)
    return [text for text, end in zip(written, ends, strict=True) if end <= budget]


def _worker(key: WorkerKey, all_sent: tuple[Dispatched, ...], ages_ms: tuple[int, ...], now: float) -> str:
    """Return one worker's entry; empty when its sums are zero."""
    entries = _summed(all_sent, ages_ms, now)
    return json.dumps([key[0], f"{key[1]:016x}", entries], separators=(",", ":")) if entries else ""


def _summed(all_sent: tuple[Dispatched, ...], ages_ms: tuple[int, ...], now: float) -> list[list[int]]:
    """Return an entry for each age class whose sum is not zero."""
    sums: dict[int, list[int]] = {}
    for sent in all_sent:
        age_ms, *figures = _entry(sent, now)
        before = sums.setdefault(bisect_left(ages_ms, age_ms), [age_ms, 0, 0, 0, 0, 0])
        before[0] = min(before[0], age_ms)
        before[1:] = map(add, before[1:], figures)
    return [[entry[0], *map(_clamped, entry[1:])] for entry in sums.values() if any(entry[1:])]


def _clamped(count: int) -> int:
    return max(-MAX_COUNT, min(count, MAX_COUNT))


def decode(data: bytes, now: float) -> PeerMessage:
    """Return the message in `data`. `now`: monotonic seconds of this process. Raises UnreadableMessage."""
    if len(data) > MAX_BYTES:
        raise UnreadableMessage(f"{len(data)} bytes are more than {MAX_BYTES}")
    try:
        content = json.loads(data)
        sent = {
            (_text(address), _number(epoch)): tuple(_dispatched(entry, now) for entry in entries[:MAX_PER_WORKER])
            for address, epoch, entries in content["workers"][:MAX_WORKERS]
        }
        demand = {_text(tenant): _amount(rate, 0, MAX_AMOUNT) for tenant, rate in list(content["demand"].items())[:MAX_TENANTS]}
        return PeerMessage(_text(content["router"]), _number(content["run"]), sent, demand)
    except (ValueError, TypeError, KeyError, AttributeError, ArithmeticError, RecursionError) as error:
        raise UnreadableMessage(str(error) or type(error).__name__) from error


def total(all_sent: Iterable[Dispatched], arrived_at: float | None) -> Dispatched:
    """Return the sum of the entries, with the arrival time `arrived_at`."""
    result = Dispatched(arrived_at=arrived_at)
    for sent in all_sent:
        result.seqs += sent.seqs
        result.blocks += sent.blocks
        result.tokens += sent.tokens
        result.decodes += sent.decodes
        result.context += sent.context
    return result


def _entry(sent: Dispatched, now: float) -> list[int]:
    age_ms = 0 if sent.arrived_at is None else min(max(0, round((now - sent.arrived_at) * 1000)), 10**9)
    return [age_ms, sent.seqs, sent.blocks, sent.tokens, sent.decodes, sent.context]


def _dispatched(entry: list[object], now: float) -> Dispatched:
    age_ms, *counts = entry
    seqs, blocks, tokens, decodes, context = (round(_amount(count, -MAX_COUNT, MAX_COUNT)) for count in counts)
    return Dispatched(seqs, blocks, tokens, decodes, context, arrived_at=now - _amount(age_ms, 0, MAX_AMOUNT) / 1000)


def _amount(value: object, least: float, most: float) -> float:
    """Check an amount. The comparison comes before the conversion, because an integer may have more digits than a float can
    hold."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not least <= value <= most:
        raise UnreadableMessage(f"{type(value).__name__} is no amount from {least:g} to {most:g}")
    return float(value)


def _text(value: object) -> str:
    if not isinstance(value, str) or len(value) > MAX_TEXT:
        raise UnreadableMessage(f"{type(value).__name__} is no name of at most {MAX_TEXT} characters")
    return value


def _number(value: object) -> int:
    """Parse an epoch or a run, of 64 bits."""
    return int(_text(value)[:17], 16)


MAX_SILENCE_S = 0.8
SENT_SILENCE_S = 0.5
"""After this time heartbeats surely contain what was sent."""
JOINING_S = 0.3
"""Seconds after its own first message in which a router learns of all others: they publish more often than that."""
JOINING_SHARE = 0.5
ALONE_AFTER_S = 1.0
"""A router that starts while no messages arrive takes itself for the only one after this time."""
RETURN_GRACE_S = 3.0
FLOOR = 0.1
MAX_PEERS = 1024


class Peers:
    """Hold what one router knows of the others. `run` is its own."""

    def __init__(self, router_id: str, run: int, now: float) -> None:
        self._own = (router_id, run)
        self._messages: dict[tuple[str, int], PeerMessage] = {}
        self._heard_at: dict[tuple[str, int], float] = {}
        self._started_at = now
        self._joined_at: float | None = None

    @property
    def num_others(self) -> int:
        """Return the number of routers that sent messages lately, without this one."""
        return len(self._messages) - (self._own in self._messages)

    def received(self, message: PeerMessage, now: float) -> None:
        """Take in a message, including this router's own."""
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
        elif not self.receives_itself(now):  # messages arrive again: the other routers' back-offs have to end before they publish
            self._heard_at = dict.fromkeys(self._heard_at, now + RETURN_GRACE_S)

    def tick(self, now: float) -> None:
        """Drop routers that are silent, unless all are."""
        if not self.receives_itself(now):
            return
        for key in [key for key, at in self._heard_at.items() if now - at > MAX_SILENCE_S]:
            del self._messages[key], self._heard_at[key]

    def receives_itself(self, now: float) -> bool:
        """Return whether this router receives its own messages."""
        return now - self._heard_at.get(self._own, float("-inf")) <= SENT_SILENCE_S

    def sent(self, now: float) -> dict[WorkerKey, list[Dispatched]]:
        """Return by worker what the others sent to it, as new objects, because the receiver counts in them."""
        found: dict[WorkerKey, list[Dispatched]] = {}
        for key, message in self._messages.items():
            if key == self._own or now - self._heard_at[key] > SENT_SILENCE_S:
                continue
            for worker, all_sent in message.sent.items():
                found.setdefault(worker, []).extend(replace(sent, num_reports=0) for sent in all_sent)
        return found

    def share(self, tenant: str, now: float) -> float:
        """Return this router's part of the tenant's limits, in (0, 1]. The parts of routers with the same messages add up to
        1."""
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
    """Return the part of one of several routers with these `demands`, its own among them: a floor for each, so that a router with
    its first request of a tenant can admit it, and the rest in proportion."""
    num, asked = len(demands), sum(demands)
    if asked <= 0:
        return 1.0 / num
    return FLOOR / num + (1.0 - FLOOR) * (own / asked)


class DemandMeter:
    """Measure the tokens per second that each tenant asks for, over about the last `WINDOW_S` seconds. Counting a request costs
    the same with any number of tenants; at most the `MAX_TENANTS` most recent ones are kept."""

    WINDOW_S = 1.0
    FORGET_BELOW = 0.01

    def __init__(self) -> None:
        self._levels: OrderedDict[str, tuple[float, float]] = OrderedDict()  # the rate, and the time at which it had that value

    def asked(self, tenant: str, tokens: float, now: float) -> None:
        """Record a request, whatever becomes of it."""
        self._levels[tenant] = (self._level(tenant, now) + tokens / self.WINDOW_S, now)
        self._levels.move_to_end(tenant)
        if len(self._levels) > MAX_TENANTS:
            self._levels.popitem(last=False)

    def rates(self, now: float) -> Mapping[str, float]:
        """Return the rates by tenant, without tenants that ask for nothing."""
        rates = {name: self._level(name, now) for name in self._levels}
        for name in [name for name, rate in rates.items() if rate <= self.FORGET_BELOW]:
            del rates[name], self._levels[name]
        return rates

    def _level(self, tenant: str, now: float) -> float:
        rate, at = self._levels.get(tenant, (0.0, now))
        return rate * math.exp2(-max(0.0, now - at) / self.WINDOW_S)
