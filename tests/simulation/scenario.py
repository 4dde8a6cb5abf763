"""What happens in a run, chosen by its seed: the mesh's shape, requests, and faults."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace

FIRST_TOKEN, LAST_TOKEN = 64, 300


@dataclass(frozen=True)
class Ask:
    """A request of a client process of its own. `leaves_s`: after how long its process is killed, `cancels_s`: it cancels."""

    at_s: float
    prompt: tuple[int, ...]
    max_tokens: int
    seed: int
    temperature: float
    num_choices: int
    mode: str | None
    cancels_s: float | None = None
    leaves_s: float | None = None
    pause_s: float = 0.0  # between two events that it reads
    number: int = 0
    ignores_eos: bool = False

    @property
    def client(self) -> str:
        """Return the name of its client's process."""
        return f"client-{self.number}"


@dataclass(frozen=True)
class Fault:
    """Something that goes wrong for a while. `targets` are names of members; links have two.

    `amount`: seconds of a latency or of a jump, bytes per second, times as slow, or at which segment, from 0, a transfer is
    severed."""

    at_s: float
    kind: str
    targets: tuple[str, ...]
    for_s: float
    amount: float = 0.0


@dataclass(frozen=True)
class Machine:
    """Where a member runs: its host, by how many millionths its monotonic clock is fast, how wrong its wall clock is."""

    host: str = "host"
    clock_ppm: int = 0
    wall_skew_ms: int = 0


@dataclass(frozen=True)
class Scenario:
    """One run. `spared`: members that nothing happens to, one of each kind, or none.

    `transports`: what workers offer for KV. `redis`: none, or what is left of its keys when it starts again: saved or lost.
    `is_static`: routers know the workers without it. `profile`: what it is about (profiles.py)."""

    seed: int
    decodes: tuple[str, ...]
    prefills: tuple[str, ...]
    boths: tuple[str, ...]
    routers: tuple[str, ...]
    num_blocks: int
    max_num_seqs: int
    asks: tuple[Ask, ...]
    faults: tuple[Fault, ...]
    is_spared: bool
    spared: frozenset[str] = field(default=frozenset())
    transports: tuple[str, ...] = ("grpc",)
    redis: str = "none"
    is_static: bool = True
    machines: tuple[tuple[str, Machine], ...] = ()
    profile: str = "mixture"

    @property
    def members(self) -> tuple[str, ...]:
        """Return the names of all workers and routers."""
        return (*self.decodes, *self.prefills, *self.boths, *self.routers)

    @property
    def ends_s(self) -> float:
        """Return when all faults are over and all requests were sent."""
        return max([fault.at_s + fault.for_s for fault in self.faults] + [ask.at_s for ask in self.asks])


START_S = 1.5
SPAN_S = 4.0
LONGEST_FAULT_S = 5.0
BREAKS_S = 1.0
"""A stream that is silent for so long is broken, and may come back for two more."""
REQUEST_S = 0.3
"""What most requests take."""


def mixture(seed: int) -> Scenario:
    """Return a scenario with a bit of everything."""
    rng = random.Random(seed * 2 + 1)
    decodes = tuple(f"decode-{index}" for index in range(rng.randrange(1, 4)))
    prefills = tuple(f"prefill-{index}" for index in range(rng.randrange(1, 3)))
    boths = ("both-0",) if not rng.randrange(4) else ()
    routers = tuple(f"router-{index}" for index in range(rng.choice((1, 1, 2))))
    is_spared = rng.random() < 0.7
    spared = frozenset({decodes[0], prefills[0], routers[0]} if is_spared else ())
    num_blocks = rng.choice((12, 24, 64))
    faults = tuple(_fault(rng, (*decodes, *prefills, *boths), routers, spared) for _ in range(rng.choice((0, 1, 1, 2, 2, 3, 4))))
    max_num_seqs = rng.choice((4, 16))
    asks = tuple(_ask(rng, num_blocks * 16) for _ in range(rng.randrange(1, 8)))
    chosen = Scenario(
        seed=seed,
        decodes=decodes,
        prefills=prefills,
        boths=boths,
        routers=routers,
        num_blocks=num_blocks,
        max_num_seqs=max_num_seqs,
        asks=asks,
        faults=tuple(_in_the_middle(rng, fault, asks) for fault in faults if fault is not None),
        is_spared=is_spared,
        spared=spared,
    )
    chosen = _with_environment(random.Random(f"environment of {seed}"), chosen)
    return replace(chosen, asks=tuple(replace(ask, number=number) for number, ask in enumerate(chosen.asks)))


