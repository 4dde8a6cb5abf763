"""Traces: read as they are published, refused with file, line and column."""

import random
from itertools import islice
from pathlib import Path
from statistics import mean

import pytest

from pdmesh.simulator.arrivals import Arrival, TraceError, log_normal, poisson, read_azure, read_mooncake

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 23:59:59.5000000,374,44
2023-11-17 00:00:01.7500000,396,0
2023-11-17 00:00:01.2500000,10,3
"""
MOONCAKE = """{"timestamp": 500, "input_length": 1030, "output_length": 500, "hash_ids": [0, 1, 2]}

{"timestamp": 1500, "input_length": 511, "output_length": 4, "hash_ids": [0]}
"""


def write(folder: Path, text: str) -> str:
    path = folder / "trace"
    path.write_text(text, encoding="utf-8")
    return str(path)


def test_azure(tmp_path: Path) -> None:
    """Across midnight; without output one token is drawn all the same; who was logged late comes with its predecessor."""
    assert list(read_azure(write(tmp_path, AZURE))) == [Arrival(0.0, 374, 44), Arrival(2.25, 396, 1), Arrival(2.25, 10, 3)]


def test_mooncake(tmp_path: Path) -> None:
    """Only full blocks have a name that others can share."""
    assert list(read_mooncake(write(tmp_path, MOONCAKE))) == [Arrival(0.0, 1030, 500, (0, 1)), Arrival(1.0, 511, 4)]


@pytest.mark.parametrize(
    ("old", "new", "line", "column"),
    [
        ("GeneratedTokens", "Tokens", 1, "GeneratedTokens"),
        ("374", "many", 2, "ContextTokens"),
        ("374", "-1", 2, "ContextTokens"),
        ("2023-11-17 00:00:01.7500000", "noon", 3, "TIMESTAMP"),
        (",3\n", "\n", 4, "GeneratedTokens"),
    ],
)
def test_azure_says_what_is_wrong(tmp_path: Path, old: str, new: str, line: int, column: str) -> None:
    path = write(tmp_path, AZURE.replace(old, new))
    with pytest.raises(TraceError, match=f"{path}: line {line}: {column}: "):
        list(read_azure(path))


@pytest.mark.parametrize(
    ("old", "new", "line", "column"),
    [
        ("500, ", '"now", ', 1, "timestamp"),
        ("1030", "1e3", 1, "input_length"),
        ('"output_length": 4, ', "", 3, "output_length"),
        ("[0]", '["a"]', 3, "hash_ids"),
        ("{", "", 1, "column"),
        ('{"timestamp": 1500', '[{"timestamp": 1500', 3, "column"),
    ],
)
def test_mooncake_says_what_is_wrong(tmp_path: Path, old: str, new: str, line: int, column: str) -> None:
    path = write(tmp_path, MOONCAKE.replace(old, new, 1))
    with pytest.raises(TraceError, match=f"{path}: line {line}: {column}"):
        list(read_mooncake(path))


def test_a_trace_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="give a trace's path"):
        list(read_azure(str(tmp_path / "nothing")))
    with pytest.raises(TraceError, match="holds no request"):
        list(read_mooncake(write(tmp_path, "\n")))


def test_poisson_arrivals_have_their_rate_and_lengths() -> None:
    arrivals = list(islice(poisson(20.0, log_normal(500, 100, 0.8), seed=1), 20_000))
    assert arrivals[-1].at_s == pytest.approx(1000, rel=0.03)
    assert mean(arrival.num_input for arrival in arrivals) == pytest.approx(500, rel=0.03)
    assert mean(arrival.num_output for arrival in arrivals) == pytest.approx(100, rel=0.03)
    assert arrivals[:9] == list(islice(poisson(20.0, log_normal(500, 100, 0.8), seed=1), 9))


def test_lengths_without_scatter_are_all_alike() -> None:
    assert {log_normal(7, 3, 0.0)(random.Random(seed)) for seed in range(9)} == {(7, 3)}
