"""The device draws what pdmesh.engine.sampling.sampler.Sampler draws."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pdmesh.engine.kernels.triton.sampling.batch import BatchMaker
from pdmesh.engine.kernels.triton.sampling.kernels import exp_of, gumbel_of, random_bits
from pdmesh.engine.kernels.triton.sampling.sampler import DeviceSampler, GreedyScratch, SamplingScratch, _likeliest, draw, greedy
from pdmesh.engine.sampling import counter_rng
from pdmesh.engine.sampling.sampler import NO_TOKEN, SampledToken, Sampler, SampleRow, Unseen
from pdmesh.sampling_params import SamplingParams
from tests.support.sampling_values import other_values

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
EOS = 5
CHUNK = 32


def row(
    *,
    choice: int = 0,
    index: int = 0,
    prompt: tuple[int, ...] = (),
    output: tuple[int, ...] = (),
    allowed: Any = None,
    **params: Any,
) -> SampleRow:
    return SampleRow(SamplingParams(**{"max_tokens": 100, **params}), choice, index, prompt, output, frozenset({EOS}), allowed)


def logits_of(num_rows: int, vocab: int, seed: int, grain: float = 0.0) -> torch.Tensor:
    """Normal times 3; `grain`: rounded to multiples of it, for ties."""
    logits = torch.randn((num_rows, vocab), generator=torch.Generator().manual_seed(seed)) * 3
    return (logits / grain).round() * grain if grain else logits


def assert_same(logits: torch.Tensor, rows: list[SampleRow], chunk: int = CHUNK) -> None:
    expected = Sampler().sample(logits, rows)
    actual = DeviceSampler(chunk).sample(logits.to(DEVICE), rows)
    assert [token.token_id for token in actual] == [token.token_id for token in expected]
    for mine, other in zip(actual, expected, strict=True):
        if other.logprobs is None:
            assert mine.logprobs is None
            continue
        assert mine.logprobs is not None
        assert [i for i, _ in mine.logprobs.top] == [i for i, _ in other.logprobs.top]
        for one, two in zip(
            (mine.logprobs.chosen, *mine.logprobs.top), (other.logprobs.chosen, *other.logprobs.top), strict=True
        ):
            assert one[1] == pytest.approx(two[1], rel=1e-5, abs=1e-5)


@st.composite
def sample_rows(draw_: st.DrawFn, vocab: int) -> SampleRow:
    tokens = st.lists(st.integers(0, vocab - 1), max_size=6).map(tuple)
    output = draw_(tokens)
    allowed = None
    if draw_(st.booleans()):
        bits = np.array(draw_(st.lists(st.booleans(), min_size=vocab, max_size=vocab)), bool)
        bits[draw_(st.integers(6, vocab - 1))] = True  # something that is never forbidden
        padded = np.zeros(-(-vocab // 32) * 32, bool)
        padded[:vocab] = bits
        allowed = np.packbits(padded, bitorder="little").view(np.uint32)
    params: dict[str, Any] = {
        "temperature": draw_(st.sampled_from([0.0, 1e-6, 0.5, 1.0, 3.0])),
        "top_k": draw_(st.sampled_from([0, 0, 1, 2, 7, 50, 1000])),
        "top_p": draw_(st.one_of(st.just(1.0), st.floats(0.01, 1.0))),
        "min_p": draw_(st.one_of(st.just(0.0), st.floats(0.0, 1.0))),
        "repetition_penalty": draw_(st.sampled_from([1.0, 0.5, 1.3])),
        "presence_penalty": draw_(st.sampled_from([0.0, -1.0, 2.0])),
        "frequency_penalty": draw_(st.sampled_from([0.0, 0.7])),
        "seed": draw_(st.integers(0, 2**64 - 1)),
        "min_tokens": draw_(st.integers(0, 5)),
        "logprobs": draw_(st.sampled_from([None, 0, 3])),
        "stop_token_ids": draw_(st.sampled_from([(), (1, 2, 99999)])),
        "ignore_eos": draw_(st.booleans()),
        "logit_bias": draw_(
            st.sampled_from([(), ((0, 3.3), (7, -7.7), (99999, 1.0)), tuple((each, 100.0) for each in range(6))])
        ),
    }
    params |= {name: draw_(st.sampled_from(values)) for name, values in other_values(params).items()}
    return row(choice=draw_(st.integers(0, 3)), index=len(output), prompt=draw_(tokens), output=output, allowed=allowed, **params)


def test_tokens_that_only_the_device_has_seen_are_penalized() -> None:
    outputs = [(3, 3, 7), (9,), (2, 4), (8, 8)]
    params: list[dict[str, Any]] = [{"repetition_penalty": 3.0}, {}, {"presence_penalty": 9.0}, {"frequency_penalty": 9.0}]
    logits = torch.zeros((4, 40))
    for place, output in enumerate(outputs):
        logits[place, output[-1]] = 5.0
    known = [
        row(index=2, output=output, temperature=0.0, logprobs=1, **each) for output, each in zip(outputs, params, strict=True)
    ]
    before = [replace(each, output=each.output[:-1]) for each in known]
    unseen = Unseen(torch.tensor([8, 9, 4, 7], dtype=torch.int32, device=DEVICE), [3, 1, 2, 0])
    expected = DeviceSampler(CHUNK).sample(logits.to(DEVICE), known)
    assert DeviceSampler(CHUNK).start(logits.to(DEVICE), before, unseen).finish() == expected
    assert [token.token_id for token in expected] != [output[-1] for output in outputs]


@settings(deadline=None, max_examples=8)
@given(st.data(), st.sampled_from([20, 33, 100]), st.integers(0, 1000), st.sampled_from([0.0, 0.0, 1.0, 3.0]))
def test_the_same_tokens_as_on_the_host(data: st.DataObject, vocab: int, seed: int, grain: float) -> None:
    rows = data.draw(st.lists(sample_rows(vocab), min_size=1, max_size=2))
    assert_same(logits_of(len(rows), vocab, seed, grain), rows)


@settings(deadline=None, max_examples=3)
@given(st.integers(0, 1000), st.floats(0.01, 0.999), st.sampled_from([0, 5, 40]), st.sampled_from([0.0, 0.5, 2.0]))
@example(0, 0.5, 0, 2.0)
def test_the_sets_that_filters_keep_are_the_same(seed: int, top_p: float, top_k: int, grain: float) -> None:
    """Many draws from one row see the whole set."""
    logits = logits_of(1, 70, seed, grain).expand(6, -1).contiguous()
    rows = [row(seed=seed, index=i, top_p=top_p, top_k=top_k, min_p=0.01, temperature=4.0) for i in range(6)]
    assert_same(logits, rows)


@pytest.mark.parametrize("top_p", [0.05, 0.5, 0.95])
def test_equals_at_the_bound_of_top_p_are_taken_by_their_ids(top_p: float) -> None:
    logits = torch.zeros((6, 45))
    logits[:, 7] = 1.0
    assert_same(logits, [row(seed=3, index=i, top_p=top_p) for i in range(6)])


def test_biases_that_decide() -> None:
    logits = logits_of(4, 70, 3)
    most = tuple((token, -100.0) for token in range(69))
    rows = [
        row(temperature=0.0, logit_bias=((41, 100.0),), logprobs=2),
        row(temperature=0.0, logit_bias=most),
        row(
            temperature=1.0, logit_bias=((3, 5.5), (60, 5.5)), repetition_penalty=1.7, prompt=(3,), output=(60,), index=1, seed=9
        ),
        row(temperature=0.0),
    ]
    assert_same(logits, rows)
    assert [token.token_id for token in Sampler().sample(logits, rows)][:2] == [41, 69]


def test_penalties_that_decide() -> None:
    """A negative logit is multiplied; what came three times is lowered three times. Without, token 1 would be the best."""
    logits = torch.full((2, 40), -9.0)
    logits[:, 1:3] = torch.tensor([[-1.0, -1.2], [3.0, 2.0]])
    rows = [
        row(temperature=0.0, repetition_penalty=1.5, prompt=(1,)),
        row(temperature=0.0, frequency_penalty=0.5, output=(1, 1, 1), index=3),
    ]
    assert_same(logits, rows)
    assert [token.token_id for token in DeviceSampler(CHUNK).sample(logits.to(DEVICE), rows)] == [2, 2]


def test_those_as_likely_as_the_likeliest_pass_the_highest_min_p() -> None:
    """Who just meets the bound is kept: the highest leaves the likeliest, whoever is as likely, and nobody else."""
    logits = torch.full((12, 40), 1.0)
    logits[:, [7, 35]] = 2.0
    rows = [row(seed=3, index=i, min_p=1.0) for i in range(12)]
    assert_same(logits, rows)
    assert {token.token_id for token in DeviceSampler(CHUNK).sample(logits.to(DEVICE), rows)} == {7, 35}


def test_nobody_behind_the_bound_of_top_k_is_drawn() -> None:
    """The next one would be drawn as often as they are; every byte of its score differs from that of the last that is kept."""
    logits = torch.full((16, 40), -1e5)
    logits[:, :5] = torch.tensor([0.0, -1.0, -4.0, -16.0, -64.0])
    rows = [row(seed=9, index=i, temperature=100.0, top_k=2 + i % 2) for i in range(16)]
    assert_same(logits, rows)
    drawn = [token.token_id for token in DeviceSampler(CHUNK).sample(logits.to(DEVICE), rows)]
    assert (set(drawn[::2]), set(drawn[1::2])) == ({0, 1}, {0, 1, 2})


def test_equals_at_the_bound_of_top_k_all_stay() -> None:
    logits = torch.tensor([[1.0, 2.0, 2.0, 2.0, 0.0, -0.0, 3.0]]).expand(8, -1).contiguous()
    assert_same(logits, [row(seed=4, index=i, top_k=2) for i in range(8)])


def test_greedy_ties_in_different_chunks_give_the_lowest_id() -> None:
    logits = torch.zeros((2, 3 * CHUNK))
    logits[0, [CHUNK + 3, 2 * CHUNK]] = 1.0
    sampler = DeviceSampler(CHUNK)
    assert [token.token_id for token in sampler.sample(logits.to(DEVICE), [row(temperature=0)] * 2)] == [CHUNK + 3, 0]
    assert sampler.sample(logits.to(DEVICE)[:0], []) == []


def test_a_row_is_drawn_alike_alone_and_among_others() -> None:
    logits = logits_of(4, 90, 1).to(DEVICE)
    rows = [row(seed=i, top_p=0.8, top_k=30 * (i % 2), repetition_penalty=1.0 + i / 4, prompt=(1, 2), index=i) for i in range(4)]
    sampler = DeviceSampler(CHUNK)
    together = sampler.sample(logits, rows)
    assert together == [sampler.sample(logits[i : i + 1], [rows[i]])[0] for i in range(4)]


def test_more_forbidden_tokens_than_anybody_needs() -> None:
    """How many there are is a client's to say."""
    logits = logits_of(2, 300, 5)
    many: dict[str, Any] = {"stop_token_ids": tuple(range(256)), "min_tokens": 2}
    assert_same(logits, [row(temperature=0, index=1, **many), row(seed=1, index=0, **many)])


