"""Any JSON object is a request, or is refused by the name of a field; all fields are on the page."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from pdmesh.runtime.errors import InvalidArgument
from pdmesh.v1 import mesh_pb2
from router.api.responses.requests import CreateResponse, parse

JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 2**70) | st.text(max_size=5) | st.sampled_from(["function", "message", "auto"]),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["type", "role", "content", "name", "id"]), inner)
    ),
    max_leaves=8,
)


@given(values=st.dictionaries(st.sampled_from(sorted(CreateResponse.model_fields)), JSON, max_size=6))
@settings(max_examples=80, deadline=None)
def test_any_body_is_parsed_or_refused_by_name(values: dict[str, Any]) -> None:
    try:
        parse(values, mesh_pb2.RequestOptions())
    except InvalidArgument as error:
        assert error.field and error.message.startswith(f"{error.field}: ")


def test_the_page_has_every_field() -> None:
    page = (Path(__file__).parents[3] / "docs/responses.md").read_text(encoding="utf-8")
    assert [name for name in CreateResponse.model_fields if f"`{name}" not in page] == []
