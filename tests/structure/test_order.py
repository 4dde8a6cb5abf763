"""Long files are begun first, and nothing else about a run depends on it."""

from types import SimpleNamespace
from typing import Any, cast

from tests import order
from tests.structure.measure import ROOT


def test_the_files_exist() -> None:
    assert [file for file in order.LONGEST if not (ROOT / file).is_file()] == []
    assert len({*order.LONGEST}) == len(order.LONGEST)


def test_long_files_first_then_those_of_many_tests() -> None:
    long, other = order.LONGEST[1], order.LONGEST[0]
    names = ["tests/a.py::b", "tests/z.py::b", f"{long}::z", "tests/z.py::a", f"{other}::T::a", f"{long}::a"]
    items: list[Any] = [SimpleNamespace(nodeid=name) for name in names]
    order.sort(cast(Any, items))
    assert [item.nodeid for item in items] == [
        *(f"{other}::T::a", f"{long}::z", f"{long}::a"),
        *("tests/z.py::b", "tests/z.py::a", "tests/a.py::b"),
    ]