def test_rows_that_only_go_on_need_no_message() -> None:
    """Steps of rows that stay the same: what was sent for the first holds for all; greedy ones send nothing at all."""
    sampler, reference = DeviceSampler(CHUNK), Sampler()
    params = [SamplingParams(seed=i, top_p=0.9, temperature=0.7 * i, max_tokens=9) for i in range(3)]
    for step in range(4):
        rows = [SampleRow(p, 1, step + 2 * i, (), (), frozenset()) for i, p in enumerate(params)]
        logits = logits_of(3, 90, step)
        assert sampler.sample(logits.to(DEVICE), rows) == reference.sample(logits, rows)
    assert num_messages(sampler) == 1
    rows[1] = SampleRow(params[1], 1, 77, (), (), frozenset())
    assert sampler.sample(logits.to(DEVICE), rows) == reference.sample(logits, rows)
    assert num_messages(sampler) == 2
    plain = [SampleRow(SamplingParams(temperature=0.0, max_tokens=9), 0, i, (), (), frozenset()) for i in range(3)]
    assert sampler.sample(logits.to(DEVICE), plain) == reference.sample(logits, plain)
    assert num_messages(sampler) == 2


def num_messages(sampler: DeviceSampler) -> int:
    assert sampler._maker is not None
    return sampler._maker.num_messages


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("place", [0, 35, 99])
def test_one_logit_that_is_no_number_gives_no_token(bad: float, place: int) -> None:
    logits = logits_of(4, 100, seed=3)
    logits[1:3, place] = bad
    for params in (
        {"temperature": 0.0},
        {"temperature": 0.0, "repetition_penalty": 1.5},
        {"seed": 1},
        {"top_p": 0.9},
        {"logprobs": 2},
    ):
        rows = [row(prompt=(place,), **params) for _ in range(4)]
        assert_same(logits, rows)
        assert DeviceSampler(CHUNK).sample(logits[1:2].to(DEVICE), rows[1:2]) == [SampledToken(NO_TOKEN, None)]


