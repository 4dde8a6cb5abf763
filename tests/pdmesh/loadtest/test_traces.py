"""Trace files in both formats; what is wrong is named with its line and field."""

from __future__ import annotations

from pathlib import Path

import pytest

from pdmesh.loadtest import traces
from pdmesh.loadtest.traces import TraceError, TraceRow

CSV = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:50.9951690,396,109
2023-11-16 18:15:46.6805900,374,0
"""
LINES = """{"timestamp": 500, "input_length": 700, "output_length": 5, "hash_ids": [0, 7]}
{"timestamp": 1750, "input_length": 20, "output_length": 6}
"""


def write(folder: Path, text: str) -> str:
    path = folder / "trace"
    path.write_text(text)
    return str(path)


def test_a_csv_by_time_from_zero_with_at_least_one_token(tmp_path: Path) -> None:
    rows = traces.read_trace(write(tmp_path, CSV))
    assert [(row.input_tokens, row.output_tokens) for row in rows] == [(374, 1), (396, 109)]
    assert rows[0].at_s == 0 and rows[1].at_s == pytest.approx(4.314579, abs=1e-5)


def test_json_lines_with_blocks(tmp_path: Path) -> None:
    assert traces.read_trace(write(tmp_path, LINES)) == (TraceRow(0.0, 700, 5, (0, 7)), TraceRow(1.25, 20, 6))


def test_a_byte_order_mark_and_whole_floats_are_no_errors(tmp_path: Path) -> None:
    assert len(traces.read_trace(write(tmp_path, "\ufeff" + CSV))) == 2
    assert traces.read_trace(write(tmp_path, LINES.replace("700", "700.0")))[0].input_tokens == 700


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("", "TIMESTAMP"),
        ("a,b\n1,2\n", "TIMESTAMP is missing"),
        (CSV.replace(",396,", ",many,"), "line 2: ContextTokens"),
        (CSV.replace("2023-11-16 18:15:50", "yesterday"), "line 2: TIMESTAMP"),
        ('{"timestamp": 1}\n', "line 1: input_length"),
        (LINES + "{nonsense\n", "line 3"),
        ('{"timestamp": true, "input_length": 1, "output_length": 1}', "line 1: timestamp"),
        ('{"timestamp": Infinity, "input_length": 1, "output_length": 1}', "line 1: timestamp"),
        ('{"timestamp": 1, "input_length": 1.5, "output_length": 1}', "line 1: input_length"),
        ('{"timestamp": 1, "input_length": Infinity, "output_length": 1}', "line 1: input_length"),
        ('{"timestamp": 1, "input_length": 1, "output_length": 1, "hash_ids": "x"}', "line 1: hash_ids"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n", "holds no request"),
    ],
)
def test_errors_name_file_line_and_field(tmp_path: Path, text: str, named: str) -> None:
    with pytest.raises(TraceError, match=named) as caught:
        traces.read_trace(write(tmp_path, text))
    assert "trace: " in str(caught.value)


def test_a_missing_file_is_an_error_of_the_trace() -> None:
    with pytest.raises(TraceError, match="nowhere"):
        traces.read_trace("/nowhere")
