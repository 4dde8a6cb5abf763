"""The native sampler draws what the torch Sampler draws, whatever stands beside a row, on every instruction tier."""

from __future__ import annotations

import ctypes
import math
import random
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from pdmesh.engine.kernels.cpu import build, isa
from pdmesh.engine.kernels.cpu.sampling import NativeSampler
from pdmesh.engine.sampling.counter_rng import gumbel, random_bits
from pdmesh.engine.sampling.grammar import Bits
from pdmesh.engine.sampling.sampler import (
    NO_TOKEN,
    SampledToken,
    Sampler,
    SampleRow,
    add_bias,
    apply_temperature,
    forbid,
    keep_allowed,
    keep_likely,
    penalize,
)
from pdmesh.sampling_params import SamplingParams
from tests.support.sampling_values import other_values
from tools import sampling_params

EOS = 5
TIERS = sorted({isa.supported()[0].name, *(tier.name for tier in isa.supported() if tier.name in ("avx2", "portable"))})
Load = Callable[[str], ctypes.CDLL]


@pytest.fixture(scope="module")
def load(tmp_path_factory: pytest.TempPathFactory) -> Load:
    """Loads the sampler, and none of the other kernels, for a tier."""
    folder, loaded = tmp_path_factory.mktemp("sampling"), {}
    for pattern in ("sampling*.cpp", "sampling*.h", "simd*.h", "parallel.h", "core_table.h"):
        for path in build.SOURCES.glob(pattern):
            shutil.copy(path, folder)

    def load_tier(name: str) -> ctypes.CDLL:
        if name not in loaded:
            try:
                path = build.build_ahead(isa.by_name(name), folder / "built", project=build.Project(folder))
            except build.NoCompiler as error:
                pytest.skip(str(error))
            loaded[name] = ctypes.CDLL(str(path))
        return loaded[name]

    return load_tier


@pytest.fixture
def library(load: Load) -> ctypes.CDLL:
    return load(isa.supported()[0].name)


@pytest.fixture
def native(library: ctypes.CDLL) -> Iterator[NativeSampler]:
    sampler = NativeSampler(library, 2)
    yield sampler
    sampler.close()


def row(*, choice: int = 0, index: int = 0, prompt: Sequence[int] = (), output: Sequence[int] = (), **params: Any) -> SampleRow:
    return SampleRow(SamplingParams(**{"max_tokens": 100, **params}), choice, index, prompt, output, frozenset({EOS}))


def random_logits(rows: int, size: int, seed: int = 0, scale: float = 2.0) -> Tensor:
    return torch.randn(rows, size, generator=torch.Generator().manual_seed(seed)) * scale


def random_row(chance: random.Random, vocab: int, **fixed: Any) -> SampleRow:
    tokens = [chance.randrange(min(vocab, 300)) for _ in range(60)]
    params: dict[str, Any] = {
        "temperature": chance.choice([0.0, 0.1, 0.7, 1.0, 1.0, 5.0]),
        "top_k": chance.choice([0, 0, 1, 5, 50, 700, vocab, vocab + 1]),
        "top_p": chance.choice([1.0, 1.0, 0.05, 0.5, 0.9, 0.95, 0.999]),
        "min_p": chance.choice([0.0, 0.0, 0.001, 0.05, 0.5, 1.0]),
        "repetition_penalty": chance.choice([1.0, 1.0, 1.3, 0.8]),
        "presence_penalty": chance.choice([0.0, 0.0, 1.5, -0.3]),
        "frequency_penalty": chance.choice([0.0, 0.0, 0.7]),
        "seed": chance.randrange(2**64),
        "min_tokens": chance.choice([0, 0, 10]),
        "stop_token_ids": chance.choice([(), (1, 2, vocab + 5)]),
        "ignore_eos": chance.random() < 0.3,
        "logprobs": chance.choice([None, None, 0, 4]),
        "logit_bias": chance.choice([(), (), ((tokens[0], 3.3), (vocab + 5, 1.0)), tuple((each, -7.7) for each in {*tokens})]),
    }
    params |= {name: chance.choice(values) for name, values in other_values(params).items()}
    index = chance.randrange(20)
    prompt, output = tuple(tokens[:40]), tokens[40 : 40 + index]
    made = row(choice=chance.randrange(4), index=index, prompt=prompt, output=output, **params | fixed)
    return replace(made, allowed=random_mask(chance, vocab) if chance.random() < 0.4 else None)