def test_a_penalty_that_gives_infinity_gives_no_token() -> None:
    logits = torch.tensor([[3e38, 1.0, 0.0]])
    kinds: list[dict[str, Any]] = [{"temperature": 0.0}, {}]
    for params in kinds:
        assert_same(logits, [row(repetition_penalty=0.01, output=(0,), index=1, **params)])


@triton.jit
def _numbers(
    bits: tl.tensor,
    noises: tl.tensor,
    powers: tl.tensor,
    seed: tl.tensor,
    choice: tl.tensor,
    index: tl.tensor,
    COUNT: tl.constexpr,
) -> None:
    ids = tl.arange(0, COUNT)
    random = random_bits(tl.load(seed), choice, index, ids)
    tl.store(bits + ids, random.to(tl.int64))
    tl.store(noises + ids, gumbel_of(random))
    tl.store(powers + ids, exp_of(tl.load(powers + ids)))


@settings(deadline=None, max_examples=5)
@given(st.integers(0, 2**64 - 1), st.integers(0, 2**31 - 1), st.integers(0, 2**31 - 1))
def test_noise_is_that_of_the_engine_and_exponentials_are_right(seed: int, choice: int, index: int) -> None:
    count = 512
    bits, noises = torch.empty(count, dtype=torch.int64, device=DEVICE), torch.empty(count, device=DEVICE)
    exponents = torch.linspace(-110, 0, count)
    exponents[0] = -torch.inf
    powers = exponents.to(DEVICE, copy=True)
    unsigned = torch.from_numpy(np.array([seed], np.uint64).view(np.int64)).to(DEVICE)
    _numbers[(1,)](bits, noises, powers, unsigned, choice, index, COUNT=count, enable_fp_fusion=False)
    ids = torch.arange(count)
    assert torch.equal(bits.cpu(), counter_rng.random_bits(seed, choice, index, ids))
    torch.testing.assert_close(noises.cpu(), counter_rng.gumbel(seed, choice, index, ids), rtol=2.0**-22, atol=2.0**-22)
    torch.testing.assert_close(powers.cpu().double(), exponents.double().exp(), rtol=2.0**-23, atol=2.0**-149)


