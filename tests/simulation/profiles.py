"""What a seed is about. Most are a mixture of everything; some look closely at one thing that a mixture meets rarely.

calm        clients cancel and vanish, wall clocks jump, and nothing goes wrong: every limit is tight, nothing may be tried twice
streams     connections break while tokens flow, between clients, routers and decode workers
hand-offs   prompts are long, and connections, links and prefill workers fail while their KV is on its way
deaths      one member is killed or frozen for long, everything else is well: limits are as tight as the product promises
writers     a prefill worker stands still, or hears nothing of its router, while its KV is slowly on its way: it writes on later
prefixes    prompts that begin alike come within milliseconds: blocks are shared, found and published while they are computed
"""

from __future__ import annotations

import random
from dataclasses import replace

from tests.simulation.scenario import FIRST_TOKEN, LAST_TOKEN, REQUEST_S, START_S, Ask, Fault, Scenario, mixture

CALM, STREAMS, HANDOFFS, DEATHS, WRITERS, PREFIXES = "calm", "streams", "hand-offs", "deaths", "writers", "prefixes"
SHARES = {CALM: 0.12, STREAMS: 0.16, HANDOFFS: 0.16, DEATHS: 0.1, WRITERS: 0.06, PREFIXES: 0.08}
LOST_CONNECTIONS = ("sever",)
"""Faults of which one end learns at once, or when it sends: a new connection is made before anything is given up."""
LARGE_POOL = 256
"""Blocks: enough for all requests of a run at once."""
MANY_SEQS = 32
LAST_BREAK_S = 1.5
DEAD_S = 7.0
"""Longer than any limit that a healthy member waits for."""
NUM_OUTLASTING = 1900
"""Tokens of an output that goes on for longer than a worker keeps it for a router that is gone: 3 to 8 ms each."""
BLOCK_SIZE = 16
"""Tokens of a block of KV, in all runs."""
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
            cancels_s=_soon(rng) if index % 3 == 1 else None,
            leaves_s=_soon(rng) if index % 3 == 2 else None,
            pause_s=0.0,
        )
        for index, ask in enumerate(chosen.asks)
    ]
    jumps = [fault for fault in chosen.faults if fault.kind == "wall clock jump"]
    for _ in range(rng.choice((0, 0, 1, 2))):
        at_s = rng.choice(asks).at_s + rng.random() * REQUEST_S
        by_s = rng.choice((-3600, -5, -0.5, 0.5, 5, 3600)) * rng.random()
        jumps.append(Fault(at_s, "wall clock jump", (rng.choice(chosen.members),), 0.0, by_s))
    chosen = replace(chosen, asks=tuple(asks), faults=tuple(jumps), num_blocks=LARGE_POOL, max_num_seqs=MANY_SEQS)
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


def _deaths(rng: random.Random, chosen: Scenario) -> Scenario:
    decodes, prefills, routers = ("decode-0", "decode-1"), ("prefill-0", "prefill-1"), ("router-0", "router-1")
    chosen = replace(chosen, decodes=decodes, prefills=prefills, boths=(), routers=routers, redis="none", is_static=True)
    asks = [replace(_long(rng, ask), cancels_s=None, leaves_s=None, pause_s=0.0) for ask in chosen.asks[:4]]
    struck = rng.choice((rng.choice(chosen.members), routers[0]))  # clients begin with the first router
    if struck in routers:
        asks[0] = replace(asks[0], max_tokens=NUM_OUTLASTING, prompt=asks[0].prompt[:100], ignores_eos=True)
    kind, for_s = rng.choice((("kill", 0.1), ("kill", DEAD_S), ("freeze", 1.2 + rng.random()), ("freeze", DEAD_S)))
    fault = Fault(rng.choice(asks).at_s + rng.random() * 0.5, kind, (struck,), for_s)
    spared = frozenset(chosen.members) - {struck}
    machines = tuple((name, replace(each, host=f"host of {name}")) for name, each in chosen.machines if name in chosen.members)
    return replace(
        chosen, asks=tuple(asks), faults=(fault,), is_spared=True, spared=spared, machines=machines, num_blocks=LARGE_POOL,
        max_num_seqs=16,
    )  # fmt: skip


