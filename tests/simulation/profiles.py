"""What a seed is about. Most are a mixture of everything; some look closely at one thing that a mixture meets rarely.

calm        nothing goes wrong, but clients cancel and vanish: every limit is tight, nothing may be tried twice
streams     connections break while tokens flow, between clients, routers and decode workers
hand-offs   prompts are long, and connections, links and prefill workers fail while their KV is on its way
"""

from __future__ import annotations

import random
from dataclasses import replace

from tests.simulation.scenario import FIRST_TOKEN, LAST_TOKEN, START_S, Ask, Fault, Scenario, mixture

CALM, STREAMS, HANDOFFS = "calm", "streams", "hand-offs"
SHARES = {CALM: 0.12, STREAMS: 0.2, HANDOFFS: 0.2}
LOST_CONNECTIONS = ("sever",)
"""Faults of which one end learns at once, or when it sends: a new connection is made before anything is given up."""
LARGE_POOL = 256
"""Blocks: enough for all requests of a run at once."""
MANY_SEQS = 32
LAST_BREAK_S = 1.5
FIRST_KV_S = 0.003
"""The earliest that KV can be on its way after a request was sent."""


def scenario(seed: int) -> Scenario:
    """Return the scenario of a seed."""
    chosen = mixture(seed)
    rng = random.Random(f"profile of {seed}")
    drawn = rng.random()
    for name, share in SHARES.items():
        if drawn < share:
            return replace(_MAKERS[name](rng, chosen), profile=name)
        drawn -= share
    return chosen


def _calm(rng: random.Random, chosen: Scenario) -> Scenario:
    asks = [
        replace(
            _long(rng, ask),
            cancels_s=rng.random() if index % 3 == 1 else None,
            leaves_s=rng.random() if index % 3 == 2 else None,
            pause_s=0.0,
        )
        for index, ask in enumerate(chosen.asks)
    ]
    chosen = replace(chosen, asks=tuple(asks), faults=(), num_blocks=LARGE_POOL, max_num_seqs=MANY_SEQS)
    return replace(chosen, is_spared=True, spared=frozenset(chosen.members))


def _streams(rng: random.Random, chosen: Scenario) -> Scenario:
    asks = tuple(replace(_long(rng, ask), cancels_s=None, leaves_s=None, pause_s=ask.pause_s / 10) for ask in chosen.asks)
    faults: list[Fault] = []
    kinds = rng.choice((LOST_CONNECTIONS, ("sever", "drop", "cut", "cut both")))
    for ask in asks:
        for _ in range(rng.choice((0, 1, 1, 2))):
            ends = rng.choice(((ask.client, chosen.routers), (rng.choice(chosen.routers), chosen.decodes + chosen.boths)))
            pair = (ends[0], rng.choice(ends[1]))
            at_s = ask.at_s + 0.05 + rng.random() * LAST_BREAK_S
            kind = rng.choice(kinds)
            faults.append(Fault(at_s, kind, pair if rng.random() < 0.5 else pair[::-1], rng.random() * 3.0))
    kept = tuple(fault for fault in chosen.faults if fault.kind in ("kill", "freeze", "power loss"))[:1]
    if kinds is LOST_CONNECTIONS:
        kept = ()
    return replace(chosen, asks=asks, faults=(*kept, *faults), num_blocks=LARGE_POOL, max_num_seqs=16)


def _handoffs(rng: random.Random, chosen: Scenario) -> Scenario:
    """Break what carries KV a few milliseconds after a request was sent: then its KV is on its way."""
    sources, targets = (*chosen.prefills, *chosen.boths), (*chosen.decodes, *chosen.boths)
    asks = tuple(_remote(rng, ask, index) for index, ask in enumerate(chosen.asks))
    faults: list[Fault] = []
    for ask in asks:
        source = rng.choice(sources)
        others = [name for name in targets if name != source]
        if not others or rng.random() < 0.3:
            continue
        at_s = ask.at_s + FIRST_KV_S + rng.random() * rng.choice((0.02, 0.1, 0.5))
        kind = rng.choice(("sever", "sever", "drop", "cut", "cut both", "narrow link", "slow link", "kill", "freeze"))
        pair = (source, rng.choice(others if rng.random() < 0.7 else chosen.routers))
        if kind in ("kill", "freeze"):
            struck = [name for name in pair if name not in chosen.spared]
            if struck:
                faults.append(Fault(at_s, kind, (rng.choice(struck),), rng.random() * 3.0))
        else:
            amount = {"narrow link": rng.choice((2e3, 2e4, 1e5)), "slow link": rng.random() * 0.3}.get(kind, 0.0)
            faults.append(Fault(at_s, kind, pair if rng.random() < 0.5 else pair[::-1], rng.random() * 3.0, amount))
    severed = [
        Fault(START_S, "sever transfer", (rng.choice(targets),), 0.0, float(rng.randrange(120)))
        for _ in range(rng.choice((0, 1, 2)) if chosen.transports[0] != "grpc" else 0)
    ]
    return replace(chosen, asks=asks, faults=(*faults, *severed), num_blocks=LARGE_POOL)


def _long(rng: random.Random, ask: Ask) -> Ask:
    return replace(ask, max_tokens=rng.choice((30, 120, 300)), num_choices=1)


def _remote(rng: random.Random, ask: Ask, index: int) -> Ask:
    own = tuple(rng.randrange(FIRST_TOKEN, LAST_TOKEN) for _ in range(rng.choice((20, 100, 400))))
    return replace(ask, at_s=START_S + index * rng.random() * 0.3, prompt=(*ask.prompt[:16], *own), mode="remote", max_tokens=30)


_MAKERS = {CALM: _calm, STREAMS: _streams, HANDOFFS: _handoffs}
