"""What the plugin reads of a model and of vLLM's events: end-of-sequence ids, and the roots of block hashes."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pdmesh.engine.kv_cache.block_events import BlockEventLog
from pdmesh.text.block_hash import hash_block, hash_prompt


@pytest.mark.parametrize(
    ("generation", "config", "expected"), [([2, 7], 2, {2, 7}), (None, 2, {2}), (None, [2, 3], {2, 3}), (None, None, set())]
)
def test_ids_that_end_an_answer_are_those_of_the_generation_config(generation: Any, config: Any, expected: set[int]) -> None:
    pytest.importorskip("torch")
    from pdmesh_vllm.loading import eos_of

    said = {} if generation is None else {"eos_token_id": generation}
    model = SimpleNamespace(try_get_generation_config=lambda: said, hf_text_config=SimpleNamespace(eos_token_id=config))
    assert eos_of(SimpleNamespace(model_config=model)) == expected


def test_a_model_without_hashed_weights_is_refused_before_it_is_loaded(tmp_path: Path) -> None:
    """Two of them would have one hash, and exchange KV."""
    pytest.importorskip("torch")
    from pdmesh_vllm.loading import load_core

    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "pytorch_model.bin").write_bytes(b"weights")
    for model in (str(tmp_path), "Qwen/Qwen3-8B"):
        with pytest.raises(ValueError, match=r"model: .* is no folder with config\.json and safetensors"):
            load_core({"model": model})


def test_kv_without_heads_is_refused() -> None:
    torch = pytest.importorskip("torch")
    from pdmesh_vllm.loading import kv_shape

    assert kv_shape({"layer": torch.empty(9, 2, 32, 64)}) == (9, 2, 32, 64)
    with pytest.raises(ValueError, match=r"model: vLLM keeps the KV of layer as \(9, 32, 576\), without heads"):
        kv_shape({"layer": torch.empty(9, 32, 576)})


def test_models_with_other_overrides_do_not_pair() -> None:
    pytest.importorskip("torch")
    from pdmesh_vllm.loading import numeric_mode

    def mode(overrides: dict[str, object]) -> str:
        model = SimpleNamespace(dtype="torch.float32", quantization=None, hf_overrides=overrides)
        return numeric_mode(SimpleNamespace(model_config=model, device_config=SimpleNamespace(device_type="cpu")))

    assert mode({}) == "vllm-0.32-float32"
    assert len({mode({}), mode({"rope_theta": 1}), mode({"rope_theta": 2})}) == 3
    assert mode({"a": 1, "b": 2}) == mode({"b": 2, "a": 1})


@pytest.mark.parametrize(
    ("device", "asked", "promised"), [("cuda", "1", True), ("cuda", "0", False), ("cuda", None, False), ("cpu", "1", False)]
)
def test_logits_are_those_of_any_batch_where_vllm_promises_it(
    monkeypatch: pytest.MonkeyPatch, device: str, asked: str | None, promised: bool
) -> None:
    pytest.importorskip("torch")
    from pdmesh_vllm.loading import is_batch_invariant, numeric_mode

    monkeypatch.delenv("VLLM_BATCH_INVARIANT", raising=False)
    if asked is not None:
        monkeypatch.setenv("VLLM_BATCH_INVARIANT", asked)
    model = SimpleNamespace(dtype="torch.bfloat16", quantization=None, hf_overrides={})
    config = SimpleNamespace(model_config=model, device_config=SimpleNamespace(device_type=device))
    assert is_batch_invariant(device) is promised
    assert numeric_mode(config) == "vllm-0.32-bfloat16" + ("-batch-invariant" if promised else "")


def test_an_adapter_may_be_called_like_a_salt() -> None:
    pytest.importorskip("vllm")
    from vllm.distributed.kv_events import BlockStored, KVEventBatch

    from pdmesh_vllm.prefix_cache import PrefixIndex, salt_of

    index, root = PrefixIndex(), b"root"
    stored = BlockStored(
        block_hashes=[b"1"],
        parent_block_hash=None,
        token_ids=[1, 2],
        block_size=2,
        lora_id=1,
        medium=None,
        lora_name="pdmesh:x",
        extra_keys=[("pdmesh:x", salt_of(root))],
    )
    index.publish(KVEventBatch(ts=0.0, events=[stored]))
    assert index.blocks() == (0, (hash_block(root, [1, 2]),))


def test_a_block_is_forgotten_with_its_last_copy() -> None:
    """Two prompts that begin alike and are computed at once leave two blocks of one hash in vLLM."""
    pytest.importorskip("vllm")
    from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KVEventBatch

    from pdmesh_vllm.prefix_cache import PrefixIndex

    index, tokens = PrefixIndex(), list(range(6))
    events = index.events = BlockEventLog(nullcontext())
    first, second, third = hash_prompt(b"", tokens, 2)
    same: dict[str, Any] = {"block_size": 2, "lora_id": None, "medium": "GPU", "lora_name": None, "extra_keys": None}
    both = BlockStored(block_hashes=[1, 2], parent_block_hash=None, token_ids=tokens[:4], **same)
    last = BlockStored(block_hashes=[3], parent_block_hash=2, token_ids=tokens[4:], **same)

    def held_after(*events: object) -> set[bytes]:
        index.publish(KVEventBatch(ts=0.0, events=list(events)))
        return set(index.blocks()[1])

    assert held_after(both, both) == {first, second}
    assert held_after(BlockRemoved(block_hashes=[1, 2], medium="GPU")) == {first, second} == events.blocks.keys()
    assert held_after(last) == {first, second, third}
    assert held_after(BlockRemoved(block_hashes=[2], medium="GPU")) == {first, third}
    assert held_after(last) == {first, third}  # a copy that no prompt finds, for its beginning is gone
    assert held_after(BlockRemoved(block_hashes=[3], medium="GPU")) == {first, third} == events.blocks.keys()
    assert held_after(BlockRemoved(block_hashes=[3, 9], medium="GPU")) == {first}
    assert held_after(both, AllBlocksCleared()) == set()
    assert held_after(both, BlockRemoved(block_hashes=[1, 2], medium="GPU")) == set() == events.blocks.keys()


def test_kv_events_with_token_ids_are_vllms_in_the_names_of_the_mesh() -> None:
    pytest.importorskip("vllm")
    from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KVEventBatch

    from pdmesh_vllm.prefix_cache import PrefixIndex, salt_of

    index, root, tokens = PrefixIndex(), bytes(16), list(range(6))
    log = index.events = BlockEventLog(nullcontext())
    names = hash_prompt(root, tokens, 2)
    same: dict[str, Any] = {"block_size": 2, "lora_id": None, "medium": "GPU", "lora_name": None}
    first = BlockStored(
        block_hashes=[1, 2], parent_block_hash=None, token_ids=tokens[:4], extra_keys=[(salt_of(root),), None], **same
    )
    second = BlockStored(block_hashes=[3], parent_block_hash=2, token_ids=tokens[4:], extra_keys=[None], **same)
    for event in (first, second):
        index.publish(KVEventBatch(ts=0.0, events=[event]))
    events = log.take()
    assert events is not None
    assert [(block.block_hash, block.parent) for block in events.stored] == list(zip(names, [None, *names], strict=False))
    assert [list(block.token_ids) for block in events.stored] == [[0, 1], [2, 3], [4, 5]]
    assert {block.cache_root for block in events.stored} == {root}
    index.publish(KVEventBatch(ts=0.0, events=[BlockRemoved(block_hashes=[3], medium="GPU")]))
    index.publish(KVEventBatch(ts=0.0, events=[AllBlocksCleared()]))
    events = log.take()
    assert events is not None
    assert set(events.removed) == set(names)
    assert not log.blocks
