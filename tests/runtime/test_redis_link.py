"""Passwords in URLs are shown to nobody, whatever they consist of."""

from __future__ import annotations

import contextlib
import logging

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdmesh.runtime.config import ConfigError
from pdmesh.runtime.registry.redis_link import open_redis, why_silent, without_password

SECRET = "s3cr3t"


@pytest.mark.parametrize("around", ["{}", "{}/x", "x/{}", "{}#x", "x#{}", "x?{}", "x@{}", "[{}", "{}:{}", "1/{}"])
def test_a_password_is_never_shown(around: str) -> None:
    password = around.replace("{}", SECRET)
    for url in (f"redis://:{password}@host:6379/0", f"redis://user:{password}@host/0", f"redis://host:x/0?password={password}@"):
        assert SECRET not in without_password(url)
        with contextlib.suppress(ConfigError):
            open_redis(url, 1.0)
            continue
        with pytest.raises(ConfigError) as refused:
            open_redis(url, 1.0)
        assert SECRET not in str(refused.value) and refused.value.__cause__ is None


@given(st.text(st.sampled_from("/#?@:[]%x"), max_size=12), st.text(st.sampled_from("/#?@:[]%x"), max_size=12))
def test_no_character_brings_it_out(before: str, after: str) -> None:
    assert SECRET not in without_password(f"redis://:{before}{SECRET}{after}@host:1/0")


def test_what_is_left_tells_where() -> None:
    assert without_password("redis://u:p/q@host:6379/0?password=z") == "redis://host:6379/0"
    assert without_password("unix:///run/redis.sock?password=z") == "unix:///run/redis.sock"


async def test_neither_does_the_log(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG):
        assert SECRET not in (await why_silent(f"redis://:{SECRET}@127.0.0.1:1/0") or "")
    assert SECRET not in caplog.text