def _writers(rng: random.Random, chosen: Scenario) -> Scenario:
    """Have the KV of an attempt on its way while the next one begins, and the first writer go on when that one is at it."""
    prefills = ("prefill-0", "prefill-1", "prefill-2")[: rng.choice((2, 2, 3))]
    chosen = replace(chosen, prefills=prefills, boths=(), decodes=chosen.decodes[:1], spared=frozenset(), is_spared=False)
    late = rng.random() < 0.6  # it stands still before it has told the decode worker of the transfer, and the next one is slow
    asks = tuple(_remote(rng, ask, index) for index, ask in enumerate(chosen.asks[: 1 if late else 3]))
    asks = tuple(replace(ask, cancels_s=None, leaves_s=None) for ask in asks)
    faults: list[Fault] = []
    rates = (5e3, 1e4, 2e4, 5e4)
    for source in prefills:
        faults += [Fault(START_S - 0.2, "narrow link", (source, decode), 8.0, rng.choice(rates)) for decode in chosen.decodes]
    for ask in asks:
        source, for_s = rng.choice(prefills), (0.4 if late else 0.9) + rng.random() * (1.0 if late else 2.5)
        at_s = ask.at_s + FIRST_KV_S + rng.random() * (0.006 if late else 0.4)
        for router in chosen.routers:
            faults.append(Fault(at_s, "cut both", (source, router), for_s + 2.0 * late))
        if late or rng.random() < 0.6:
            faults.append(Fault(at_s + rng.random() * (0.003 if late else 0.1), "freeze", (source,), for_s))
        if late:
            others = [name for name in prefills if name != source]
            faults += [Fault(ask.at_s, "slow process", (name,), 4.0, rng.choice((20.0, 50.0))) for name in others]
    if rng.random() < 0.5:
        chosen = replace(chosen, transports=rng.choice((("grpc",), ("tcp",))))
    return replace(chosen, asks=asks, faults=tuple(faults), num_blocks=LARGE_POOL)


def _prefixes(rng: random.Random, chosen: Scenario) -> Scenario:
    is_long = rng.random() < 0.6  # many steps compute it, each up to another place within a block
    chosen = replace(chosen, num_blocks=LARGE_POOL if is_long else max(chosen.num_blocks, 48))
    length = rng.randrange(200, 600) if is_long else rng.randrange(15, 200)
    shared = tuple(rng.randrange(FIRST_TOKEN, LAST_TOKEN) for _ in range(length))
    burst_s, first = rng.choice((0.004, 0.02, 0.1, 1.0)), chosen.asks[0]
    asks = []
    for number in range(rng.randrange(4, 9)):
        own = tuple(rng.randrange(FIRST_TOKEN, LAST_TOKEN) for _ in range(rng.choice((0, 1, 2, 17))))
        prompt = (*shared[: rng.choice((length, length, rng.randrange(1, length)))], *own)
        up_to_block = BLOCK_SIZE - len(prompt) % BLOCK_SIZE  # the last token of an output is never computed
        asks.append(
            replace(
                first, at_s=START_S + rng.random() * burst_s, prompt=prompt,
                max_tokens=rng.choice((2, 8, 30, up_to_block, up_to_block + BLOCK_SIZE)), number=number,
                temperature=0.0, num_choices=rng.choice((1, 1, 2)), leaves_s=None, pause_s=0.0,
                cancels_s=rng.random() * (0.1 if is_long else 0.03) if rng.random() < 0.5 else None,  # computed in part
                mode=rng.choice(("local", "remote", None)),
            )
        )  # fmt: skip
    asks += [_next_turn(rng, ask, len(asks) + index) for index, ask in enumerate(rng.sample(asks, 2))]
    kept = tuple(fault for fault in chosen.faults if rng.random() < 0.3)
    gone = {ask.client for ask in chosen.asks[len(asks) :]}
    return replace(chosen, asks=tuple(asks), faults=tuple(fault for fault in kept if not gone.intersection(fault.targets)))


def _next_turn(rng: random.Random, ask: Ask, number: int) -> Ask:
    """Return a request whose prompt is another one with its answer, and a little more."""
    from tests.simulation import oracle  # imports the engine

    told = oracle.answer(ask, 0)
    prompt = (*ask.prompt, *told, rng.randrange(FIRST_TOKEN, LAST_TOKEN))
    at_s = ask.at_s + rng.choice((0.1, 0.5, 1.0))
    return replace(ask, at_s=at_s, prompt=prompt, max_tokens=8, num_choices=1, cancels_s=None, number=number)


def _soon(rng: random.Random) -> float:
    """Return after how long a client goes: often while its request is being handed on."""
    return rng.random() * rng.choice((1.0, 0.02))


def _long(rng: random.Random, ask: Ask) -> Ask:
    return replace(ask, max_tokens=rng.choice((30, 120, 300)), num_choices=1)


def _remote(rng: random.Random, ask: Ask, index: int) -> Ask:
    own = tuple(rng.randrange(FIRST_TOKEN, LAST_TOKEN) for _ in range(rng.choice((20, 100, 400))))
    return replace(ask, at_s=START_S + index * rng.random() * 0.3, prompt=(*ask.prompt[:16], *own), mode="remote", max_tokens=30)


_MAKERS = {
    CALM: _calm,
    STREAMS: _streams,
    HANDOFFS: _handoffs,
    DEATHS: _deaths,
    WRITERS: _writers,
    PREFIXES: _prefixes,
}
