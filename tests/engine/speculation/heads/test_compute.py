"""Draft heads by torch are what weights.py draws; natively they are the same in 8 bits."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F

from pdmesh.engine.kernels.cpu.library import shared_library
from pdmesh.engine.speculation.draft_heads.native import NativeHeads
from pdmesh.engine.speculation.draft_heads.reference import Chain, HeadMaths, Root, TorchHeads
from tests.engine.backends import needs_native
from tests.engine.speculation.heads.tiny_heads import make_embedding, make_heads


def random_hidden(count: int, hidden_size: int = 32) -> torch.Tensor:
    return 3 * torch.randn((count, hidden_size), generator=torch.Generator().manual_seed(2))


def test_torch_computes_what_is_drawn() -> None:
    heads, embedding, hidden = make_heads(), make_embedding(), random_hidden(3)
    maths = TorchHeads(heads, embedding)
    states = maths.begin(list(hidden))
    assert torch.allclose(states, F.rms_norm(hidden, (32,), heads.norm, 1e-6), atol=1e-6)
    [block] = heads.blocks
    x = torch.cat((states, F.rms_norm(embedding[[5, 0, 49]], (32,), None, 1e-6)), dim=1)
    expected = x @ block.mix.T + (F.silu(x @ block.gate.T) * (x @ block.up.T)) @ block.down.T
    after = maths.advance(0, states, [5, 0, 49])
    assert torch.allclose(after, expected, atol=1e-5)
    scores = maths.score(after)
    logits = expected @ heads.head.T
    assert torch.allclose(scores.logits, logits, atol=1e-4)
    assert scores.best == logits.argmax(-1).tolist()
    assert scores.chances == pytest.approx(logits.softmax(-1).amax(-1).tolist(), rel=1e-4)


def chain(maths: HeadMaths, root: Root) -> Chain:
    """The same, step by step."""
    tokens: list[int] = []
    chances: list[float] = []
    state, kept = maths.begin([root.hidden]), 1.0
    while len(tokens) < min(root.most, maths.heads.depth):
        state = maths.advance(0, state, [tokens[-1] if tokens else root.last])
        _, [best], [chance] = maths.score(state)
        kept *= chance
        if kept < root.least_chance:
            break
        tokens.append(int(maths.heads.token_ids[best]))
        chances.append(chance)
    return tokens, chances


def check_chains(maths: HeadMaths) -> None:
    hidden = random_hidden(12)
    roots = [Root(row, 4 * number, 1 + number % 5, (0.0, 0.01, 0.4)[number % 3]) for number, row in enumerate(hidden)]
    found = maths.chains(roots)
    for (tokens, chances), root in zip(found, roots, strict=True):
        alone = chain(maths, root)
        assert tokens == alone[0]
        assert chances == pytest.approx(alone[1], rel=1e-4)
    assert {len(tokens) for tokens, _ in found} >= {0, 1, 3, 4}


def test_chains_by_torch() -> None:
    check_chains(TorchHeads(make_heads(), make_embedding()))


def test_heads_of_another_model_are_refused() -> None:
    with pytest.raises(ValueError, match="hidden_size: 32, but the model has 48"):
        TorchHeads(make_heads(), make_embedding(50, 48))
    with pytest.raises(ValueError, match="token_ids: 49 is none of the model's 30 tokens"):
        TorchHeads(make_heads(), make_embedding(30))


@pytest.fixture(params=[1, 2], ids=["1 thread", "2 threads"])
def team(request: pytest.FixtureRequest) -> Iterator[int]:
    library = shared_library()
    library.pdmesh_team_create.argtypes, library.pdmesh_team_create.restype = [ctypes.c_int32] * 2, ctypes.c_void_p
    library.pdmesh_team_destroy.argtypes, library.pdmesh_team_destroy.restype = [ctypes.c_void_p], None
    team = library.pdmesh_team_create(request.param, 50)
    yield team
    library.pdmesh_team_destroy(team)


@needs_native
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("width", "hidden_size", "vocab_size"), [(48, 32, 50), (72, 96, 203), (200, 64, 1000)])
def test_native_is_the_same_in_8_bits(team: int, dtype: torch.dtype, width: int, hidden_size: int, vocab_size: int) -> None:
    heads = make_heads(width=width, hidden_size=hidden_size, vocab_size=vocab_size)
    embedding = make_embedding(vocab_size, hidden_size, dtype)
    native, exact = NativeHeads(heads, embedding, shared_library(), team), TorchHeads(heads, embedding)
    hidden, tokens = random_hidden(5, hidden_size), [0, 1, 2, 3, vocab_size - 1]
    states = native.begin(list(hidden))
    assert torch.allclose(states, exact.begin(list(hidden)), rtol=1e-5)
    after, expected = native.advance(0, states, tokens), exact.advance(0, states, tokens)
    assert (after - expected).norm() < 0.02 * expected.norm()
    scores, wanted = native.score(expected), exact.score(expected)
    assert (scores.logits - wanted.logits).norm() < 0.02 * wanted.logits.norm()
    assert scores.best == scores.logits.argmax(-1).tolist()
    assert scores.chances == pytest.approx(scores.logits.softmax(-1).amax(-1).tolist(), rel=1e-5)


@needs_native
def test_native_rows_do_not_depend_on_those_beside_them(team: int) -> None:
    native = NativeHeads(make_heads("medusa"), make_embedding(), shared_library(), team)
    states, tokens = native.begin(list(random_hidden(130))), [index % 50 for index in range(130)]
    after = native.advance(3, states, tokens)
    logits = native.score(after).logits.clone()
    for count in (1, 2, 7, 97):
        fewer = native.advance(3, states[:count], tokens[:count])
        assert torch.equal(fewer, after[:count])
        assert torch.equal(native.score(fewer).logits, logits[:count])


@needs_native
def test_native_chains(team: int) -> None:
    check_chains(NativeHeads(make_heads(), make_embedding(), shared_library(), team))


@needs_native
def test_native_refuses_what_it_cannot_read(team: int) -> None:
    with pytest.raises(ValueError, match="hidden_size: 24 is not a multiple of 16"):
        NativeHeads(make_heads(hidden_size=24), make_embedding(50, 24), shared_library(), team)
    with pytest.raises(ValueError, match=r"embedding: torch.float16 on cpu"):
        NativeHeads(make_heads(), make_embedding(dtype=torch.float16), shared_library(), team)
