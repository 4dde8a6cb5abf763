"""What a process asks the machine for: the time, randomness. `installed` puts the simulated ones in the place of Python's.

It has to come before the product is imported: some modules bind `time.monotonic` as a default when they are loaded.
"""

from __future__ import annotations

import os
import random
import secrets
import time
import uuid
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, cast

from pdmesh.platform import capabilities
from tests.simulation.world import CLOCK_TICK_NS, World, current_process

EPOCH_S = 1_800_000_000
_real: dict[str, Callable[..., Any]] = {}
_world: World | None = None


def enter(world: World | None) -> None:
    """Make `world` the one that code lives in; None: the real one."""
    global _world
    _world = world
    if world is not None:
        random.seed(world.seed)


def install() -> None:
    """Replace the functions, once in a process. What the system can do is tried before, on real sockets."""
    if _real:
        return
    capabilities.lacking()
    for name in ("monotonic", "monotonic_ns", "time", "time_ns", "perf_counter", "perf_counter_ns"):
        _real[name] = getattr(time, name)
    _put(time, "monotonic", lambda: _monotonic_ns() / 1e9)
    _put(time, "monotonic_ns", _monotonic_ns)
    _put(time, "perf_counter", time.monotonic)
    _put(time, "perf_counter_ns", time.monotonic_ns)
    _put(time, "time", lambda: _time_ns() / 1e9)
    _put(time, "time_ns", _time_ns)
    _put(secrets, "token_hex", lambda nbytes=32: _bytes(nbytes or 32).hex())
    _put(secrets, "token_bytes", lambda nbytes=32: _bytes(nbytes or 32))
    _put(secrets, "randbits", lambda k: _rng().getrandbits(k))
    _real["urandom"] = os.urandom
    _put(os, "urandom", _bytes)
    _put(uuid, "uuid4", lambda: uuid.UUID(bytes=_bytes(16), version=4))
    _real["submit"] = ThreadPoolExecutor.submit
    _put(ThreadPoolExecutor, "submit", _submit)
    _real["Random"] = random.Random
    _put(random, "Random", _SeededRandom)


def _put(owner: object, name: str, new: object) -> None:
    setattr(owner, name, new)


def real(name: str) -> Callable[..., Any]:
    """Return the function of Python that was replaced."""
    return _real[name]


def _submit(pool: ThreadPoolExecutor, work: Callable[..., Any], *args: Any, **options: Any) -> Future[Any]:
    """Run at once: no thread works beside a simulated world."""
    if _world is None:
        return cast("Future[Any]", _real["submit"](pool, work, *args, **options))
    future: Future[Any] = Future()
    try:
        future.set_result(work(*args, **options))
    except Exception as error:  # noqa: BLE001  the caller gets it
        future.set_exception(error)
    return future


class _SeededRandom(random.Random):
    """A generator that is seeded by the world where it would be by the machine."""

    def __init__(self, seed: Any = None) -> None:
        super().__init__(seed if seed is not None or _world is None else _world.rng.getrandbits(64))


def _monotonic_ns() -> int:
    if _world is None:
        return int(_real["monotonic_ns"]())
    _world.now_ns += CLOCK_TICK_NS
    process = current_process()
    return _world.now_ns if process is None else process.now_ns()


def _time_ns() -> int:
    if _world is None:
        return int(_real["time_ns"]())
    process = current_process()
    return EPOCH_S * 10**9 + _world.now_ns + (0 if process is None else process.wall_skew_ns)


def _rng() -> random.Random:
    return random.SystemRandom() if _world is None else _world.rng


def _bytes(size: int) -> bytes:
    return bytes(_real["urandom"](size)) if _world is None else _world.rng.randbytes(size)
