"""The generated page: nothing of the wire lacks a comment, every link leads somewhere, and what is committed is fresh."""

from __future__ import annotations

import re

import pytest

from pdmesh.v1 import common_pb2, decode_pb2, mesh_pb2, prefill_pb2, transfer_pb2, worker_pb2
from tools.protos import descriptors, reference
from tools.protos.descriptors import Api


@pytest.fixture(scope="module")
def api() -> Api:
    return descriptors.load()


@pytest.fixture(scope="module")
def page(api: Api) -> str:
    return reference.page(api)


def test_everything_has_a_comment(api: Api) -> None:
    assert [name for name, comment in api.comments.items() if not comment.strip()] == []


def test_all_of_the_wire_is_on_the_page(page: str) -> None:
    """Counted in the stubs, which know nothing of the generator."""
    headings = re.findall(r"^#{3,4} (\S+)$", page, re.MULTILINE)
    wanted, num_rows = [], 0
    for module in (common_pb2, decode_pb2, mesh_pb2, prefill_pb2, transfer_pb2, worker_pb2):
        file = module.DESCRIPTOR
        wanted += [*file.message_types_by_name, *file.enum_types_by_name]
        num_rows += sum(len(message.fields) for message in file.message_types_by_name.values())
        num_rows += sum(len(enum.values) for enum in file.enum_types_by_name.values())
        for service in file.services_by_name.values():
            wanted += [service.name, *(f"{service.name}.{method.name}" for method in service.methods)]
    assert sorted(headings) == sorted(wanted)
    assert len(re.findall(r"^\| `\w+`\xa0=\xa0\d+ \|", page, re.MULTILINE)) == num_rows


def test_links_lead_to_one_heading_each(page: str) -> None:
    anchors = [reference._anchor(heading) for heading in re.findall(r"^#+ (.+)$", page, re.MULTILINE)]
    assert len(anchors) == len(set(anchors))
    assert set(re.findall(r"\]\(#([^)]+)\)", page)) <= set(anchors)


@pytest.mark.parametrize(
    "row",
    [
        "| `temperature`\xa0=\xa01 | `double` | optional | absent | temperature divides the logits.",
        "| `min_tokens`\xa0=\xa010 | `uint32` |  | `0` | ",
        "| `stop`\xa0=\xa012 | `string` | repeated | empty | ",
        "| `text`\xa0=\xa02 | `string` | oneof `prompt` | absent | ",
        "| `sampling`\xa0=\xa04 | [SamplingParams](#samplingparams) |  | absent | ",
        "| `finish_reason`\xa0=\xa06 | [FinishReason](#finishreason) |  | `FINISH_REASON_UNSPECIFIED` | ",
    ],
)
def test_a_row_tells_number_type_cardinality_and_default(page: str, row: str) -> None:
    assert row in page


def test_clients_come_first(page: str) -> None:
    order = [page.index(f"\n### {name}\n") for name in ("Mesh", "GenerateRequest", "GetStatusResponse", "DecodeService")]
    assert order == sorted(order)


def test_the_committed_page_is_fresh(page: str) -> None:
    assert reference.PAGE.read_text(encoding="utf-8") == page, "run `make stubs`"


def test_every_line_of_a_comment_survives(api: Api, page: str) -> None:
    """Markdown eats unescaped characters; the words stay in order."""
    for name in ("Mesh.Generate", "SamplingParams.repetition_penalty", "RequestOptions.request_id", "PartHeader"):
        assert " ".join(api.comments[name].split()) in page
