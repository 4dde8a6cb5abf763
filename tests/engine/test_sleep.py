"""An engine that sleeps has given its memory back, and computes the same bits when it has woken."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from pdmesh.engine.config import EngineConfig
from pdmesh.engine.engine import Engine
from pdmesh.engine.errors import IntegrityError, InvalidState, SleepRefused
from pdmesh.engine.kernels.cpu.model import PackedWeights
from pdmesh.engine.kv_cache.block_pool import BlockPool
from pdmesh.engine.kv_cache.pool import KVPool, KVShape
from pdmesh.engine.kv_cache.retention import Retention, RetentionBounds
from pdmesh.engine.loader import packed_cache, packed_file, packed_memory
from pdmesh.engine.loader.loader import load_model
from pdmesh.engine.loader.packed_cache import PackedCache
from pdmesh.engine.request import EngineRequest
from pdmesh.platform import capabilities
from pdmesh.platform.capabilities import MEMFD
from pdmesh.sampling_params import SamplingParams
from tests.engine.backends import BACKENDS, needs_native
from tests.engine.test_weights_packed import Start, leaves
from tests.support.mock_engine import open_engine, run_to_end
from tests.support.tiny_models import VOCAB_SIZE, make_tiny_model

SIZE = 512  # of hidden states: so that a tensor has whole pages
PROMPTS = [tuple((seed * 31 + 7 * index) % VOCAB_SIZE for index in range(length)) for seed, length in ((1, 5), (2, 90))]
SHAPE = KVShape(num_layers=2, num_blocks=64, block_size=16, num_kv_heads=2, head_dim=32, dtype=torch.float32)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("sleep"), seed=3, hidden_size=SIZE, intermediate_size=2 * SIZE)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PackedCache:
    """The cache of packed weights of this test, which keeps small ones as well."""
    kept = PackedCache(tmp_path / "packed", min_bytes=0)
    monkeypatch.setattr(PackedCache, "configured", staticmethod(lambda setting, pages="large": kept))
    return kept


def config_of(folder: Path, backend: str, **settings: object) -> EngineConfig:
    given = {"num_blocks": 64, "speculation": "none", "num_threads": 1, **settings}
    return EngineConfig(model=str(folder), backend=backend, dtype="float32", **given)  # type: ignore[arg-type]


def answers(engine: Engine) -> list[tuple[int, ...]]:
    for index, prompt in enumerate(PROMPTS):
        sampling = SamplingParams(temperature=0.8, seed=index, max_tokens=20, ignore_eos=True)
        assert engine.add(EngineRequest(str(index), prompt, sampling, cache_root=b"root"))
    collector = run_to_end(engine)
    return [collector.answer(str(index)).token_ids for index in range(len(PROMPTS))]


def tensors(weights: PackedWeights) -> dict[str, Tensor]:
    return {place: value for place, value in leaves(weights) if isinstance(value, Tensor)}


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("backend", BACKENDS)
def test_the_same_tokens_after_sleep(folder: Path, backend: str, shared: bool, cache: PackedCache) -> None:
    with_memory = config_of(folder, backend, kv_shared=shared)
    engine = open_engine(with_memory, load_model(with_memory))
    log = engine.watch_blocks(1000)
    num_fds = len(os.listdir("/proc/self/fd"))
    expected = answers(engine)
    for _ in range(3):
        assert log.pending and engine.published_blocks()[1]
        freed = engine.sleep.fall_asleep()
        assert freed >= 64 * SHAPE.block_size
        assert engine.sleep.fall_asleep() == 0
        assert not engine.published_blocks()[1]
        assert engine.kv.fd is None or os.fstat(engine.kv.fd).st_blocks == 0
        engine.sleep.wake()
        engine.sleep.wake()
        engine.check_integrity()
        assert len(os.listdir("/proc/self/fd")) == num_fds
        assert answers(engine) == expected
    engine.close()


def test_blocks_in_use_keep_it_awake(folder: Path) -> None:
    config = config_of(folder, "torch")
    engine = open_engine(config, load_model(config))
    request = EngineRequest("r", PROMPTS[0], SamplingParams(max_tokens=4), cache_root=b"root")
    assert engine.reserve(request) is not None
    with pytest.raises(InvalidState, match="1 KV blocks are in use"):
        engine.sleep.fall_asleep()
    assert engine.release("r") and answers(engine)
    engine.sleep.fall_asleep()
    engine.close()  # asleep


def test_a_pool_of_several_processes_is_refused(folder: Path) -> None:
    config = config_of(folder, "torch")
    engine = open_engine(config, load_model(config))
    engine.versions.current = replace(engine.versions.current, model=object())  # type: ignore[arg-type]
    with pytest.raises(SleepRefused, match="several ranks"):
        engine.sleep.fall_asleep()
    engine.close()


def no_mapping(*_: object) -> object:
    raise OSError(errno.ENODEV, "not here")


KINDS = ("copied", "packed here", "mapped")


@pytest.fixture(params=KINDS)
def start(
    request: pytest.FixtureRequest, folder: Path, cache: PackedCache, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[str, PackedWeights]]:
    """Weights as they may lie in memory: a copy of the file, as they were packed before the file was written, its pages."""
    if request.param != "mapped":
        monkeypatch.setattr(packed_file, "_mapped", no_mapping)  # else files that are in large pages would be mapped
    begun = Start(folder, replace(cache, shares_small=request.param == "mapped"))
    first = begun()
    yield request.param, (first if request.param == "packed here" else begun())


@needs_native
def test_weights_come_back_bit_by_bit(start: tuple[str, PackedWeights]) -> None:
    kind, weights = start
    assert bool(weights.mapped_bytes) == (kind == "mapped")
    before = {place: tensor.clone() for place, tensor in tensors(weights).items()}
    for _ in range(2):
        released = packed_memory.releasable(weights)
        assert released is not None
        released.forget()
        assert released.num_bytes > 0.7 * sum(tensor.nbytes for tensor in before.values())
        if kind != "mapped":
            assert any(not torch.equal(tensor, before[place]) for place, tensor in tensors(weights).items())
        released.restore()
        assert all(torch.equal(tensor, before[place]) for place, tensor in tensors(weights).items())


@needs_native
@pytest.mark.parametrize("what", ["removed", "replaced", "not seen whole", "no file"])
def test_what_no_file_holds_stays(what: str, start: tuple[str, PackedWeights], tmp_path: Path) -> None:
    _, weights = start
    assert weights.file is not None
    path = Path(weights.file[0])
    before = {place: tensor.clone() for place, tensor in tensors(weights).items()}
    if what == "no file":
        weights = replace(weights, file=None)
    elif what == "not seen whole":
        path.with_suffix(".json").unlink()
    else:
        path.unlink()
        if what == "replaced":
            path.write_bytes(b"something else")
    assert packed_memory.releasable(weights) is None
    assert all(torch.equal(tensor, before[place]) for place, tensor in tensors(weights).items())


@needs_native
def test_a_file_that_is_removed_meanwhile_is_still_read(start: tuple[str, PackedWeights]) -> None:
    _, weights = start
    assert weights.file is not None
    before = {place: tensor.clone() for place, tensor in tensors(weights).items()}
    released = packed_memory.releasable(weights)
    assert released is not None
    released.forget()
    for path in Path(weights.file[0]).parent.iterdir():
        path.unlink()
    released.restore()
    assert all(torch.equal(tensor, before[place]) for place, tensor in tensors(weights).items())


def test_the_stamp_says_whether_a_file_was_found_whole(start: tuple[str, PackedWeights]) -> None:
    _, weights = start
    assert weights.file is not None
    path = Path(weights.file[0])
    assert packed_cache.is_whole(path, path.stat())
    os.utime(path, (1, 1))
    assert not packed_cache.is_whole(path, path.stat())


def test_a_shared_pool_is_another_file_for_peers() -> None:
    if not MEMFD.is_there:
        pytest.skip("this system has no memory with seals")
    with closing(KVPool(SHAPE)) as pool:
        pool.tensor.fill_(3.0)
        assert pool.fd is not None
        peer = os.dup(pool.fd)
        address = pool.tensor.data_ptr()
        assert pool.forget() == SHAPE.num_bytes
        assert os.fstat(pool.fd).st_blocks == 0 and os.fstat(pool.fd).st_ino != os.fstat(peer).st_ino
        assert pool.tensor.data_ptr() == address and not pool.tensor.any()
        assert os.pread(peer, 4, 0) == bytes(torch.tensor(3.0).numpy())  # as long as the peer has it
        os.close(peer)
        pool.touch()
        pool.tensor.fill_(5.0)
        assert os.pread(pool.fd, 4, 0) == bytes(torch.tensor(5.0).numpy())
        with pytest.raises(PermissionError):
            os.ftruncate(pool.fd, 0)


def test_without_seals_a_pool_is_private_and_given_back_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(capabilities.VARIABLE, "memfd")
    with closing(KVPool(SHAPE)) as pool:
        pool.tensor.fill_(3.0)
        assert pool.forget() > 0 and not pool.tensor.any()


def test_a_failure_leaves_the_pool_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> int:
        raise OSError(12, "no memory")

    with closing(KVPool(SHAPE)) as pool:
        pool.tensor.fill_(3.0)
        monkeypatch.setattr("pdmesh.platform.linux.memfd", fail)
        monkeypatch.setattr("pdmesh.platform.linux.forget_pages", fail)
        with pytest.raises(OSError, match="no memory"):
            pool.forget()
        assert float(pool.tensor.min()) == 3.0
        pool.reach(63)


def test_a_pool_forgets_all_blocks_and_what_is_kept_of_them() -> None:
    pool = BlockPool(8, RetentionBounds(4, 4))
    blocks = pool.allocate(6)
    assert blocks is not None
    names = [bytes([number]) * 32 for number in range(6)]
    for block, name in zip(blocks, names, strict=True):
        assert pool.publish(block, name)
    with pytest.raises(IntegrityError, match="6 blocks are in use"):
        pool.forget_all()
    pool.retain(Retention("tenant", "session", 60.0), names[:3])
    pool.claim("r", names[:2])
    pool.release(blocks)
    pool.forget_all()
    pool.check({})
    assert (pool.num_cached, pool.num_retained, pool.num_free, len(pool.claims)) == (0, 0, 8, 0)
    assert pool.allocate(8) == list(range(8))
