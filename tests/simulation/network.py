"""A simulated network: connections between processes, in order within each direction, late, cut, broken.

A connection is TCP's: nothing is lost while it lives. A cut link holds what is sent (TCP sends it again) until it is whole; a
side that pings and hears nothing gives its end up. A process that dies breaks its connections; the other ends learn it over
whole links.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from tests.simulation.world import MICROSECOND, MILLISECOND, SECOND, Process, World

CLIENT_KEEPALIVE_NS = 15 * SECOND
SERVER_KEEPALIVE_NS = 40 * SECOND


class Listener(Protocol):
    """Accepts connections at an address."""

    process: Process

    def accept(self, connection: Connection) -> None: ...


@dataclass(eq=False)
class End:
    """One end of a connection. `received` gets what the peer sent; `broken` is called once, when it is known to be over."""

    process: Process
    received: Callable[..., None]
    broken: Callable[[str], None]
    is_open: bool = True
    last_arrival_ns: int = 0
    held: list[tuple[int, tuple[Any, ...]]] = field(default_factory=list)
    is_breaking: bool = False

    def deliver(self, *message: Any) -> None:
        if self.is_open:
            self.received(*message)

    def fail(self, reason: str) -> None:
        if self.is_open:
            self.is_open = False
            self.broken(reason)


def _nothing(*_: Any) -> None:
    """Ignore what arrives at an end that is not in use."""


class Connection:
    """Two ends: 0 called, 1 accepted."""

    def __init__(self, network: Network, client: Process, server: Process) -> None:
        self.network = network
        self.ends = (End(client, _nothing, _nothing), End(server, _nothing, _nothing))

    def send(self, sender: int, size: int, *message: Any) -> None:
        """Send from one end; it arrives in order."""
        source, target = self.ends[sender], self.ends[1 - sender]
        if not source.is_open:
            return
        if self.network.is_cut(source.process, target.process) or target.held:
            target.held.append((size, message))
            return
        self._carry(target, size, message)

    def release(self) -> None:
        """Send what was held, where the link is whole again."""
        for receiver in (0, 1):
            target, source = self.ends[receiver], self.ends[1 - receiver]
            if target.held and not self.network.is_cut(source.process, target.process):
                held, target.held = target.held, []
                for size, message in held:
                    self._carry(target, size, message, again_ns=self.network.world.rng.randrange(200) * MILLISECOND)
            if target.is_breaking and not self.network.is_cut(source.process, target.process):
                target.is_breaking = False
                self.break_at(receiver, "connection reset by peer")
        self.network.forget(self)

    def close(self, closer: int, reason: str) -> None:
        """Close one end; the other learns it behind all that was sent."""
        source, target = self.ends[closer], self.ends[1 - closer]
        source.is_open = False
        if self.network.is_cut(source.process, target.process):
            target.is_breaking = True
        else:
            self._carry(target, 0, None, broken=reason)
        self.network.forget(self)

    def break_at(self, receiver: int, reason: str) -> None:
        """Let one end know that the connection is over."""
        target = self.ends[receiver]
        target.process.later(self.network.latency_ns(self.ends[1 - receiver].process, target.process), target.fail, reason)

    def _carry(self, target: End, size: int, message: tuple[Any, ...] | None, again_ns: int = 0, broken: str = "") -> None:
        network = self.network
        source = self.ends[0] if target is self.ends[1] else self.ends[1]
        arrival = network.world.now_ns + network.latency_ns(source.process, target.process) + again_ns + size
        target.last_arrival_ns = arrival = max(arrival, target.last_arrival_ns + 1)
        delay = arrival - network.world.now_ns
        if message is None:
            target.process.later(delay, target.fail, broken)
        else:
            target.process.later(delay, target.deliver, *message)


class Network:
    """All links, listeners and connections. Latencies are drawn for each message."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.listeners: dict[str, Listener] = {}
        self.connections: dict[Connection, None] = {}
        self._cuts: dict[tuple[str, str], int] = {}
        self._slow: dict[tuple[str, str], int] = {}
        self._ports = 40_000

    def new_port(self) -> int:
        self._ports += 1
        return self._ports

    def latency_ns(self, source: Process, target: Process) -> int:
        """Return how long the next message takes from one process to another."""
        rng = self.world.rng
        latency = (20 + rng.getrandbits(6)) * MICROSECOND
        if not rng.getrandbits(9):
            latency += rng.randrange(30) * MILLISECOND
        return latency + self._slow.get((source.name, target.name), 0)

    def is_cut(self, source: Process, target: Process) -> bool:
        return (source.name, target.name) in self._cuts

    def cut(self, source: str, target: str) -> None:
        """Let nothing through in this direction. Ends that hear nothing give up after their keep-alive."""
        number = self._cuts[source, target] = self.world.rng.getrandbits(62)
        self.world.note("cut", source, target)
        for connection in list(self.connections):
            names = tuple(end.process.name for end in connection.ends)
            if names in ((source, target), (target, source)):
                for index, patience in ((0, CLIENT_KEEPALIVE_NS), (1, SERVER_KEEPALIVE_NS)):
                    end = connection.ends[index]
                    end.process.later(patience, self._give_up, connection, index, (source, target), number)

    def heal(self, source: str, target: str) -> None:
        if self._cuts.pop((source, target), None) is not None:
            self.world.note("healed", source, target)
            for connection in list(self.connections):
                connection.release()

    def slow(self, source: str, target: str, latency_ns: int) -> None:
        """Let each message take that much longer; 0: as usual."""
        self._slow[source, target] = latency_ns
        self.world.note("slow", source, target, latency_ns)

    def dial(self, client: Process, address: str, done: Callable[[Connection | None, str], None]) -> None:
        """Connect, and call `done` in the client's process with a connection, or with the reason why there is none."""
        listener = self.listeners.get(address)
        round_trip = 2 * self.latency_ns(client, client)
        if listener is None:
            client.later(round_trip, done, None, f"connect failed (Connection refused) to {address}")
            return
        server = listener.process
        if self.is_cut(client, server) or self.is_cut(server, client):
            return  # the caller has a limit of its own
        connection = Connection(self, client, server)
        self.connections[connection] = None
        there = self.latency_ns(client, server)
        connection.ends[1].last_arrival_ns = self.world.now_ns + there
        server.later(there, listener.accept, connection)
        back = there + self.latency_ns(server, client)
        connection.ends[0].last_arrival_ns = self.world.now_ns + back
        client.later(back, done, connection, "")

    def died(self, process: Process) -> None:
        """Break what a process had: its kernel closes its sockets."""
        for address, listener in list(self.listeners.items()):
            if listener.process is process:
                del self.listeners[address]
        for connection in list(self.connections):
            for index in (0, 1):
                if connection.ends[index].process is process:
                    connection.close(index, "connection reset by peer")

    def forget(self, connection: Connection) -> None:
        if not all(end.is_open for end in connection.ends) and not any(end.held or end.is_breaking for end in connection.ends):
            self.connections.pop(connection, None)

    def _give_up(self, connection: Connection, index: int, link: tuple[str, str], number: int) -> None:
        if self._cuts.get(link) == number and connection.ends[index].is_open:
            connection.ends[index].fail("keepalive watchdog timeout")
            connection.close(index, "keepalive watchdog timeout")
