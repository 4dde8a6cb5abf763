"""Drawing tokens: the right distribution, each rule by its definition, and nothing but the row's own inputs."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pdmesh.engine.outputs import TokenLogprobs
from pdmesh.engine.sampling.counter_rng import gumbel, gumbel_array, random_bits
from pdmesh.engine.sampling.sampler import SampledToken, Sampler, SampleRow, keep_min_p, keep_top_k, keep_top_p, penalize
from pdmesh.sampling_params import SamplingParams
from tests.support.sampling_values import other_values

EOS = 5


def row(
    *, choice: int = 0, index: int = 0, prompt: tuple[int, ...] = (), output: tuple[int, ...] = (), **params: Any
) -> SampleRow:
    return SampleRow(SamplingParams(**{"max_tokens": 100, **params}), choice, index, prompt, output, frozenset({EOS}))


def draw(logits: torch.Tensor, sample_row: SampleRow) -> int:
    [token] = Sampler().sample(logits[None], [sample_row])
    return token.token_id


def draws(logits: torch.Tensor, count: int, **params: Any) -> Counter[int]:
    rows = [row(index=index, **params) for index in range(count)]
    return Counter(token.token_id for token in Sampler().sample(logits.expand(count, -1), rows))


def random_logits(size: int, seed: int = 0, scale: float = 2.0) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed)) * scale


def chi_square_p_value(counts: Counter[int], probabilities: torch.Tensor, total: int) -> float:
    """Tokens expected fewer than 5 times are one class."""
    expected = (probabilities.double() / probabilities.double().sum() * total).tolist()
    common = [i for i, value in enumerate(expected) if value >= 5]
    pairs = [(counts[i], expected[i]) for i in common]
    rest = sum(expected) - sum(expected[i] for i in common)
    if rest > 1e-6:
        pairs.append((total - sum(counts[i] for i in common), rest))
    statistic = sum((seen - value) ** 2 / value for seen, value in pairs)
    return float(torch.special.gammaincc(torch.tensor((len(pairs) - 1) / 2).double(), torch.tensor(statistic / 2).double()))


@pytest.mark.parametrize(("seed", "temperature"), [(1, 1.0), (2, 0.7), (2**64 - 1, 1.5)])
def test_draws_have_the_distribution_of_the_softmax(seed: int, temperature: float) -> None:
    logits = random_logits(60)
    counts = draws(logits, 10_000, seed=seed, temperature=temperature)
    assert chi_square_p_value(counts, (logits / temperature).softmax(-1), 10_000) > 1e-3


def test_draws_over_seeds_and_choices_have_the_distribution_too() -> None:
    logits = random_logits(40, seed=3)
    rows = [row(seed=seed, choice=choice) for seed in range(2500) for choice in range(4)]
    counts = Counter(token.token_id for token in Sampler().sample(logits.expand(10_000, -1), rows))
    assert chi_square_p_value(counts, logits.softmax(-1), 10_000) > 1e-3


def test_filtered_draws_have_the_renormalized_distribution() -> None:
    logits = random_logits(60)
    kept = keep_min_p(keep_top_p(keep_top_k(logits, 20), 0.9), 0.02)
    counts = draws(logits, 10_000, seed=9, top_k=20, top_p=0.9, min_p=0.02)
    assert set(counts) <= set((kept > -math.inf).nonzero().flatten().tolist())
    assert chi_square_p_value(counts, kept.softmax(-1), 10_000) > 1e-3


def test_a_bias_is_added_before_penalties_and_not_to_log_probabilities() -> None:
    logits = random_logits(40)
    bias = ((3, 2.5), (7, -100.0), (99, 1.0))  # 99 is outside the vocabulary
    counts = draws(logits, 10_000, seed=4, logit_bias=bias)
    biased = logits.clone()
    biased[3] += 2.5
    biased[7] -= 100.0
    assert chi_square_p_value(counts, biased.softmax(-1), 10_000) > 1e-3 and not counts[7]
    likeliest = int(logits.argmax())
    plain, banned = row(temperature=0.0), row(temperature=0.0, logit_bias=((likeliest, -100.0),), logprobs=1)
    [first, second] = Sampler().sample(logits.expand(2, -1), [plain, banned])
    assert first.token_id == likeliest and second.token_id == int(logits.topk(2).indices[1])
    assert second.logprobs is not None and second.logprobs.top[0][0] == likeliest
    assert second.logprobs.top[0][1] == pytest.approx(float(logits.log_softmax(-1).max()))
    # A repetition penalty multiplies what the bias made of the logit: -1 of 4 becomes -2, which -1.5 is above.
    penalized = torch.tensor([4.0, -1.5])
    assert draw(penalized, row(prompt=(0,), temperature=0.0, repetition_penalty=2.0, logit_bias=((0, -5.0),))) == 1


def test_successive_draws_are_not_correlated() -> None:
    logits = torch.zeros(4)
    tokens = [draw(logits, row(seed=11, index=index)) for index in range(4000)]
    pairs = Counter(4 * a + b for a, b in zip(tokens[::2], tokens[1::2], strict=True))
    assert chi_square_p_value(pairs, torch.ones(16), 2000) > 1e-3


def test_noise_is_the_function_it_says() -> None:
    """The mixing, written once more with Python's integers: a change of the noise would change every seeded answer."""
    mask = 2**64 - 1

    def mix(x: int) -> int:
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & mask
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & mask
        return x ^ (x >> 31)

    golden = 0x9E3779B97F4A7C15
    for seed, choice, index, token in ((0, 0, 0, 0), (7, 1, 2, 3), (2**64 - 1, 3, 10**6, 49151)):
        key = mix((mix((mix(seed) + golden * (choice + 1)) & mask) + golden * (index + 1)) & mask)
        second = mix(key ^ 0xD1B54A32D192ED03)
        expected = mix(mix(((token + 1) * golden + key) & mask) ^ second) >> 32
        assert random_bits(seed, choice, index, torch.tensor([token])).tolist() == [expected]


