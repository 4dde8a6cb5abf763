"""Clients that ask without pause over every protocol, and what each makes of its request: wait, leave, lapse, err, flood."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress

import grpc

from pdmesh.errors import MeshError
from tests.soak.agents import Agents
from tests.soak.cases import Case, Cases, next_turn
from tests.soak.ledger import Ledger, has_lapsed, is_about, is_hopeless, is_refusal
from tests.soak.sides.base import Answer, MakeSide, Side

TIMEOUT_S = 120.0  # of a request that should be answered: to reach it is an error
BURST_PERIOD_S = 20.0
NUM_FILLING = 1400  # requests with a schema each: more than two decode workers remember
_LEAD_S = 0.5  # what was sent before a burst has arrived by then
_WEIGHTS = {
    "known": 38,
    "fresh": 28,
    "conversation": 3,
    "leave at once": 7,
    "leave midway": 7,
    "drop": 3,
    "lapse": 6,
    "malformed": 8,
    "agent": 6,
}


class Traffic:
    """`num_clients` clients with one request at a time, and every `BURST_PERIOD_S` a burst of `burst_size` at once. Nobody else
    starts a request during a burst: whoever is refused belongs to it."""

    def __init__(
        self, sides: Sequence[MakeSide], ledger: Ledger, *, url: str, seed: int, num_clients: int, burst_size: int
    ) -> None:
        self._make = sides
        self._sides: list[Side] = []
        self._ledger = ledger
        self._rng = random.Random(seed)
        self._cases = Cases(seed)
        self._num_clients = num_clients
        self._burst_size = burst_size
        self._open = asyncio.Event()
        self._agents = Agents(url, ledger, self._open, random.Random(f"agents of {seed}"))
        self._acts: dict[str, Callable[[int], Awaitable[None]]] = {
            "known": self._known,
            "fresh": self._fresh,
            "conversation": self._converse,
            "leave at once": self._leave_at_once,
            "leave midway": self._leave_midway,
            "drop": self._drop,
            "lapse": self._lapse,
            "malformed": self._err,
            "agent": lambda _: self._agents.act(),
        }

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Clients ask within the block; leaving it waits until the last answer is there. Before it, the memory of compiled
        grammars is filled: by itself that would take long, and look like a leak."""
        stop = asyncio.Event()
        self._sides = [make() for make in self._make]
        await self._fill_caches()
        self._open.set()
        tasks = [asyncio.create_task(self._ask_until(stop)) for _ in range(self._num_clients)]
        tasks.append(asyncio.create_task(self._flood_until(stop)))
        try:
            yield
        finally:
            stop.set()
            await asyncio.gather(*tasks)
            for side in self._sides:
                await side.close()
            await self._agents.close()

    async def _fill_caches(self) -> None:
        numbers = iter(range(NUM_FILLING))

        async def ask() -> None:
            for number in numbers:
                await self._complete(number % len(self._sides), self._cases.short_answer())

        await asyncio.gather(*(ask() for _ in range(self._num_clients)))

    async def _ask_until(self, stop: asyncio.Event) -> None:
        names, weights = list(_WEIGHTS), list(_WEIGHTS.values())
        while not stop.is_set():
            (name,) = self._rng.choices(names, weights)
            await self._open.wait()
            await self._acts[name](self._rng.randrange(len(self._sides)))

    async def _known(self, at: int) -> None:
        await self._complete(at, self._cases.known())

    async def _fresh(self, at: int) -> None:
        await self._complete(at, self._cases.fresh())

    async def _converse(self, at: int) -> None:
        """All turns, each over another protocol; the answers become part of the next prompt, so the protocol must tell text."""
        case: Case | None = self._cases.conversation()
        while case is not None:
            await self._open.wait()
            answer = await self._complete(at, case)
            if answer is None or not answer.has_text:
                return
            case = next_turn(case, answer.choices[0].text)
            at = self._rng.randrange(len(self._sides))

    async def _complete(self, at: int, case: Case) -> Answer | None:
        side = self._sides[at]
        self._ledger.sent(side.name)
        try:
            answer = await side.ask(case, timeout_s=TIMEOUT_S)
        except Exception as error:  # noqa: BLE001  # whatever it is goes into the ledger
            self._ledger.failed(side.name, f"{case.key or 'fresh'} {case.options}", error)
            return None
        self._ledger.answered(side.name, case, answer)
        return answer

    async def _leave_at_once(self, at: int) -> None:
        """Before the first token, most of them."""
        side, case = self._sides[at], self._cases.long_answer()
        self._ledger.sent(side.name)
        task = asyncio.create_task(side.ask(case, timeout_s=TIMEOUT_S))
        await asyncio.wait([task], timeout=self._rng.uniform(0.0, 0.03))
        task.cancel()
        await self._gone(side, case, task)

    async def _leave_midway(self, at: int) -> None:
        side, case = self._sides[at], self._cases.long_answer()
        self._ledger.sent(side.name)
        try:
            answer = await side.ask(case, timeout_s=TIMEOUT_S, leave_after=self._rng.randint(1, 20))
        except Exception as error:  # noqa: BLE001  # whatever it is goes into the ledger
            self._ledger.failed(side.name, "leave midway", error)
            return
        if answer.left:
            self._ledger.count("left midway")
        else:
            self._ledger.answered(side.name, case, answer)

    async def _drop(self, at: int) -> None:
        """A connection of its own, which closes at some time."""
        side, case = self._make[at](), self._cases.long_answer()
        self._ledger.sent(side.name)
        task = asyncio.create_task(side.ask(case, timeout_s=TIMEOUT_S))
        await asyncio.wait([task], timeout=self._rng.uniform(0.0, 0.4))
        await side.close()
        task.cancel()
        await self._gone(side, case, task, dropped=True)

    async def _gone(self, side: Side, case: Case, task: asyncio.Task[Answer], *, dropped: bool = False) -> None:
        await asyncio.wait([task])
        if task.cancelled():
            self._ledger.count("connection closed" if dropped else "left at once")
        elif (error := task.exception()) is None:
            self._ledger.answered(side.name, case, task.result())
        elif dropped and isinstance(error, MeshError) and error.code is grpc.StatusCode.CANCELLED:
            self._ledger.count("connection closed")
        else:
            self._ledger.failed(side.name, "drop" if dropped else "leave at once", error)

    async def _lapse(self, at: int) -> None:
        """A deadline that most of them cannot keep."""
        side, case = self._sides[at], self._cases.long_answer()
        self._ledger.sent(side.name)
        try:
            answer = await side.ask(case, timeout_s=self._rng.uniform(0.002, 0.2))
        except Exception as error:  # noqa: BLE001  # whatever it is goes into the ledger
            if has_lapsed(error):
                self._ledger.count("lapsed")
            elif is_hopeless(error):
                self._ledger.count("refused: its deadline is too near")
            else:
                self._ledger.failed(side.name, "lapse", error)
        else:
            self._ledger.answered(side.name, case, answer)

    async def _err(self, at: int) -> None:
        side = self._sides[at]
        case, name = self._cases.malformed()
        self._ledger.sent(side.name)
        try:
            await side.ask(case, timeout_s=TIMEOUT_S)
        except Exception as error:  # noqa: BLE001  # whatever it is goes into the ledger
            if is_about(side.field_name(name), error):
                self._ledger.count("malformed")
            else:
                self._ledger.failed(side.name, f"malformed {name}", error)
        else:
            self._ledger.problem(side.name, f"malformed {name}: answered, not refused")

    async def _flood_until(self, stop: asyncio.Event) -> None:
        while not stop.is_set():
            with suppress(TimeoutError):
                async with asyncio.timeout(BURST_PERIOD_S):
                    await stop.wait()
                return
            self._open.clear()
            await asyncio.sleep(_LEAD_S)
            await asyncio.gather(*(self._flood_one(number % len(self._sides)) for number in range(self._burst_size)))
            self._open.set()

    async def _flood_one(self, at: int) -> None:
        side, case = self._sides[at], self._cases.short_answer()
        self._ledger.sent(side.name)
        try:
            answer = await side.ask(case, timeout_s=TIMEOUT_S)
        except Exception as error:  # noqa: BLE001  # whatever it is goes into the ledger
            if is_refusal(side.name, error):
                self._ledger.count("refused in a burst")
            else:
                self._ledger.failed(side.name, "burst", error)
        else:
            self._ledger.answered(side.name, case, answer)
