"""A request whose logits are not finite is refused by its worker with DATA_LOSS; the worker serves all others."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest

from pdmesh.engine.loader.builder import TorchBuilder
from pdmesh.engine.loader.pack import NativeBuilder
from tests.support.mini_router import MiniRouter
from tests.support.tiny_models import make_tiny_model
from tests.support.waiting import eventually
from tests.support.worker_mesh import LOCAL, Model, Peer, load_tiny, reference, running_worker, token_request

POISON = 77
PROMPT = [10 + (7 * i) % 60 for i in range(30)]


@pytest.fixture(scope="module", params=["torch", "native"])
def poisoned(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    """A model whose token POISON has an embedding of NaN: only requests that hold it are lost."""
    builder, step = (NativeBuilder, "pack") if request.param == "native" else (TorchBuilder, "build")
    plain = getattr(builder, step)

    def poisoned_build(self: object, *args: object) -> object:
        built = plain(self, *args)
        built.embedding[POISON] = float("nan")
        return built

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(builder, step, poisoned_build)
        return load_tiny(make_tiny_model(tmp_path_factory.mktemp("tiny")), request.param)


@pytest.fixture
async def decoder(poisoned: Model) -> AsyncIterator[Peer]:
    async with running_worker(poisoned, roles=("decode",), worker_id="d") as peer:
        yield peer


@pytest.mark.parametrize("temperature", [0.0, 0.8])
async def test_decode_gives_up_the_request_alone(poisoned: Model, decoder: Peer, temperature: float) -> None:
    router = MiniRouter()
    await router.attach(decoder)
    sound, broken = token_request(PROMPT, temperature=temperature), token_request([*PROMPT, POISON], temperature=temperature, n=2)
    await router.submit(decoder, "sound", sound, mode=LOCAL)
    await router.submit(decoder, "broken", broken, mode=LOCAL)
    await eventually(lambda: router.of("broken").failure)
    await router.until_finished("sound")
    failure = router.of("broken").failure
    assert failure is not None and failure.code == grpc.StatusCode.DATA_LOSS.value[0]
    assert "NaN or infinity" in failure.message and "--dtype float32" in failure.message
    assert [router.of("sound").output()] == reference(poisoned, sound)
    await decoder.until_whole()
    await router.detach()


async def test_prefill_says_so_and_pushes_nothing(poisoned: Model, decoder: Peer, tmp_path: Path) -> None:
    router = MiniRouter()
    await router.attach(decoder)
    async with running_worker(poisoned, roles=("prefill",), worker_id="p") as prefiller:
        broken = token_request([*PROMPT, POISON])
        reservation = await router.submit(decoder, "broken", broken)
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await router.prefill(prefiller, decoder, "broken", broken, reservation)
        assert raised.value.code() is grpc.StatusCode.DATA_LOSS
        await prefiller.until_whole()
        sound = token_request(PROMPT)
        seen, _ = await router.generate(prefiller, decoder, "sound", sound)
        assert [seen.output()] == reference(poisoned, sound)
        await router.detach()