def test_noise_is_pinned() -> None:
    assert random_bits(42, 0, 0, torch.arange(4)).tolist() == [4097627741, 2785541123, 1757602773, 3614473156]
    assert torch.isfinite(gumbel(42, 0, 0, torch.arange(10_000))).all()


@settings(deadline=None)
@given(st.integers(0, 2**64 - 1), st.integers(0, 2**31), st.integers(0, 2**31))
def test_noise_in_numpy_is_the_same_but_for_rounding(seed: int, choice: int, index: int) -> None:
    ids = torch.arange(0, 200_000, 101)
    noise = torch.from_numpy(gumbel_array(seed, choice, index, ids.numpy()))
    torch.testing.assert_close(noise, gumbel(seed, choice, index, ids), rtol=1e-5, atol=1e-5)


def test_noise_of_a_token_does_not_depend_on_which_others_are_asked_for() -> None:
    whole = gumbel(1, 2, 3, torch.arange(1000))
    some = torch.tensor([999, 5, 17])
    assert torch.equal(gumbel(1, 2, 3, some), whole[some])


listed: dict[str, st.SearchStrategy[Any]] = {
    "temperature": st.sampled_from([0.0, 1e-6, 0.5, 1.0, 3.0]),
    "top_k": st.integers(0, 50),
    "top_p": st.floats(0.01, 1.0),
    "min_p": st.floats(0.0, 1.0),
    "repetition_penalty": st.sampled_from([1.0, 0.5, 1.3]),
    "presence_penalty": st.sampled_from([0.0, -1.0, 2.0]),
    "frequency_penalty": st.sampled_from([0.0, 0.5]),
    "seed": st.integers(0, 2**64 - 1),
    "min_tokens": st.integers(0, 3),
    "logprobs": st.sampled_from([None, 0, 3]),
    "stop_token_ids": st.sampled_from([(), (1, 2)]),
    "ignore_eos": st.booleans(),
}
others = {name: st.sampled_from(values) for name, values in other_values(listed).items()}
sampling: st.SearchStrategy[dict[str, Any]] = st.fixed_dictionaries({**listed, **others})


@settings(deadline=None, max_examples=60)
@given(st.lists(sampling, min_size=2, max_size=6), st.integers(0, 1000))
def test_a_row_depends_on_nothing_beside_it(params: list[dict[str, Any]], seed: int) -> None:
    logits = torch.stack([random_logits(40, seed=seed + i) for i in range(len(params))])
    before = logits.clone()
    rows = [row(choice=i, index=i % 4, prompt=(1, 2), output=(3,) * i, **p) for i, p in enumerate(params)]
    together = Sampler().sample(logits, rows)
    alone = [Sampler().sample(logits[i : i + 1], [rows[i]])[0] for i in range(len(rows))]
    assert together == alone
    assert torch.equal(logits, before)


def test_greedy_takes_the_lowest_id_of_equals() -> None:
    assert draw(torch.tensor([0.0, 3.0, 1.0, 3.0]), row(temperature=0)) == 1
    assert draw(torch.tensor([0.0, 3.0, 1.0, 3.0]), row(temperature=0, repetition_penalty=1.1)) == 1


