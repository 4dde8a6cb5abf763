"""Other loads from given arrivals: faster, swinging, with a burst, longer, without end. Pure, and lazy: millions pass one by one
(by `yield`: a compiler makes lists of generator expressions, simulator/compiled.py).

Times are warped, never drawn anew: the order stays, and so does the clumping that makes real traces hard.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from heapq import merge
from itertools import islice

from pdmesh.simulator.arrivals import Arrival

Warp = Callable[[float], float]


def at_rate(arrivals: Iterable[Arrival], factor: float) -> Iterator[Arrival]:
    """`factor` times as many in a second."""
    return warped(arrivals, lambda at_s: at_s / factor)


def warped(arrivals: Iterable[Arrival], warp: Warp) -> Iterator[Arrival]:
    """Each at `warp` of its time, which must not fall."""
    for arrival in arrivals:
        yield arrival._replace(at_s=warp(arrival.at_s))


def swing(period_s: float, depth: float) -> Warp:
    """Day and night: a steady stream gets the rate 1 + depth · sin(2π t / period) times its own, so it starts in the middle and
    rises. `depth` is in [0, 1)."""
    wave = 2 * math.pi / period_s

    def count(at_s: float) -> float:
        """How much of the steady stream has come by `at_s`."""
        return at_s + depth / wave * (1 - math.cos(wave * at_s))

    def warp(steady_s: float) -> float:
        low, high, at_s = max(0.0, steady_s - 2 * depth / wave), steady_s, steady_s
        for _ in range(64):  # Newton's method, kept between bounds
            error = count(at_s) - steady_s
            low, high = (at_s, high) if error < 0 else (low, at_s)
            closer = at_s - error / (1 + depth * math.sin(wave * at_s))
            closer = closer if low <= closer <= high else (low + high) / 2
            if abs(closer - at_s) <= 1e-12 * high:
                return closer
            at_s = closer
        return at_s

    return warp


def burst(start_s: float, factor: float, length_s: float = 60.0) -> Warp:
    """From `start_s` on `factor` times as many for `length_s`; then as before."""
    taken_s = factor * length_s  # of the steady stream

    def warp(steady_s: float) -> float:
        if steady_s <= start_s:
            return steady_s
        if steady_s < start_s + taken_s:
            return start_s + (steady_s - start_s) / factor
        return steady_s - taken_s + length_s

    return warp


def repeated(again: Callable[[], Iterable[Arrival]], num_requests: int) -> Iterator[Arrival]:
    """`num_requests` of what `again` gives, from its beginning as often as needed: each time after the last, at the mean
    distance. Prefix names of each round are its own: a conversation does not come back word by word."""
    offset_s, num_left, num_names = 0.0, num_requests, 0
    while num_left:
        latest, count, largest = 0.0, 0, -1
        for arrival in islice(again(), num_left):
            latest, count = arrival.at_s, count + 1
            largest = max(largest, *arrival.hashes) if arrival.hashes else largest
            names = tuple([name + num_names for name in arrival.hashes]) if num_names else arrival.hashes
            yield arrival._replace(at_s=arrival.at_s + offset_s, hashes=names)
        if not count:
            return
        offset_s, num_left, num_names = offset_s + latest + latest / count, num_left - count, num_names + largest + 1


def together(streams: Iterable[Iterable[Arrival]]) -> Iterator[Arrival]:
    """All of them at once. Prefix names of each are its own."""
    streams = list(streams)
    own = [_named(stream, number, len(streams)) for number, stream in enumerate(streams)]
    return merge(*own, key=lambda arrival: arrival.at_s)


def _named(arrivals: Iterable[Arrival], number: int, of: int) -> Iterator[Arrival]:
    for arrival in arrivals:
        yield arrival._replace(hashes=tuple([name * of + number for name in arrival.hashes]))


def lengths(arrivals: Iterable[Arrival], *, inputs: float = 1.0, outputs: float = 1.0, max_context: int = 0) -> Iterator[Arrival]:
    """Lengths times these; cut to `max_context` (0: not), the output first, to at least one token. A prompt whose length changes
    keeps the names of the blocks that it still fills."""
    for arrival in arrivals:
        num_input, num_output = max(1, round(arrival.num_input * inputs)), max(1, round(arrival.num_output * outputs))
        if max_context:
            num_input = min(num_input, max_context - 1)
            num_output = min(num_output, max_context - num_input)
        kept = len(arrival.hashes) * num_input // arrival.num_input if num_input < arrival.num_input else len(arrival.hashes)
        yield arrival._replace(num_input=num_input, num_output=num_output, hashes=arrival.hashes[:kept])


def mean_rate(arrivals: Iterable[Arrival]) -> float:
    """Requests in a second, over all of them; 0 for fewer than two, or without any time between."""
    count, latest = 0, 0.0
    for arrival in arrivals:
        count, latest = count + 1, arrival.at_s
    return (count - 1) / latest if latest else 0.0
