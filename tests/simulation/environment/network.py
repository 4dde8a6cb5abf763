"""A simulated network: connections between processes, in order within each direction, late, cut, broken.

A connection is TCP's: nothing is lost while it lives. A cut link holds what is sent (TCP sends it again) until it is whole; a
side that pings and hears nothing gives its end up, also where the peer stands still. A process that dies breaks its connections;
the other ends learn it over whole links. A severed connection loses what is on its way, and its ends learn of it at different
times: at their next message, or by their keep-alive; where it was dropped, by that alone. A host without power answers nothing,
and closes nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from tests.simulation.world import MICROSECOND, MILLISECOND, SECOND, Process, World

NO_PINGS_NS = 7200 * SECOND
"""After how long a gRPC that was told nothing asks whether its peer lives, and longer than any run."""
RETRANSMIT_NS = 200 * MILLISECOND
LONGEST_RETRANSMIT_NS = 2 * SECOND


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
    early: list[tuple[Any, ...]] = field(default_factory=list)  # what came before the process took the connection
    reason: str = ""  # why it is not open
    is_blocked: Callable[[], bool] = field(default=lambda: False)  # by a peer that has not read; it then probes the peer

    def deliver(self, *message: Any) -> None:
        if not self.is_open:
            return
        if self.received is _nothing:
            self.early.append(message)
        else:
            self.received(*message)

    def fail(self, reason: str) -> None:
        if self.is_open:
            self.is_open = False
            self.reason = reason
            self.broken(reason)


def _nothing(*_: Any) -> None:
    """Ignore what arrives at an end that is not in use."""


class Connection:
    """Two ends: 0 called, 1 accepted."""

    def __init__(self, network: Network, client: Process, server: Process, *, is_local: bool = False) -> None:
        self.network = network
        self.is_local = is_local  # within a host: no link carries it
        self.is_severed = False
        self.is_dropped = False
        self.pings = True  # gRPC does, sockets do not
        self.patience_ns = [NO_PINGS_NS, NO_PINGS_NS]  # of each end, until it gives up a peer that it does not hear
        self.ends = (End(client, _nothing, _nothing), End(server, _nothing, _nothing))

    def send(self, sender: int, size: int, *message: Any) -> None:
        """Send from one end; it arrives in order."""
        source, target = self.ends[sender], self.ends[1 - sender]
        if not source.is_open:
            return
        if not self.pings:
            self.network.count_segment(self)
        if self.is_dropped:
            return
        if self.is_severed:
            self._retransmit(sender)
            return
        if self._is_cut(source, target) or target.held:
            target.held.append((size, message))
            return
        self._carry(target, size, message)

    def sever(self, *, is_dropped: bool = False) -> None:
        """Lose what is on its way, and all that is sent later. Each end learns it when it sends, or by its keep-alive; where it
        `is_dropped`, as by a firewall that forgets it, by its keep-alive alone."""
        self.is_severed, self.is_dropped = True, is_dropped
        for index, end in enumerate(self.ends):
            end.held.clear()
            if self.pings:
                end.process.later(self.patience_ns[index], end.fail, "keepalive watchdog timeout")
            if is_dropped:
                continue
            if self.ends[1 - index].last_arrival_ns > self.network.world.now_ns or end.is_blocked():
                end.process.later(RETRANSMIT_NS, self._retransmit, index)

    def _retransmit(self, sender: int, pause_ns: int = RETRANSMIT_NS) -> None:
        """Send again what was lost, until the other host answers that it knows no such connection."""
        end, target = self.ends[sender], self.ends[1 - sender]
        if end.is_open and self.network.is_dark(target.process.name):
            end.process.later(pause_ns, self._retransmit, sender, min(2 * pause_ns, LONGEST_RETRANSMIT_NS))
        elif end.is_open:
            self.break_at(sender, "connection reset by peer")

    def _is_cut(self, source: End, target: End) -> bool:
        return not self.is_local and self.network.is_cut(source.process, target.process)

    def release(self) -> None:
        """Send what was held, where the link is whole again."""
        for receiver in (0, 1):
            target, source = self.ends[receiver], self.ends[1 - receiver]
            if target.held and not self._is_cut(source, target):
                held, target.held = target.held, []
                for size, message in held:
                    self._carry(target, size, message, again_ns=self.network.world.rng.randrange(200) * MILLISECOND)
            if target.is_breaking and not self._is_cut(source, target):
                target.is_breaking = False
                self.break_at(receiver, "connection reset by peer")
        self.network.forget(self)

    def close(self, closer: int, reason: str) -> None:
        """Close one end; the other learns it behind all that was sent."""
        source, target = self.ends[closer], self.ends[1 - closer]
        source.is_open = False
        if self.is_severed:
            pass  # it does not come through; the other end learns it when it sends
        elif self._is_cut(source, target):
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
        busy_ns = 0 if self.is_local else size * network.ns_per_byte(source.process, target.process)
        target.last_arrival_ns = arrival = max(arrival, target.last_arrival_ns + 1 + busy_ns)
        delay = arrival - network.world.now_ns
        if message is None:
            target.process.later(delay, self._arrive, target.fail, broken)
        else:
            target.process.later(delay, self._arrive, target.deliver, *message)

    def _arrive(self, what: Callable[..., None], *message: Any) -> None:
        if not self.is_severed:
            what(*message)


class Network:
    """All links, listeners and connections. Latencies are drawn for each message."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.listeners: dict[str, Listener] = {}
        self.connections: dict[Connection, None] = {}
        self._cuts: dict[tuple[str, str], int] = {}
        self._slow: dict[tuple[str, str], int] = {}
        self._narrow: dict[tuple[str, str], int] = {}
        self._dark: set[str] = set()  # names of processes whose host is without power
        self.hosts: dict[str, str] = {}  # names of processes by IP address
        self._ports = 40_000
        self._armed: dict[str, int] = {}

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
                for index, end in enumerate(connection.ends):
                    patience_ns = connection.patience_ns[index]
                    end.process.later(patience_ns, self._give_up, connection, index, (source, target), number)

    def heal(self, source: str, target: str) -> None:
        if self._cuts.pop((source, target), None) is not None:
            self.world.note("healed", source, target)
            for connection in list(self.connections):
                connection.release()

    def slow(self, source: str, target: str, latency_ns: int) -> None:
        """Let each message take that much longer; 0: as usual."""
        self._slow[source, target] = latency_ns
        self.world.note("slow", source, target, latency_ns)

    def narrow(self, source: str, target: str, ns_per_byte: int) -> None:
        """Let each byte take that long, behind those before it; 0: as usual."""
        self._narrow[source, target] = ns_per_byte
        self.world.note("narrow", source, target, ns_per_byte)

    def ns_per_byte(self, source: Process, target: Process) -> int:
        return self._narrow.get((source.name, target.name), 0)

    def is_dark(self, name: str) -> bool:
        return name in self._dark

    def sever(self, one: str, other: str) -> None:
        """Sever the connections between two processes; one end of each, by chance, learns it at once."""
        self.world.note("severed", one, other)
        for connection in self._between(one, other):
            connection.sever()
            end = connection.ends[self.world.rng.getrandbits(1)]
            end.process.later(self.latency_ns(end.process, end.process), end.fail, "connection reset by peer")

    def drop(self, one: str, other: str) -> None:
        """Have the connections between two processes carry nothing more, and tell nobody."""
        self.world.note("dropped", one, other)
        for connection in self._between(one, other):
            connection.sever(is_dropped=True)

    def froze(self, process: Process) -> None:
        """Have the peers of a process that stands still give it up, as pings are answered by the process itself."""
        since = process.num_freezes
        for connection in list(self.connections):
            for index, end in enumerate(connection.ends):
                if connection.pings and connection.ends[1 - index].process is process and end.process is not process:
                    end.process.later(connection.patience_ns[index], self._give_up_frozen, connection, index, since)

    def _give_up_frozen(self, connection: Connection, index: int, since: int) -> None:
        end, process = connection.ends[index], connection.ends[1 - index].process
        if process.is_frozen and process.num_freezes == since and end.is_open:
            end.fail("keepalive watchdog timeout")
            connection.close(index, "keepalive watchdog timeout")

    def sever_at_segment(self, name: str, number: int) -> None:
        """When sockets of a process send or get the segment of this number, from 0, sever the connections with the other end."""
        self._armed[name] = number

    def count_segment(self, connection: Connection) -> None:
        """Note that a socket sends a segment."""
        if not self._armed or connection.is_local:
            return
        names = [end.process.name for end in connection.ends]
        for name in names:
            if name in self._armed:
                self._armed[name] -= 1
                if self._armed[name] < 0:
                    del self._armed[name]
                    self.sever(names[0], names[1])

    def _between(self, one: str, other: str) -> list[Connection]:
        return [
            connection
            for connection in self.connections
            if not connection.is_local
            and not connection.is_severed
            and {end.process.name for end in connection.ends} == {one, other}
        ]

    def lose_power(self, process: Process) -> None:
        """Let a process vanish with its host, whose kernel closes nothing."""
        self._dark.add(process.name)
        self._close_listeners(process)
        for connection in list(self.connections):
            if any(end.process is process for end in connection.ends):
                connection.sever()
                for end in connection.ends:
                    end.is_open = end.is_open and end.process is not process

    def get_power(self, name: str) -> None:
        """Let the host answer again: it knows no connection of before."""
        self._dark.discard(name)

    def dial(
        self, client: Process, address: str, done: Callable[[Connection | None, str], None], *, is_grpc: bool = False
    ) -> None:
        """Connect, and call `done` in the client's process with a connection, or with the reason why there is none.

        The kernel accepts for a process that stands still. For gRPC that is no connection, as no settings come."""
        listener = self.listeners.get(address)
        round_trip = 2 * self.latency_ns(client, client)
        if listener is None and self.is_dark(self.hosts.get(address.rpartition(":")[0], "")):
            return
        if listener is None:
            client.later(round_trip, done, None, f"connect failed (Connection refused) to {address}")
            return
        server = listener.process
        is_local = address.startswith("unix:")
        if not is_local and (self.is_cut(client, server) or self.is_cut(server, client)):
            return  # the caller has a limit of its own
        if is_grpc and server.is_frozen:
            return
        connection = Connection(self, client, server, is_local=is_local)
        self.connections[connection] = None
        there = self.latency_ns(client, server)
        connection.ends[1].last_arrival_ns = self.world.now_ns + there
        server.later(there, listener.accept, connection)
        back = there + self.latency_ns(server, client)
        connection.ends[0].last_arrival_ns = self.world.now_ns + back
        client.later(back, done, connection, "")

    def died(self, process: Process) -> None:
        """Break what a process had: its kernel closes its sockets."""
        self._close_listeners(process)
        for connection in list(self.connections):
            for index in (0, 1):
                if connection.ends[index].process is process:
                    connection.close(index, "connection reset by peer")

    def _close_listeners(self, process: Process) -> None:
        for address, listener in list(self.listeners.items()):
            if listener.process is process:
                del self.listeners[address]

    def forget(self, connection: Connection) -> None:
        if not all(end.is_open for end in connection.ends) and not any(end.held or end.is_breaking for end in connection.ends):
            self.connections.pop(connection, None)

    def _give_up(self, connection: Connection, index: int, link: tuple[str, str], number: int) -> None:
        if self._cuts.get(link) == number and connection.ends[index].is_open:
            connection.ends[index].fail("keepalive watchdog timeout")
            connection.close(index, "keepalive watchdog timeout")
