"""Numbers that a double does not keep are written as they were read, and all else as `json.dumps` writes it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from pdmesh.text.exact_json import LongNumber, dumps, number_of

LONG = ("0.1234567890123456789", "-123456.12345678901234", "1e-400", "9007199254740993.25", "1.00000000000000000001E+5")
KEPT = ("0.1", "1.5e300", "-0.0", "0.10000000000000001", "1.50000000000000000000", "[1e5, {}, [], 12345678901234567890]")


def _read(text: str) -> Any:
    return json.loads(text, parse_float=number_of)


@pytest.mark.parametrize("text", LONG)
def test_a_long_number_stays_as_it_is_written(text: str) -> None:
    source = f'{{"z": [{text}, 0.5, {{"b": {text}}}], "c": "as {text}", "é": null}}'
    value = _read(source)
    assert isinstance(value["z"][0], LongNumber) and value["z"][0] == float(text)
    assert dumps(value, ensure_ascii=False) == source
    assert dumps(value["z"], separators=(",", ":")) == f'[{text},0.5,{{"b":{text}}}]'
    assert list(json.loads(dumps(value, sort_keys=True))) == ["c", "z", "é"]
    assert dumps((value["z"][0], True)) == f"[{text}, true]"


@pytest.mark.parametrize("text", KEPT)
def test_what_a_double_keeps_is_written_as_ever(text: str) -> None:
    assert dumps(_read(text)) == json.dumps(json.loads(text))


def test_what_cannot_be_written_is_an_error_as_ever() -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        dumps([float("nan"), _read(LONG[0])], allow_nan=False)
    with pytest.raises(ValueError, match="not JSON compliant"):
        dumps(_read("1" * 20 + "e99999"), allow_nan=False)
    with pytest.raises(TypeError):
        dumps({"a": object(), "b": _read(LONG[0])})
