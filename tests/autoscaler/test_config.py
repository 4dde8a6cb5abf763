"""What the autoscaler is told: flags, and the objectives that it shares with routers."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from pdmesh.autoscaler.config import AutoscalerConfig, goals_of, objective_of
from pdmesh.autoscaler.settings import AutoscalerSettings
from pdmesh.runtime.config import ConfigError


def test_settings_name_what_is_wrong(tmp_path: Path) -> None:
    good = AutoscalerConfig(routers=("a:1",), objectives="file")
    good.validate()
    for changes, field in (
        ({"routers": ()}, "routers"),
        ({"routers": ("a",)}, "routers"),
        ({"routers": ("a:0",)}, "routers"),
        ({"routers": ("a:1", "localhost:99999")}, "routers"),
        ({"objectives": ""}, "objectives"),
        ({"period_s": 0.0}, "period_s"),
        ({"window_s": 3.0}, "window_s"),
        ({"period_s": 4.0, "scaling": AutoscalerSettings(stale_after_s=5.0)}, r"scaling\.stale_after_s"),
        ({"api_key": "a b"}, "api_key"),
    ):
        with pytest.raises(ConfigError, match=f"^{field}: "):
            dataclasses.replace(good, **changes).validate()
    dataclasses.replace(good, routers=("[::1]:65535", "a:00001")).validate()
    path = tmp_path / "objectives.toml"
    path.write_text("[a]\nttft_ms = 500\ntpot_ms = 40\nquantile = 0.3\n[b]\nttft_ms = 500\ntpot_ms = 40\n")
    with pytest.raises(ConfigError, match="names 2 models; give one of a, b"):
        objective_of(str(path), "")
    with pytest.raises(ConfigError, match=r"a\.quantile"):
        goals_of(objective_of(str(path), "a"), 10.0)
    assert goals_of(objective_of(str(path), "b"), 10.0).transit_s == 0.01