def _ask(rng: random.Random, room: int) -> Ask:
    shared = tuple(range(FIRST_TOKEN, FIRST_TOKEN + rng.choice((0, 16, 40))))
    own = tuple(rng.randrange(FIRST_TOKEN, LAST_TOKEN) for _ in range(rng.choice((1, 3, 17, 60))))
    prompt = (shared + own)[: room // 3]
    odd = rng.random()
    num_choices = rng.choice((1, 1, 1, 1, 2))
    return Ask(
        at_s=START_S + rng.random() * SPAN_S,
        prompt=prompt,
        max_tokens=rng.choice((1, 2, 8, 30, 60, 120 if num_choices == 1 else 60)),
        seed=rng.randrange(1, 1000),
        temperature=rng.choice((0.0, 1.0)),
        num_choices=num_choices,
        mode=rng.choice((None, None, "remote", "local")),
        cancels_s=rng.random() if odd < 0.1 else None,
        leaves_s=rng.random() if 0.1 <= odd < 0.2 else None,
        pause_s=rng.random() * 0.2 if 0.2 <= odd < 0.3 else 0.0,
    )


def _in_the_middle(rng: random.Random, fault: Fault, asks: tuple[Ask, ...]) -> Fault:
    """Return the fault, most often moved to where a request is under way: most of the time there is none."""
    return replace(fault, at_s=rng.choice(asks).at_s + rng.random() * REQUEST_S) if rng.random() < 0.7 else fault


def _fault(rng: random.Random, workers: tuple[str, ...], routers: tuple[str, ...], spared: frozenset[str]) -> Fault | None:
    """Return a fault of members that are not spared; None: there are none."""
    struck = [name for name in (*workers, *routers) if name not in spared]
    if not struck:
        return None
    kind = rng.choice(("kill", "kill", "freeze", "freeze", "cut", "cut", "cut both", "slow link", "slow process"))
    target = rng.choice(struck)
    at_s, for_s = START_S + rng.random() * SPAN_S, rng.choice((0.05, 0.5, 2.0, LONGEST_FAULT_S)) * rng.random()
    targets: tuple[str, ...] = (target,)
    if kind in ("cut", "cut both", "slow link"):
        others = routers if target not in routers and rng.random() < 0.5 else (*workers, *routers)
        other = rng.choice([name for name in others if name != target] or [target])
        if other == target:
            return None
        targets = (target, other) if rng.random() < 0.5 else (other, target)
        if kind != "slow link" and rng.random() < 0.5:
            for_s = BREAKS_S + rng.random() * 2.0
    amount = {"slow link": rng.random() * 0.3, "slow process": 2 + rng.random() * 30}.get(kind, 0.0)
    return Fault(at_s, kind, targets, for_s, amount)


TRANSPORTS = (("grpc",), ("tcp",), ("tcp",), ("tcp", "grpc"), ("shm", "tcp"), ("shm", "tcp", "grpc"))


def _with_environment(rng: random.Random, chosen: Scenario) -> Scenario:
    """Return the scenario with machines, transports, a Redis and their faults, and perhaps pools that are too small."""
    if rng.random() < 0.25:
        chosen = _with_small_pools(rng, chosen)
    members = (*chosen.decodes, *chosen.prefills, *chosen.boths, *chosen.routers)
    redis = rng.choice(("none", "none", "none", "saved", "lost"))
    is_static = redis == "none" or rng.random() < 0.4
    if redis != "none":
        members = (*members, "redis")
        if len(chosen.routers) == 1 and rng.random() < 0.6:
            chosen = replace(chosen, routers=(*chosen.routers, "router-1"))
            members = (*members, "router-1")
    machines = _machines(rng, members)
    asks = tuple(replace(ask, mode="remote") if rng.random() < 0.4 else ask for ask in chosen.asks)
    chosen = replace(
        chosen,
        asks=asks,
        transports=rng.choice(TRANSPORTS),
        redis=redis,
        is_static=is_static,
        machines=tuple(machines.items()),
    )
    faults = [_machine_fault(rng, members, machines, chosen.spared) for _ in range(rng.choice((0, 0, 1, 1, 2, 3)))]
    has_sockets = "grpc" not in chosen.transports[:1]
    struck = [name for name in (*chosen.decodes, *chosen.prefills, *chosen.boths) if name not in chosen.spared]
    for _ in range(rng.choice((0, 1, 2)) if has_sockets and struck else 0):
        segments = rng.choice((4, 15, 60))
        faults.append(Fault(START_S, "sever transfer", (rng.choice(struck),), 0.0, float(rng.randrange(segments))))
    moved = (fault if fault.kind == "sever transfer" else _in_the_middle(rng, fault, chosen.asks) for fault in faults if fault)
    return replace(chosen, faults=(*chosen.faults, *moved))


def _machines(rng: random.Random, members: tuple[str, ...]) -> dict[str, Machine]:
    num_hosts = rng.randrange(1, len(members) + 1)
    has_good_clocks = rng.random() < 0.5
    return {
        name: Machine(
            host=f"host-{rng.randrange(num_hosts)}",
            clock_ppm=0 if has_good_clocks else rng.randrange(-20_000, 20_000),
            wall_skew_ms=0 if has_good_clocks else rng.randrange(-60_000, 60_000),
        )
        for name in members
    }


def _with_small_pools(rng: random.Random, chosen: Scenario) -> Scenario:
    """Return it with pools of a few blocks and many requests at once, which grow: sequences are preempted."""
    num_blocks = rng.choice((6, 8, 10))
    room = num_blocks * 16 // 2
    asks = [
        replace(ask, at_s=START_S + rng.random() * 0.2, prompt=ask.prompt[: room // 2], max_tokens=room, num_choices=1)
        for ask in (*chosen.asks, *(_ask(rng, room) for _ in range(2 + rng.randrange(8))))
    ]
    left = {chosen.decodes[0], *chosen.prefills, *chosen.routers}
    faults = tuple(fault for fault in chosen.faults if left.issuperset(fault.targets))
    decodes = chosen.decodes[:1]
    return replace(chosen, num_blocks=num_blocks, max_num_seqs=16, decodes=decodes, boths=(), asks=tuple(asks), faults=faults)


def _machine_fault(
    rng: random.Random, members: tuple[str, ...], machines: dict[str, Machine], spared: frozenset[str]
) -> Fault | None:
    """Return a fault of hosts, connections, clocks or Redis; None: there are none that it could strike."""
    kind = rng.choice(("power loss", "sever", "sever", "narrow link", "wall clock jump", "redis", "redis"))
    at_s, for_s = START_S + rng.random() * SPAN_S, rng.choice((0.05, 0.5, 2.0, LONGEST_FAULT_S)) * rng.random()
    if kind == "redis":
        if "redis" not in members:
            return None
        kind = rng.choice(("kill", "kill", "freeze", "late redis", "late redis"))
        return Fault(at_s, kind, ("redis",), for_s, rng.choice((0.02, 0.3, 0.9, 2.0)) * rng.random())
    if kind == "wall clock jump":
        return Fault(at_s, kind, (rng.choice(members),), 0.0, rng.choice((-3600, -5, -0.5, 0.5, 5, 3600)) * rng.random())
    struck = [name for name in members if name not in spared]
    if kind == "power loss":
        dark = {machines[name].host for name in struck} - {machines[name].host for name in spared}
        if not dark:
            return None
        host = rng.choice(sorted(dark))
        return Fault(at_s, kind, tuple(name for name in members if machines[name].host == host), for_s)
    if not struck:
        return None
    target = rng.choice(struck)
    others = [name for name in members if name != target]
    if rng.random() < 0.6:  # the link that KV takes
        kinds = ("decode", "both") if target.startswith("prefill") else ("prefill", "both")
        others = [name for name in others if name.startswith(kinds)] or others
    targets = (target, rng.choice(others))
    amount = rng.choice((2e4, 1e5, 1e6)) if kind == "narrow link" else 0.0
    return Fault(at_s, kind, targets if rng.random() < 0.5 else targets[::-1], for_s, amount)
