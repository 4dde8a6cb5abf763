"""Token rates: what is taken never exceeds burst + rate · time by more than one request, and tokens are conserved."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.flow_control import capacity
from router.flow_control.capacity import TenantLimits, TokenBucket, TokenRates

LIMITS = TenantLimits(tokens_per_s=100.0, burst_tokens=200.0)


def test_the_delay_is_when_it_fits() -> None:
    rates = TokenRates()
    assert rates.delay_s("a", LIMITS, 150, 0.0) == 0.0
    rates.take("a", 150)
    assert rates.delay_s("a", LIMITS, 150, 0.0) == pytest.approx(1.0)
    assert rates.delay_s("a", LIMITS, 150, 1.0) == 0.0
    assert rates.delay_s("b", LIMITS, 150, 0.0) == 0.0


def test_more_than_a_bucket_is_given_when_it_is_full_and_owed() -> None:
    rates = TokenRates()
    assert rates.delay_s("a", LIMITS, 1000, 0.0) == 0.0
    rates.take("a", 1000)
    assert rates.delay_s("a", LIMITS, 100, 0.0) == pytest.approx(9.0)


def test_what_was_not_used_comes_back() -> None:
    rates = TokenRates()
    rates.delay_s("a", LIMITS, 200, 0.0)
    rates.take("a", 200)
    rates.take("a", -150)
    assert rates.delay_s("a", LIMITS, 150, 0.0) == 0.0
    assert rates.spent == {"a": 50}


def test_a_new_rate_holds_from_now_on() -> None:
    bucket = TokenBucket(100.0, 200.0, 0.0, 0.0)
    bucket.follow(10.0, 20.0, 1.0)
    assert bucket.level == 20.0  # 100 had come, 20 fit
    bucket.follow(10.0, 20.0, 2.0)
    assert bucket.level == 20.0


def test_a_tenant_without_a_rate_has_no_bucket() -> None:
    rates = TokenRates()
    rates.delay_s("a", LIMITS, 1, 0.0)
    assert rates.delay_s("a", TenantLimits(), 10**9, 0.0) == 0.0
    rates.take("a", 10**9)
    assert rates.delay_s("a", LIMITS, 200, 0.0) == 0.0


def test_buckets_are_bounded_and_a_debt_is_not_forgotten_for_a_full_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capacity, "MAX_BUCKETS", 8)
    rates = TokenRates()
    rates.delay_s("debtor", LIMITS, 200, 0.0)
    rates.take("debtor", 1000)
    for number in range(100):
        assert rates.delay_s(f"t{number}", LIMITS, 1, 0.0) == 0.0
    assert rates.delay_s("debtor", LIMITS, 1, 0.0) > 0


@given(st.lists(st.tuples(st.floats(0, 2), st.floats(1, 300)), min_size=1, max_size=60))
def test_never_more_than_burst_and_rate(steps: list[tuple[float, float]]) -> None:
    rates, now, taken = TokenRates(), 0.0, 0.0
    for pause_s, tokens in steps:
        now += pause_s
        if not rates.delay_s("a", LIMITS, tokens, now):
            rates.take("a", tokens)
            taken += tokens
        assert taken <= 200.0 + 100.0 * now + 300.0 + 1e-6


@pytest.mark.parametrize(
    ("limits", "field"),
    [
        (TenantLimits(weight=0), "weight"),
        (TenantLimits(max_inflight=0), "max_inflight"),
        (TenantLimits(tokens_per_s=0), "tokens_per_s"),
        (TenantLimits(burst_tokens=5), "burst_tokens"),
    ],
)
def test_wrong_limits_name_the_field(limits: TenantLimits, field: str) -> None:
    with pytest.raises(ValueError, match=f"^{field}: "):
        limits.validate()