def test_a_tiny_temperature_is_greedy() -> None:
    logits = random_logits(50)
    assert all(draw(logits, row(temperature=1e-30, seed=seed)) == int(logits.argmax()) for seed in range(20))


def test_top_k_keeps_the_k_likeliest() -> None:
    kept = keep_top_k(torch.tensor([1.0, 4.0, 2.0, 3.0]), 2)
    assert kept.tolist() == [-math.inf, 4.0, -math.inf, 3.0]
    assert keep_top_k(kept, 0) is kept


@given(st.integers(0, 500), st.floats(0.001, 0.999))
def test_top_p_keeps_the_smallest_sufficient_set(seed: int, top_p: float) -> None:
    logits = random_logits(30, seed)
    probabilities = logits.double().softmax(-1)
    kept = (keep_top_p(logits, top_p) > -math.inf).nonzero().flatten().tolist()
    assert set(kept) == set(probabilities.argsort(descending=True)[: len(kept)].tolist())
    mass = sorted(probabilities[kept].tolist(), reverse=True)
    assert sum(mass) >= top_p - 1e-5
    assert len(kept) == 1 or sum(mass[:-1]) < top_p + 1e-5


def test_top_p_takes_the_lowest_ids_of_equals() -> None:
    assert (keep_top_p(torch.zeros(10), 0.35) > -math.inf).nonzero().flatten().tolist() == [0, 1, 2, 3]


def test_min_p_is_relative_to_the_likeliest() -> None:
    probabilities = torch.tensor([0.5, 0.3, 0.14, 0.06])
    assert (keep_min_p(probabilities.log(), 0.25) > -math.inf).tolist() == [True, True, True, False]


def test_repetition_penalty_is_that_of_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    logits, history = random_logits(20), torch.tensor([[3, 4, 4, 9, 1]])
    expected = transformers.RepetitionPenaltyLogitsProcessor(1.7)(history, logits[None].clone())[0]
    actual = penalize(logits, SamplingParams(max_tokens=1, repetition_penalty=1.7), [3, 4], [4, 9, 1])
    assert torch.equal(actual, expected)


def test_presence_and_frequency_penalties_count_the_output_only() -> None:
    params = SamplingParams(max_tokens=1, presence_penalty=1.0, frequency_penalty=0.25)
    actual = penalize(torch.zeros(5), params, [0, 0], [1, 3, 3])
    assert actual.tolist() == [0.0, -1.25, 0.0, -1.5, 0.0]


def test_ends_wait_for_min_tokens() -> None:
    logits = torch.zeros(8)
    logits[EOS], logits[2] = 9.0, 8.0
    assert draw(logits, row(temperature=0, min_tokens=2, index=1, stop_token_ids=(2, 999))) == 0
    assert draw(logits, row(temperature=0, min_tokens=2, index=2, stop_token_ids=(2,))) == EOS
    assert draw(logits, row(temperature=0, min_tokens=2, index=1, stop_token_ids=(2,), ignore_eos=True)) == EOS
    assert draws(logits, 200, seed=1, min_tokens=1000, max_tokens=1000)[EOS] == 0


def test_logprobs_are_those_of_the_raw_logits() -> None:
    logits = torch.tensor([1.0, 3.0, 2.0, 3.0])
    expected = logits.log_softmax(-1).tolist()
    [token] = Sampler().sample(logits[None], [row(temperature=0.5, repetition_penalty=2.0, prompt=(1, 3), top_k=1, logprobs=3)])
    assert token == SampledToken(2, TokenLogprobs((2, expected[2]), ((1, expected[1]), (3, expected[3]), (2, expected[2]))))
    [token] = Sampler().sample(logits[None], [row(temperature=0, logprobs=0)])
    assert token == SampledToken(1, TokenLogprobs((1, expected[1]), ()))


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"temperature": -1.0}, "temperature: -1.0 is not allowed; it must be at least 0"),
        ({"temperature": math.nan}, "temperature: nan is not a finite number"),
        ({"top_k": -1}, "top_k"),
        ({"top_p": 0.0}, "top_p"),
        ({"min_p": 1.1}, "min_p"),
        ({"repetition_penalty": 0.0}, "repetition_penalty"),
        ({"presence_penalty": math.inf}, "presence_penalty"),
        ({"seed": 2**64}, "seed"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"min_tokens": 101}, r"min_tokens: 101 is not allowed; it must be in \[0, max_tokens=100\]"),
        ({"stop_token_ids": (3, -2)}, "stop_token_ids"),
        ({"logprobs": -1}, "logprobs"),
        ({"n": 0}, "n: 0"),
    ],
)
def test_a_wrong_parameter_is_named(params: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SamplingParams(**{"max_tokens": 100, **params}).validate()