def random_mask(chance: random.Random, vocab: int) -> Bits:
    """Words of all, some and no tokens, as grammars have them; at least one token that min_tokens never forbids."""
    bits = np.zeros(-(-vocab // 32), np.uint32)
    for word in range(len(bits)):
        bits[word] = chance.choice([0, 0, 2**32 - 1, chance.getrandbits(32), 1 << chance.randrange(32)])
    bits[0] |= 1 << 11
    return bits


def reference(logits: Tensor, r: SampleRow) -> tuple[Tensor, Tensor]:
    """Of the torch functions, for one row [V] with a temperature: logits of what can be drawn, and scores."""
    if r.allowed is not None:
        logits = keep_allowed(logits, r.allowed)
    logits = add_bias(logits, r.params.logit_bias)
    logits = forbid(penalize(logits, r.params, r.prompt, r.output), r.forbidden)
    logits = apply_temperature(logits, r.params.temperature)
    kept = keep_likely(logits, r.params)
    return kept, kept + gumbel(r.params.seed, r.choice, r.index, torch.arange(len(logits)))


def candidates(sampler: NativeSampler, logits: Tensor, r: SampleRow) -> set[int]:
    """What the rules leave of one row [V], by the function that the library has for this test."""
    function = sampler._library.pdmesh_sample_candidates
    function.argtypes, function.restype = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p, ctypes.c_void_p], ctypes.c_int64
    found = np.empty(len(logits), np.int64)
    packed, _alive = sampler._pack([r], sampler._plans_of([r]))
    return set(found[: function(logits.data_ptr(), len(logits), packed.ctypes.data, found.ctypes.data)].tolist())


def tokens_of(sampler: NativeSampler | Sampler, logits: Tensor, rows: Sequence[SampleRow]) -> list[int]:
    return [token.token_id for token in sampler.sample(logits, rows)]


def test_what_is_made_from_the_description_is_fresh() -> None:
    """The record of sampling_params.h beside the record of NativeSampler, and the lists of parameters in the documents."""
    assert [str(path) for path, text in sampling_params.files().items() if path.read_text(encoding="utf-8") != text] == []


@pytest.mark.parametrize("tier", TIERS)
def test_the_noise_is_that_of_the_torch_sampler(tier: str, load: Load) -> None:
    function = load(tier).pdmesh_sample_noise
    int64, pointer = ctypes.c_int64, ctypes.c_void_p
    function.argtypes, function.restype = [ctypes.c_uint64, int64, int64, int64, pointer, pointer], None
    bits, noise = np.empty(70_000, np.uint32), np.empty(70_000, np.float32)
    for seed, choice, index in ((0, 0, 0), (42, 3, 1000), (2**64 - 1, 0, 7)):
        function(seed, choice, index, len(bits), bits.ctypes.data, noise.ctypes.data)
        ids = torch.arange(len(bits))
        assert bits.tolist() == random_bits(seed, choice, index, ids).tolist()
        torch.testing.assert_close(torch.from_numpy(noise), gumbel(seed, choice, index, ids), rtol=3e-7, atol=3e-7)


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize(("vocab", "count", "scale"), [(5000, 600, 3.0), (49_152, 40, 2.0), (20_001, 80, 0.01), (17, 300, 2.0)])
def test_tokens_are_those_of_the_torch_sampler(tier: str, vocab: int, count: int, scale: float, load: Load) -> None:
    chance = random.Random(vocab)
    logits = random_logits(count, vocab, seed=vocab, scale=scale)
    rows = [random_row(chance, vocab, logprobs=None) for _ in range(count)]
    sampler = NativeSampler(load(tier), 2)
    expected, actual = tokens_of(Sampler(), logits, rows), tokens_of(sampler, logits, rows)
    sampler.close()
    different = [i for i in range(count) if expected[i] != actual[i]]
    assert len(different) <= 1 + count // 500
    for i in different:  # only where roundings decide
        _, scores = reference(logits[i], rows[i])
        assert math.isclose(scores[expected[i]], scores[actual[i]], rel_tol=1e-5, abs_tol=1e-5)


@pytest.mark.parametrize("params", [{}, {"temperature": 0.3}, {"temperature": 30.0}])
@pytest.mark.parametrize("scale", [0.0, 1.0, 8.0])
def test_the_fused_pass_draws_the_same_from_any_distribution(params: dict[str, Any], scale: float, native: NativeSampler) -> None:
    """Flat ones, where thousands of tokens come near the winner, and peaked ones, where nearly all are passed over."""
    logits = random_logits(60, 10_007, seed=1, scale=scale)
    rows = [row(seed=i, index=i % 7, **params) for i in range(60)]
    assert tokens_of(native, logits, rows) == tokens_of(Sampler(), logits, rows)


def test_a_token_far_below_can_win_by_its_noise(native: NativeSampler) -> None:
    """The fused pass leaves out what no noise could lift: here one token of 300 000 has just enough, or just not."""
    for seed in range(8):
        noise = gumbel(seed, 0, 0, torch.arange(300_000))
        unlikely, logits = int(noise.argmax()), torch.full((2, 300_000), -60.0)
        logits[:, 0] = 0.0
        logits[:, unlikely] = noise[0] - noise[unlikely] + torch.tensor([1e-3, -1e-3])
        assert tokens_of(native, logits, [row(seed=seed)] * 2) == [unlikely, 0]


def test_candidates_are_those_of_the_torch_rules(native: NativeSampler) -> None:
    """Where a probability sums up to top_p within roundings, the set may have one token more or less."""
    chance, different = random.Random(3), 0
    for case in range(400):
        vocab = chance.choice([40, 511, 2000, 9000])
        logits = random_logits(1, vocab, seed=case, scale=chance.choice([0.01, 1.0, 3.0, 6.0]))[0]
        if chance.random() < 0.3:
            logits = (logits * 2).round() / 2  # many equals
        r = random_row(chance, vocab, temperature=chance.choice([0.3, 1.0, 2.0]))
        kept, _ = reference(logits, r)
        difference = candidates(native, logits, r) ^ set((kept > -math.inf).nonzero().flatten().tolist())
        assert len(difference) <= max(1, vocab // 1000)
        different += bool(difference)
    assert different <= 4


def test_top_k_keeps_equals_of_the_last_and_top_p_the_lowest_ids(native: NativeSampler) -> None:
    logits = torch.zeros(1000)
    logits[10:20] = 1.0
    assert candidates(native, logits, row(top_k=3)) == set(range(10, 20))
    assert candidates(native, logits, row(top_k=11)) == set(range(1000))
    assert candidates(native, torch.zeros(1000), row(top_p=0.3505)) == set(range(351))
    assert candidates(native, torch.zeros(1000), row(top_p=1e-12)) == {0}
    assert candidates(native, logits, row(min_p=1.0)) == set(range(10, 20))


def test_equals_by_rounding_are_equals(native: NativeSampler) -> None:
    """Far below the maximum different logits become one number: top-k sees that one, as in torch."""
    logits = torch.arange(300, dtype=torch.float32) * 1e-9
    logits[7] = 100.0
    kept, _ = reference(logits, row(top_k=2))
    assert candidates(native, logits, row(top_k=2)) == set((kept > -math.inf).nonzero().flatten().tolist()) == set(range(300))


def test_what_a_grammar_forbids_is_never_drawn(native: NativeSampler) -> None:
    """However unlikely the only token that it allows is, and whatever else is asked for."""
    chance, logits = random.Random(4), random_logits(300, 2017, seed=4, scale=8.0)
    rows = [random_row(chance, 2017, min_tokens=0) for _ in range(300)]
    masks = [random_mask(chance, 2017) for _ in range(300)]
    for mask in masks[:100]:
        mask[:] = 0
        mask[chance.randrange(63)] = 1 << chance.randrange(32)
    rows = [replace(row, allowed=mask) for row, mask in zip(rows, masks, strict=True)]
    for sampler in (native, Sampler()):
        for token, mask in zip(tokens_of(sampler, logits, rows), masks, strict=True):
            assert mask[token // 32] >> (token % 32) & 1
    likeliest = [row(temperature=0.0, logprobs=1)]
    masked = [replace(likeliest[0], allowed=masks[0])]
    for sampler in (native, Sampler()):  # log-probabilities stay the model's own
        [free], [bound] = sampler.sample(logits[:1], likeliest), sampler.sample(logits[:1], masked)
        assert free.logprobs and bound.logprobs
        assert bound.logprobs.top == free.logprobs.top
        assert bound.token_id != free.token_id


def test_penalties_are_equal_to_the_last_bit(native: NativeSampler) -> None:
    """Logits that differ in their last bits: the argmax is wrong as soon as one operation rounds otherwise."""
    chance, count = random.Random(5), 2000
    near = torch.randint(-40, 40, (count, 12), generator=torch.Generator().manual_seed(6)) * 2.0**-22
    logits = (near + torch.randn(count, 1, generator=torch.Generator().manual_seed(7))).contiguous()
    rows = [
        row(
            temperature=0,
            repetition_penalty=chance.uniform(0.9, 1.1),
            presence_penalty=chance.uniform(-1, 1),
            frequency_penalty=chance.uniform(-1, 1),
            prompt=tuple(range(12)),
            output=list(range(12)) * chance.randint(1, 5),
        )
        for _ in range(count)
    ]
    assert tokens_of(native, logits, rows) == tokens_of(Sampler(), logits, rows)


@pytest.mark.parametrize("num_threads", [1, 2, 5])
def test_a_row_depends_on_nothing_beside_it(num_threads: int, library: ctypes.CDLL, native: NativeSampler) -> None:
    chance = random.Random(8)
    logits = random_logits(120, 4000, seed=9)
    rows = [random_row(chance, 4000) for _ in range(120)]
    before = logits.clone()
    alone = [native.sample(logits[i : i + 1], [rows[i]])[0] for i in range(120)]
    sampler = NativeSampler(library, num_threads)
    order = random.Random(10).sample(range(120), 120)
    assert sampler.sample(logits, rows) == alone
    assert sampler.sample(logits[order], [rows[i] for i in order]) == [alone[i] for i in order]
    sampler.close()
    assert torch.equal(logits, before)


@pytest.mark.parametrize("vocab", [1, 2, 15, 16, 17, 31, 33, 511, 512, 513, 1500])
def test_any_size_of_the_vocabulary(vocab: int, native: NativeSampler) -> None:
    logits = random_logits(40, vocab, seed=vocab)
    rows = [row(seed=i, temperature=i % 2, logprobs=3) for i in range(40)]
    expected, actual = Sampler().sample(logits, rows), native.sample(logits, rows)
    assert [token.token_id for token in actual] == [token.token_id for token in expected]
    assert [[i for i, _ in t.logprobs.top] for t in actual if t.logprobs] == [
        [i for i, _ in t.logprobs.top] for t in expected if t.logprobs
    ]


def test_greedy_takes_the_lowest_id_of_equals(native: NativeSampler) -> None:
    logits = torch.zeros(3, 3000)
    logits[0, [700, 1900]] = 2.0
    logits[1] = -math.inf
    logits[2, 0], logits[2, 2999] = -1.0, 1.0
    assert tokens_of(native, logits, [row(temperature=0)] * 3) == [700, NO_TOKEN, 2999]
    assert tokens_of(native, logits, [row(temperature=0, repetition_penalty=1.1)] * 3) == [700, NO_TOKEN, 2999]


def test_a_tiny_temperature_is_greedy(native: NativeSampler) -> None:
    logits = random_logits(40, 900)
    for temperature in (1e-30, 1e-40, 1e-60):
        for params in ({}, {"top_k": 5}, {"top_p": 0.9}, {"min_p": 0.1}):
            rows = [row(temperature=temperature, seed=i, **params) for i in range(40)]
            assert tokens_of(native, logits, rows) == logits.argmax(-1).tolist()


@pytest.mark.parametrize("bad", [[math.nan], [math.nan, math.inf], [-math.inf], [math.inf], [math.nan, -math.inf], [3e38, -3e38]])
def test_logits_that_are_no_numbers_give_no_token(bad: list[float], native: NativeSampler) -> None:
    chance = random.Random(12)
    logits = random_logits(200, 700, seed=13)
    for i in range(100):
        logits[i, [chance.randrange(700) for _ in range(50)]] = bad[i % len(bad)]
    logits[100:] = torch.tensor(bad).repeat(700)[:700]
    rows = [random_row(chance, 700) for _ in range(200)]
    drawn = tokens_of(native, logits, rows)
    assert [token == NO_TOKEN for token in drawn] == [token.token_id == NO_TOKEN for token in Sampler().sample(logits, rows)]
    assert all(drawn[i] == NO_TOKEN for i in range(200) if not torch.isfinite(logits[i].amax()))
    assert tokens_of(native, logits, rows[:1] * 200) == tokens_of(native, logits, rows[:1] * 200)
    # Rows beside them are what they are without them.
    logits[1::2] = random_logits(100, 700, seed=14)
    assert native.sample(logits, rows)[1::2] == native.sample(logits[1::2].contiguous(), rows[1::2])


@pytest.mark.parametrize("params", [{"temperature": 0}, {}, {"top_k": 20}, {"top_p": 0.9}, {"min_p": 0.01}])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("place", [0, 511, 1299])
def test_one_bad_logit_is_enough(params: dict[str, Any], bad: float, place: int, native: NativeSampler) -> None:
    logits = random_logits(60, 1300)
    logits[1::2, place] = bad
    rows = [row(seed=i, **params) for i in range(60)]
    drawn = native.sample(logits, rows)
    assert drawn == Sampler().sample(logits, rows)
    assert {token.token_id for token in drawn[1::2]} == {NO_TOKEN}
    assert drawn[::2] == native.sample(logits[::2].contiguous(), rows[::2])


def test_a_penalty_that_gives_infinity_gives_no_token(native: NativeSampler) -> None:
    logits = torch.tensor([[3e38, 1.0, 0.0]])
    kinds: list[dict[str, Any]] = [{"temperature": 0}, {}, {"top_k": 2}, {"logprobs": 1}]
    for params in kinds:
        rows = [row(repetition_penalty=0.01, output=(0,), index=1, **params)]
        assert native.sample(logits, rows) == Sampler().sample(logits, rows) == [SampledToken(NO_TOKEN, None)]


def test_ends_wait_for_min_tokens(native: NativeSampler) -> None:
    logits = torch.zeros(1, 8)
    logits[0, EOS], logits[0, 2] = 9.0, 8.0

    def draw(**params: Any) -> int:
        return tokens_of(native, logits, [row(temperature=0, min_tokens=2, **params)])[0]

    assert draw(index=1, stop_token_ids=(2, 999)) == 0
    assert draw(index=2, stop_token_ids=(2,)) == EOS
    assert draw(index=1, stop_token_ids=(2,), ignore_eos=True) == EOS
    rows = [row(seed=i, min_tokens=90) for i in range(200)]
    assert EOS not in tokens_of(native, logits.expand(200, -1).contiguous(), rows)


def test_history_outside_the_vocabulary_is_nobodys(native: NativeSampler) -> None:
    r = row(temperature=0, repetition_penalty=2.0, frequency_penalty=1.0, prompt=(10**12, 8, 3), output=[-1, 2**62, 1])
    assert tokens_of(native, torch.tensor([[1.0, 3.0, 1.6, 3.1]]), [r]) == [2]


def test_a_history_that_grows_is_seen(native: NativeSampler) -> None:
    logits = torch.tensor([[3.0, 2.9, 2.8]])
    prompt, output = [0], [1]
    r = row(temperature=0, repetition_penalty=1.01, presence_penalty=1.0, prompt=prompt, output=output)
    assert tokens_of(native, logits, [r]) == [0]
    output.append(0)
    assert tokens_of(native, logits, [r]) == [2]
    prompt.append(2)
    output[:] = []
    assert tokens_of(native, logits, [r]) == [0]


def test_logprobs_are_those_of_the_raw_logits(native: NativeSampler) -> None:
    logits = (random_logits(30, 3000, scale=3.0) * 8).round() / 8  # many equals
    wanted = [None, 0, 1, 5, 40, 2999, 5000]
    rows = [
        row(seed=i, temperature=0.5 * (i % 3), repetition_penalty=1.5, prompt=(1, 3), top_k=7, logprobs=wanted[i % 7])
        for i in range(30)
    ]
    for expected, actual in zip(Sampler().sample(logits, rows), native.sample(logits, rows), strict=True):
        assert (actual.logprobs is None) == (expected.logprobs is None)
        if actual.logprobs and expected.logprobs:
            assert actual.logprobs.chosen == pytest.approx(expected.logprobs.chosen, abs=1e-5)
            assert [i for i, _ in actual.logprobs.top] == [i for i, _ in expected.logprobs.top]
            assert [p for _, p in actual.logprobs.top] == pytest.approx([p for _, p in expected.logprobs.top], abs=1e-5)


def test_rows_of_more_requests_than_are_remembered(library: ctypes.CDLL) -> None:
    sampler, logits = NativeSampler(library), random_logits(700, 50)
    for turn in range(3):
        rows = [row(seed=i + turn, repetition_penalty=1.2, prompt=(i % 50,)) for i in range(700)]
        assert tokens_of(sampler, logits, rows) == tokens_of(Sampler(), logits, rows)
    sampler.close()


def test_two_samplers_share_a_team(library: ctypes.CDLL) -> None:
    owner = NativeSampler(library, 3)
    guest = NativeSampler(library, team=owner._team)
    logits, rows = random_logits(64, 5000), [row(seed=i) for i in range(64)]
    assert guest.sample(logits, rows) == owner.sample(logits, rows)
    guest.close()  # the team is not its own
    assert len(owner.sample(logits, rows)) == 64
    owner.close()


def test_threads_end_with_the_sampler(library: ctypes.CDLL) -> None:
    tasks = Path("/proc/self/task")
    if not tasks.exists():
        pytest.skip("threads are counted in /proc")

    def ended(before: set[str]) -> bool:
        """A thread that was joined may stand in /proc for a moment more."""
        deadline = time.monotonic() + 5.0
        while not (gone := {path.name for path in tasks.iterdir()} <= before) and time.monotonic() < deadline:
            time.sleep(0.01)
        return gone

    logits = random_logits(64, 5000)  # torch may start threads of its own for it, which stay
    before = {path.name for path in tasks.iterdir()}
    sampler = NativeSampler(library, 4)
    assert not {path.name for path in tasks.iterdir()} <= before
    sampler.close()
    sampler.close()
    assert ended(before)
    sampler = NativeSampler(library, 4)
    thread = threading.Thread(target=sampler.sample, args=(logits, [row(seed=i) for i in range(64)]))
    thread.start()
    thread.join()
    del sampler, thread
    assert ended(before)


def test_no_rows_no_tokens(native: NativeSampler) -> None:
    assert native.sample(torch.empty(0, 10), []) == []


@pytest.mark.parametrize(
    ("logits", "message"),
    [
        (torch.zeros(2, 8), r"shape \(2, 8\) for 1 rows; they must be \[1, vocabulary\]"),
        (torch.zeros(8), r"shape \(8,\) for 1 rows"),
        (torch.zeros(1, 0), "a vocabulary of 0"),
        (torch.zeros(1, 8, dtype=torch.float64), "float64 .* must be contiguous float32 on the cpu"),
        (torch.zeros(1, 16)[:, ::2], r"strides \(16, 2\); they must be contiguous"),
        (torch.zeros(1, 8, device="meta"), "on meta .* on the cpu"),
    ],
)
def test_wrong_logits_are_named(logits: Tensor, message: str, native: NativeSampler) -> None:
    with pytest.raises(ValueError, match=f"^logits: .*{message}"):
        native.sample(logits, [row()])


def test_no_threads_are_refused(library: ctypes.CDLL) -> None:
    with pytest.raises(ValueError, match="num_threads: 0 is not allowed; it must be at least 1"):
        NativeSampler(library, 0)
