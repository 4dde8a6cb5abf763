"""What one router tells the others, ten times a second: what it has sent to workers, and what its tenants ask of it. Pure.

It is soft state: each message replaces what the same router said before, a lost one costs a tenth of a second, and one that
cannot be read is as good as lost. Times travel as ages, so that no two clocks need to agree.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from router.views import WorkerKey
from router.worker import Dispatched

MAX_BYTES = 256 << 10
MAX_WORKERS = 4096
MAX_PER_WORKER = 64
"""More are summed up in the youngest: they count a moment longer."""
MAX_TENANTS = 1024


class UnreadableMessage(ValueError):
    """Not one of a router's; the text says why."""


@dataclass(frozen=True)
class PeerMessage:
    """`run` tells incarnations of a router apart. `sent`: by worker, what no report can be sure to contain; `arrived_at` of each
    is on the receiver's clock. `demand`: tokens per second that each tenant asked for."""

    router_id: str
    run: int
    sent: Mapping[WorkerKey, tuple[Dispatched, ...]] = field(default_factory=dict)
    demand: Mapping[str, float] = field(default_factory=dict)


def encode(message: PeerMessage, now: float) -> bytes:
    """`now`: monotonic seconds. What has not arrived yet for sure is as young as the message."""
    workers = [
        [address, f"{epoch:016x}", [_entry(sent, now) for sent in _bounded(all_sent)]]
        for (address, epoch), all_sent in list(message.sent.items())[:MAX_WORKERS]
        if all_sent
    ]
    greatest = sorted(message.demand.items(), key=lambda item: -item[1])[:MAX_TENANTS]
    demand = {tenant: round(rate, 3) for tenant, rate in greatest}
    content = {"router": message.router_id, "run": f"{message.run:016x}", "workers": workers, "demand": demand}
    return json.dumps(content, separators=(",", ":")).encode()


def decode(data: bytes, now: float) -> PeerMessage:
    """`now`: monotonic seconds here. Raises UnreadableMessage."""
    if len(data) > MAX_BYTES:
        raise UnreadableMessage(f"{len(data)} bytes are more than {MAX_BYTES}")
    try:
        content = json.loads(data)
        sent = {
            (str(address), int(epoch, 16)): tuple(_dispatched(entry, now) for entry in entries[:MAX_PER_WORKER])
            for address, epoch, entries in content["workers"][:MAX_WORKERS]
        }
        demand = {str(tenant): _amount(rate) for tenant, rate in list(content["demand"].items())[:MAX_TENANTS]}
        return PeerMessage(str(content["router"]), int(content["run"], 16), sent, demand)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise UnreadableMessage(str(error) or type(error).__name__) from error


def total(all_sent: Iterable[Dispatched], arrived_at: float | None) -> Dispatched:
    """Their sum, as one that arrived then."""
    result = Dispatched(arrived_at=arrived_at)
    for sent in all_sent:
        result.seqs += sent.seqs
        result.blocks += sent.blocks
        result.tokens += sent.tokens
        result.decodes += sent.decodes
        result.context += sent.context
    return result


def _bounded(all_sent: tuple[Dispatched, ...]) -> tuple[Dispatched, ...]:
    if len(all_sent) <= MAX_PER_WORKER:
        return all_sent
    first, rest = all_sent[: MAX_PER_WORKER - 1], all_sent[MAX_PER_WORKER - 1 :]
    times = [sent.arrived_at for sent in rest]
    known = [time for time in times if time is not None]
    return (*first, total(rest, max(known) if len(known) == len(times) else None))


def _entry(sent: Dispatched, now: float) -> list[int]:
    age_ms = 0 if sent.arrived_at is None else max(0, round((now - sent.arrived_at) * 1000))
    return [age_ms, sent.seqs, sent.blocks, sent.tokens, sent.decodes, sent.context]


def _dispatched(entry: list[object], now: float) -> Dispatched:
    age_ms, seqs, blocks, tokens, decodes, context = (round(_amount(value)) for value in entry)
    return Dispatched(seqs, blocks, tokens, decodes, context, arrived_at=now - age_ms / 1000)


def _amount(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value) or not 0 <= value < 1e12:
        raise UnreadableMessage(f"{str(value)[:40]} is no amount")
    return float(value)
