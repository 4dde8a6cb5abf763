"""The promise to clients: additions pass, anything that breaks a compiled client is named."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable

import pytest

from pdmesh.v1 import mesh_pb2
from tools.protos import descriptors, stable
from tools.protos.stable import Snapshot


@pytest.fixture(scope="module")
def now() -> Snapshot:
    return stable.snapshot(descriptors.load())


def test_the_client_api_is_what_was_promised(now: Snapshot) -> None:
    promised = json.loads(stable.FILE.read_text(encoding="utf-8"))
    assert stable.broken(promised, now) == []
    assert promised == now, "additions are not recorded: run `make stubs`"


def test_it_covers_what_the_stubs_know(now: Snapshot) -> None:
    """By hand, from the other side: the compiled stubs."""
    for name in ("GenerateRequest", "ChatRequest", "Delta", "Timings", "Resume"):
        fields = mesh_pb2.DESCRIPTOR.message_types_by_name[name].fields
        assert {key: text.split(":")[0] for key, text in now["messages"][name].items()} == {str(f.number): f.name for f in fields}
    assert now["messages"]["GenerateRequest"]["2"] == "text: oneof prompt string"
    assert now["messages"]["SamplingParams"]["8"] == "seed: optional uint64"
    assert now["enums"]["FinishReason"]["2"] == "FINISH_REASON_LENGTH"
    assert "SubmitRequest" not in now["messages"]


def _renumber(taken: Snapshot) -> None:
    taken["messages"]["Delta"]["99"] = taken["messages"]["Delta"].pop("4")


def _remove(taken: Snapshot) -> None:
    del taken["messages"]["Usage"]["3"]


def _rename(taken: Snapshot) -> None:
    taken["messages"]["Usage"]["3"] = "prefix_tokens: uint32"


def _retype(taken: Snapshot) -> None:
    taken["messages"]["Started"]["2"] = "seed: fixed64"


def _drop_presence(taken: Snapshot) -> None:
    taken["messages"]["SamplingParams"]["8"] = "seed: uint64"


def _unstream(taken: Snapshot) -> None:
    taken["services"]["pdmesh.v1.Mesh"]["Generate"] = "GenerateRequest -> GenerateResponse"


def _drop_value(taken: Snapshot) -> None:
    del taken["enums"]["Priority"]["3"]


def _drop_empty_message(taken: Snapshot) -> None:
    del taken["messages"]["ListModelsRequest"]


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (_renumber, "Delta 4"), (_remove, "Usage 3"), (_rename, "Usage 3"), (_retype, "Started 2"),
        (_drop_presence, "SamplingParams 8"), (_unstream, "pdmesh.v1.Mesh Generate"), (_drop_value, "Priority 3"),
        (_drop_empty_message, "ListModelsRequest"),
    ],
)  # fmt: skip
def test_what_breaks_a_client_is_named(now: Snapshot, change: Callable[[Snapshot], None], named: str) -> None:
    changed = copy.deepcopy(now)
    change(changed)
    (line,) = stable.broken(now, changed)
    assert line.startswith(named)


def test_additions_break_nothing(now: Snapshot) -> None:
    changed = copy.deepcopy(now)
    changed["messages"]["Usage"]["99"] = "reasoning_tokens: uint32"
    changed["messages"]["Usage"]["1"] = changed["messages"]["Usage"]["1"].replace(": ", ": optional ")
    changed["messages"]["New"] = {}
    changed["services"]["pdmesh.v1.Mesh"]["Embed"] = "EmbedRequest -> EmbedResponse"
    assert stable.broken(now, changed) == []