def test_shapes_that_do_not_fit_are_named() -> None:
    maker, scratch, rows = BatchMaker(40, DEVICE), SamplingScratch.of(1, 40, DEVICE, chunk=CHUNK), [row()]
    batch = maker.of(rows, maker.plans(rows))
    with pytest.raises(ValueError, match="logits"):
        draw(torch.zeros((2, 40), device=DEVICE), batch, scratch, chunk=CHUNK)
    with pytest.raises(ValueError, match="scratch"):
        draw(torch.zeros((1, 40), device=DEVICE), batch, SamplingScratch.of(1, 41, DEVICE, chunk=CHUNK), chunk=CHUNK)
    with pytest.raises(ValueError, match="chunk"):
        draw(torch.zeros((1, 40), device=DEVICE), batch, scratch)
    with pytest.raises(ValueError, match="scratch"):
        greedy(torch.zeros((2, 40), device=DEVICE), GreedyScratch.of(1, 40, DEVICE, chunk=CHUNK), chunk=CHUNK)


@pytest.mark.gpu
@pytest.mark.parametrize("vocab", [128_256, 151_936])
def test_big_vocabularies(vocab: int) -> None:
    rows = [
        row(
            seed=i,
            index=i,
            temperature=(i % 4) * 0.5,
            top_k=(0, 50)[i % 2],
            top_p=(1.0, 0.9, 0.5)[i % 3],
            min_p=(0.0, 0.02)[i % 2],
        )
        for i in range(48)
    ]
    assert_same(logits_of(48, vocab, 0), rows, 4096)


@pytest.mark.parametrize("most", [0, 1, 5, 20, 300])
def test_the_likeliest_are_those_of_a_stable_sort(most: int) -> None:
    """Among equals the lowest id first: many are equal, also where the selection ends; some are impossible."""
    generator = torch.Generator().manual_seed(most)
    logits = torch.randint(-3, 4, (6, 300), generator=generator).float()
    logits[1], logits[2, 40:] = 0.0, float("-inf")
    logits[3] = torch.randn(300, generator=generator)
    logits[4] = float("-inf")
    logits[4, 7] = 2.0  # the only one, with log-probability zero
    logits[5, ::2] = -0.0
    asked, tokens = torch.tensor([0, 1, 2, 3, 4, 5]), torch.tensor([3, 0, 1, 299, 7, 8], dtype=torch.int32)
    lines = _likeliest(logits.to(DEVICE), tokens.to(DEVICE), asked.to(DEVICE), most).cpu()
    logprobs = logits.to(DEVICE).log_softmax(-1).cpu()
    values, ids = logprobs.sort(dim=-1, descending=True, stable=True)
    assert torch.equal(lines[:, 1 : 1 + most], ids[:, :most].int())
    assert torch.equal(lines[:, 1 + most :].contiguous().view(torch.float32), values[:, :most])
    assert torch.equal(lines[:, :1].contiguous().view(torch.float32), logprobs.gather(1, tokens.long()[:, None]))
