"""Many requests with random fates at once: whatever happens to them, tokens are right and nothing is left behind."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass

import grpc
import pytest

from pdmesh.runtime import failpoints
from pdmesh.v1 import common_pb2, decode_pb2, mesh_pb2, prefill_pb2
from tests.support.mini_router import MiniRouter
from tests.support.waiting import eventually
from tests.support.worker_mesh import LOCAL, REMOTE, Model, Peer, history, reference, running_worker, token_request

NUM_REQUESTS = 24
POINTS = ("prefill.accepted", "prefill.computed", "push.hello", "push.part", "push.before_commit", "decode.committed")


@pytest.mark.parametrize("seed", range(3))
async def test_random_fates(model: Model, seed: int) -> None:
    rng = random.Random(seed)
    shared = [rng.randrange(256) for _ in range(40)]
    requests = {f"r{i}": _random_request(rng, shared, i) for i in range(NUM_REQUESTS)}
    failpoints.install(",".join(_random_fault(rng) for _ in range(10)))
    async with running_worker(model, worker_id="p") as prefiller, running_worker(model, worker_id="d", lease_s=1.0) as decoder:
        router = MiniRouter()
        await router.attach(decoder)
        fates = [Fate(router, prefiller, decoder, name, requests[name], random.Random(f"{seed}{name}")) for name in requests]
        complete = await asyncio.gather(*(fate.live() for fate in fates))
        for name, is_complete in zip(requests, complete, strict=True):
            expected, got = reference(model, requests[name])[0], router.of(name).output()
            assert got == expected[: len(got)], name
            assert not is_complete or got == expected, name
        assert sum(complete) > NUM_REQUESTS / 3
        await router.detach()


def _random_request(rng: random.Random, shared: list[int], seed: int) -> common_pb2.TokenRequest:
    prompt = [*shared[: rng.choice((0, 20, 40))], *(rng.randrange(256) for _ in range(rng.randrange(1, 60)))]
    return token_request(prompt, max_tokens=rng.randrange(1, 40), temperature=rng.choice((0.0, 0.9)), seed=seed)


def _random_fault(rng: random.Random) -> str:
    return f"{rng.choice(POINTS)}={rng.choice(('error', 'delay:50'))}@{rng.randrange(1, 25)}"


@dataclass
class Fate:
    """One request as a router would drive it, perhaps cancelled at a random moment."""

    router: MiniRouter
    prefiller: Peer
    decoder: Peer
    name: str
    request: common_pb2.TokenRequest
    rng: random.Random

    async def live(self) -> bool:
        """True: it came to its end."""
        work = asyncio.ensure_future(self._drive())
        if self.rng.random() < 0.3:
            await asyncio.wait([work], timeout=self.rng.random() * 0.3)
            work.cancel()
        try:
            return await work
        except asyncio.CancelledError:
            await self._cancel()
            return False

    async def _drive(self) -> bool:
        for attempt in range(1, 5):
            if self._finished:
                return True
            mode = REMOTE if attempt < 4 and self.rng.random() < 0.8 else LOCAL
            if await self._try(attempt, mode):
                await eventually(lambda: self._finished or self.router.of(self.name).failure)
                return self._finished
        await self._cancel()
        return False

    async def _try(self, attempt: int, mode: mesh_pb2.PrefillMode.ValueType) -> bool:
        """True: decode goes on by itself."""
        emitted = self.router.of(self.name).output()
        request = common_pb2.TokenRequest()
        request.CopyFrom(self.request)
        request.emitted.extend(history(emitted) if emitted else ())
        try:
            reservation = await self._submit(request, mode, attempt)
            if mode == LOCAL:
                return True
            _, outcome = await self.router.prefill(self.prefiller, self.decoder, self.name, request, reservation)
        except grpc.aio.AioRpcError as error:
            assert error.code() in (grpc.StatusCode.INTERNAL, grpc.StatusCode.RESOURCE_EXHAUSTED), error
            return False
        return outcome.status != prefill_pb2.HANDOFF_STATUS_FAILED

    async def _submit(
        self, request: common_pb2.TokenRequest, mode: mesh_pb2.PrefillMode.ValueType, attempt: int
    ) -> common_pb2.Reservation:
        """Waits for room."""
        for _ in range(500):
            try:
                return await self.router.submit(self.decoder, self.name, request, mode=mode, attempt=attempt)
            except grpc.aio.AioRpcError as error:
                if error.code() is not grpc.StatusCode.RESOURCE_EXHAUSTED:
                    raise
            await asyncio.sleep(0.02)
        raise AssertionError("there was never room")

    async def _cancel(self) -> None:
        await self.decoder.decode.Cancel(decode_pb2.CancelRequest(request_id=self.name))

    @property
    def _finished(self) -> bool:
        return 0 in self.router.of(self.name).finished
