"""LoRA adapters in a mesh of real processes: by name, on either side of a hand-off, over restarts of workers and of routers."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Literal

import pytest
import pytest_asyncio

from pdmesh.cli import run as pdmesh
from pdmesh.client.client import AsyncClient
from pdmesh.client.types import GenerateOptions
from pdmesh.errors import InvalidArgument, MeshError, NotFound
from pdmesh.launcher.mesh import LocalMesh
from pdmesh.launcher.plan import LocalMeshConfig
from tests.engine.test_model_transformers import greedy, reference
from tests.mesh import oracle
from tests.mesh.checks import Footprint, assert_whole
from tests.support.adapters import make_adapter, merge
from tests.support.waiting import eventually

pytest.importorskip("transformers")
pytestmark = pytest.mark.asyncio(loop_scope="module")
PROMPT = oracle.prompt_of(900, 70)
NUM_TOKENS = 16


@pytest.fixture(scope="module")
def adapters(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    parent = tmp_path_factory.mktemp("adapters")
    return {name: make_adapter(parent / name, reference(tiny), "all-linear", seed=n) for n, name in enumerate(("a", "b", "c"))}


@pytest.fixture(scope="module")
def answers(tiny: Path, adapters: dict[str, Path]) -> dict[str, list[int]]:
    alone = {name: greedy(merge(reference(tiny), path), PROMPT, NUM_TOKENS) for name, path in adapters.items()}
    return {**alone, "tiny": greedy(reference(tiny), PROMPT, NUM_TOKENS)}


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def mesh(tiny: Path, adapters: dict[str, Path]) -> AsyncIterator[LocalMesh]:
    """Two of each kind of worker, which were started with adapter a."""
    flags = ("--lora", f"a={adapters['a']}", "--max-loras", "3", "--dtype", "float32")
    config = LocalMeshConfig(model=str(tiny), num_prefill=2, num_decode=2, port=0, num_threads=1, worker_args=flags)
    async with LocalMesh(config) as mesh:
        footprint = Footprint.of(mesh)
        yield mesh
        footprint.grow(mesh)
    footprint.assert_gone()


@pytest_asyncio.fixture(loop_scope="module")
async def client(mesh: LocalMesh) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(mesh.router_addresses) as client:
        yield client


async def ask(
    client: AsyncClient, model: str, mode: Literal["local", "remote"] | None = None, num_tokens: int = NUM_TOKENS
) -> list[int]:
    options: GenerateOptions = {"temperature": 0.0, "max_tokens": num_tokens, "ignore_eos": True}
    if mode is not None:
        options["mode"] = mode
    answer = await client.generate(PROMPT, model=model, timeout=60, **options)
    assert answer.model == model
    return list(answer.token_ids)


async def holders(client: AsyncClient, name: str) -> list[str]:
    found = await client.list_adapters()
    return sorted(w.worker_id for adapter in found.adapters if adapter.name == name for w in adapter.workers if w.loaded)


async def everywhere(client: AsyncClient, name: str) -> None:
    deadline = asyncio.get_running_loop().time() + 60
    while len(await holders(client, name)) != 4:
        assert asyncio.get_running_loop().time() < deadline, await client.list_adapters()
        await asyncio.sleep(0.1)


@pytest.mark.parametrize("mode", ["remote", "local"])
async def test_the_name_of_an_adapter_is_that_of_a_model(
    mesh: LocalMesh, client: AsyncClient, answers: dict[str, list[int]], mode: Literal["local", "remote"]
) -> None:
    for _ in range(2):  # the second time every prompt is in a prefix cache, each in its own
        got = await asyncio.gather(*(ask(client, model, mode) for model in ("a", "tiny", "a", "tiny")))
        assert got == [answers["a"], answers["tiny"]] * 2
    models = {model.name: model for model in await client.list_models()}
    assert models.keys() == {"tiny", "a"}
    assert (models["a"].num_prefill_workers, models["a"].num_decode_workers) == (2, 2)


async def test_loaded_everywhere_while_requests_run(
    mesh: LocalMesh, client: AsyncClient, adapters: dict[str, Path], answers: dict[str, list[int]]
) -> None:
    under_way = [asyncio.create_task(ask(client, "a", "remote", 200)) for _ in range(4)]
    await asyncio.sleep(0.1)
    loaded = await client.load_adapter("b", str(adapters["b"]))
    assert sorted(worker.worker_id for worker in loaded.workers if worker.loaded) == [
        "decode-0",
        "decode-1",
        "prefill-0",
        "prefill-1",
    ]
    assert (loaded.model, loaded.folder, len(loaded.digest)) == ("tiny", str(adapters["b"]), 64)
    got = await asyncio.gather(*(ask(client, model, "remote") for model in ("a", "b", "tiny", "b")))
    assert got == [answers[model] for model in ("a", "b", "tiny", "b")]
    for tokens in await asyncio.gather(*under_way):
        assert tokens[:NUM_TOKENS] == answers["a"]
    await assert_whole(mesh)


async def test_a_killed_worker_gets_them_back(mesh: LocalMesh, client: AsyncClient, answers: dict[str, list[int]]) -> None:
    await everywhere(client, "b")
    under_way = [asyncio.create_task(ask(client, "b", "remote", 200)) for _ in range(4)]
    await asyncio.sleep(0.2)
    for name in ("decode-0", "prefill-0"):
        mesh.kill(name, signal.SIGKILL)
    for tokens in await asyncio.gather(*under_way):
        assert tokens[:NUM_TOKENS] == answers["b"]
    await mesh.wait_ready(60)
    await everywhere(client, "b")
    assert await ask(client, "b", "remote") == answers["b"]


async def test_a_restarted_router_knows_them(mesh: LocalMesh, answers: dict[str, list[int]]) -> None:
    mesh.kill("router-0", signal.SIGKILL)
    await eventually(lambda: not _is_ready(mesh), timeout_s=10)
    await mesh.wait_ready(60)
    mesh.kill("decode-1", signal.SIGKILL)
    await mesh.wait_ready(60)
    async with AsyncClient(mesh.router_addresses) as client:
        await everywhere(client, "b")
        assert await ask(client, "b") == answers["b"]


def _is_ready(mesh: LocalMesh) -> bool:
    try:
        return bool(mesh.router_addresses)
    except RuntimeError:
        return False


async def test_unloaded_for_good(
    mesh: LocalMesh, client: AsyncClient, adapters: dict[str, Path], answers: dict[str, list[int]]
) -> None:
    await everywhere(client, "b")
    under_way = [asyncio.create_task(ask(client, "b", "remote", 200)) for _ in range(4)]
    await asyncio.sleep(0.3)
    gone = await client.unload_adapter("b")
    assert not any(worker.loaded or worker.error for worker in gone.workers)
    with pytest.raises(NotFound, match="model: 'b' is not served here; there is tiny, a"):
        await ask(client, "b")
    for tokens in await asyncio.gather(*under_way):
        assert tokens[:NUM_TOKENS] == answers["b"]
    with pytest.raises(NotFound, match="has an adapter 'b'"):
        await client.unload_adapter("b")
    # One that the workers were started with stays away over restarts, too, until it is loaded again.
    await client.unload_adapter("a")
    mesh.kill("decode-1", signal.SIGKILL)
    await mesh.wait_ready(60)
    await asyncio.sleep(2.0)
    assert await holders(client, "a") == []
    await client.load_adapter("a", str(adapters["a"]))
    assert await ask(client, "a", "remote") == answers["a"]


async def test_refusals_name_the_adapter(mesh: LocalMesh, client: AsyncClient, tiny: Path, adapters: dict[str, Path]) -> None:
    with pytest.raises(InvalidArgument, match=r"adapter 'bad': .*no adapter_config\.json"):
        await client.load_adapter("bad", str(tiny))
    with pytest.raises(InvalidArgument, match="'tiny' is a model's name"):
        await client.load_adapter("tiny", str(adapters["a"]))
    with pytest.raises(InvalidArgument, match="is not 1 to 128"):
        await client.load_adapter("no spaces", str(adapters["a"]))
    with pytest.raises(NotFound, match="'other' is not served here"):
        await client.load_adapter("c", str(adapters["c"]), model="other")
    for name in ("x", "y", "z"):
        try:
            await client.load_adapter(name, str(adapters["c"]))
        except MeshError as error:
            assert f"adapter '{name}': all 3 places are taken" in str(error)
            break
    else:
        raise AssertionError("a fourth adapter was loaded into three places")
    for adapter in (await client.list_adapters()).adapters:
        if adapter.name in "xyz":
            await client.unload_adapter(adapter.name)


async def test_the_command(
    mesh: LocalMesh, client: AsyncClient, adapters: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    router = ("--router", mesh.router_addresses[0])
    assert await asyncio.to_thread(pdmesh, ["adapters", "load", "c", str(adapters["c"]), *router]) == 0
    assert "c of tiny: loaded on" in capsys.readouterr().out
    await everywhere(client, "c")
    assert await asyncio.to_thread(pdmesh, ["adapters", *router]) == 0
    assert "4 of 4" in capsys.readouterr().out
    assert await asyncio.to_thread(pdmesh, ["adapters", "unload", "c", *router]) == 0
    assert await asyncio.to_thread(pdmesh, ["adapters", "unload", "c", *router]) == 2
    assert "has an adapter 'c'" in capsys.readouterr().err
