"""Sessions over HTTP: every name in bodies and headers, which of them wins, and what is refused, on each generating endpoint."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio

from pdmesh.v1 import common_pb2
from router.api.http.headers import AGENT_HEADERS, DYNAMO_FINAL, DYNAMO_SESSION
from router.api.http.sessions import SessionBody
from tests.router.api_keys import add_key
from tests.router.mesh import Mesh, running_mesh

pytestmark = pytest.mark.asyncio(loop_scope="module")

Json = dict[str, Any]
ENDPOINTS: dict[str, Json] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 2},
    "/v1/completions": {"prompt": "hello", "max_tokens": 2},
    "/v1/responses": {"input": "hello", "max_output_tokens": 2},
    "/v1/messages": {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 2},
}
DAY_S = 86_400


def url(mesh: Mesh) -> str:
    assert mesh.router.http is not None
    return mesh.router.http.url


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def served(model_folder: Path) -> AsyncIterator[Mesh]:
    async with running_mesh(model_folder, prefill=0, http_port=0) as mesh:
        yield mesh
        await mesh.until_whole()


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def http(served: Mesh) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=url(served), timeout=20.0) as http:
        yield http


class Told:
    """What workers are told of one request."""

    def __init__(self, mesh: Mesh, http: httpx.AsyncClient) -> None:
        self._mesh = mesh
        self._http = http

    async def of(self, path: str, body: Json, headers: Mapping[str, str] | None = None) -> common_pb2.TokenRequest:
        before = len(self._mesh["d0"].submits)
        answer = await self._http.post(path, json={**ENDPOINTS[path], **body}, headers=headers)
        assert answer.status_code == 200, answer.text
        (submit,) = self._mesh["d0"].submits[before:]
        return submit.request

    async def refusal(self, body: Json, headers: Mapping[str, str] | None = None, path: str = "/v1/completions") -> Json:
        answer = await self._http.post(path, json={**ENDPOINTS[path], **body}, headers=headers)
        assert answer.status_code == 400, answer.text
        error: Json = answer.json()["error"]
        return error


@pytest.fixture(scope="module")
def told(served: Mesh, http: httpx.AsyncClient) -> Told:
    return Told(served, http)


SESSION_CONTROL = {"session_control": {"session_id": "s", "action": "open", "timeout": 40}}


@pytest.mark.parametrize("path", ENDPOINTS)
async def test_each_endpoint_takes_the_fields_and_headers(told: Told, path: str) -> None:
    plain = await told.of(path, {})
    assert (plain.session_id, plain.kv_retention_s, plain.session_final) == ("", 0, False)
    own = await told.of(path, {"session_id": "s", "kv_retention_s": 9, "priority": -2})
    assert (own.session_id, own.kv_retention_s, own.session_final) == ("s", 9, False)
    by_headers = await told.of(path, {}, {"X-Dynamo-Session-ID": "h", "X-Dynamo-Session-Final": "true"})
    assert (by_headers.session_id, by_headers.session_final) == ("h", True)
    extended = await told.of(path, {"nvext": SESSION_CONTROL, "prompt_cache_key": "k"})
    assert (extended.session_id, extended.kv_retention_s) == ("s", 40)


@pytest.mark.parametrize(
    ("body", "headers", "session_id"),
    [
        ({"session_id": "s"}, {"x-session-id": "other"}, "s"),
        ({"session_id": "s"}, {"x-dynamo-session-id": "s", "x-pdmesh-session-id": "s"}, "s"),
        ({}, {"x-pdmesh-session-id": "p", "x-claude-code-session-id": "c"}, "p"),
        ({}, {"x-dynamo-session-id": "d", "x-claude-code-session-id": "c", "x-dynamo-parent-session-id": "parent"}, "d"),
        ({}, {"x-claude-code-session-id": "root"}, "root"),
        ({}, {"x-claude-code-session-id": "root", "x-claude-code-agent-id": "child"}, "child"),
        ({}, {"session-id": "codex"}, "codex"),
        ({}, {"session-id": "codex", "thread-id": "thread"}, "codex"),
        ({}, {"thread-id": "thread"}, "thread"),
        ({}, {"session_id": "older-codex"}, "older-codex"),
        ({}, {"x-session-id": "opencode"}, "opencode"),
        ({}, {"x-session-affinity": "opencode"}, "opencode"),
        ({}, {"x-session-id": "two words", "x-session-affinity": "next"}, "next"),  # that name is any program's
        ({"prompt_cache_key": "k"}, {"x-session-id": "opencode"}, "opencode"),
        ({"prompt_cache_key": "k"}, {}, "k"),
        ({"prompt_cache_key": "two words"}, {}, ""),  # OpenAI takes it, and it cannot name a session
        ({"session_id": "s", "prompt_cache_key": "k"}, {}, "s"),
        ({"nvext": {"session_control": {"session_id": "n"}}, "session_id": "n"}, {}, "n"),
        ({}, {"cookie": "a=b; llm-d-session=cookie"}, "cookie"),
        ({"prompt_cache_key": "k"}, {"cookie": "llm-d-session=cookie"}, "k"),
        ({}, {"cookie": 'llm-d-session="two words"'}, ""),
        ({}, {"x-session-token": "token", "x-gateway-inference-fairness-id": "f", "x-llm-d-inference-fairness-id": "f"}, ""),
    ],
)
async def test_which_name_of_a_session_counts(told: Told, body: Json, headers: dict[str, str], session_id: str) -> None:
    assert (await told.of("/v1/completions", body, headers)).session_id == session_id


@pytest.mark.parametrize(
    ("body", "headers", "seconds"),
    [
        ({"kv_retention_s": DAY_S}, {}, DAY_S),
        ({}, {"x-pdmesh-kv-retention-s": "5"}, 5),
        ({"kv_retention_s": 6}, {"x-pdmesh-kv-retention-s": "5"}, 6),
        ({"kv_retention_s": 6, "prompt_cache_retention": "24h"}, {}, 6),  # its own name wins over any wish
        ({"prompt_cache_retention": "24h"}, {"x-pdmesh-kv-retention-s": "5"}, 5),
        ({"prompt_cache_retention": "24h"}, {}, DAY_S),
        ({"prompt_cache_retention": "in_memory"}, {}, 0),
        ({"prompt_cache_retention": "in-memory"}, {}, 0),
        ({"nvext": {"cache_control": {"type": "ephemeral"}}}, {}, 300),
        ({"nvext": {"cache_control": {"type": "ephemeral", "ttl": "1h"}}}, {}, 3600),
        ({"nvext": {"cache_control": {"type": "ephemeral", "ttl": "90s", "scope": "any"}}}, {}, 90),
        ({"nvext": {"cache_control": {"type": "ephemeral", "ttl": 20}}}, {}, 20),
        ({"nvext": {"cache_control": {"type": "ephemeral", "ttl": "400h"}}}, {}, DAY_S),
        ({"nvext": {"session_control": {"session_id": "s", "action": "open"}}}, {}, 300),
        ({"nvext": {"session_control": {"session_id": "s"}}}, {}, 0),
        (
            {"nvext": {"session_control": {"session_id": "s", "timeout": 7}, "cache_control": {"type": "ephemeral", "ttl": 8}}},
            {},
            8,
        ),
        ({"session_id": "s", "session_final": True, "kv_retention_s": 60}, {}, 0),
    ],
)
async def test_how_long_is_asked_for(told: Told, body: Json, headers: dict[str, str], seconds: int) -> None:
    assert (await told.of("/v1/completions", body, headers)).kv_retention_s == seconds


@pytest.mark.parametrize(
    ("body", "headers"),
    [
        ({"session_id": "s", "session_final": True}, {}),
        ({"session_id": "s"}, {"x-dynamo-session-final": "True"}),
        ({}, {"x-pdmesh-session-final": "1", "x-session-id": "s"}),
        ({"nvext": {"session_control": {"session_id": "s", "action": "close"}}}, {}),
    ],
)
async def test_a_session_ends_by_each_of_its_names(told: Told, body: Json, headers: dict[str, str]) -> None:
    ended = await told.of("/v1/chat/completions", body, headers)
    assert (ended.session_id, ended.session_final) == ("s", True)
    assert not (await told.of("/v1/chat/completions", {"session_id": "s"}, {"x-dynamo-session-final": "false"})).session_final


@pytest.mark.parametrize(
    ("body", "headers", "hint"),
    [
        ({}, {}, 0),
        ({"priority": 3}, {}, -3),  # vLLM's: lower ones first
        ({"priority": -(2**40)}, {}, 1000),
        ({"nvext": {"agent_hints": {"priority": 5, "osl": 100, "speculative_prefill": True, "program": "x"}}}, {}, 5),
        ({"nvext": {"agent_hints": {"priority": -5000}}}, {}, -1000),
        ({"nvext": {"agent_hints": {"priority": 5}}, "priority": -5}, {}, 5),
        ({}, {"x-pdmesh-priority-hint": "12"}, 12),
        ({"priority": 1}, {"x-pdmesh-priority-hint": "12"}, -1),
        ({"nvext": {"annotations": ["a"], "greed_sampling": True}}, {}, 0),
    ],
)
@pytest.mark.parametrize("path", ENDPOINTS)
async def test_the_place_among_the_tenants_own(
    served: Mesh, told: Told, monkeypatch: pytest.MonkeyPatch, path: str, body: Json, headers: dict[str, str], hint: int
) -> None:
    controller, entered = served.router.core.flow_control, []
    enter = controller.enter

    async def spy(item: Any) -> Any:
        entered.append(item.hint)
        return await enter(item)

    monkeypatch.setattr(controller, "enter", spy)
    await told.of(path, body, headers)
    assert entered == [hint]


@pytest.mark.parametrize(
    ("body", "headers", "param"),
    [
        ({"session_id": "two words"}, {}, "session_id"),
        ({"session_id": ""}, {}, "session_id"),
        ({"session_id": 5}, {}, "session_id"),
        ({"session_id": "x" * 257}, {}, "session_id"),
        ({"kv_retention_s": -1}, {}, "kv_retention_s"),
        ({"kv_retention_s": DAY_S + 1}, {}, "kv_retention_s"),
        ({"kv_retention_s": "5m"}, {}, "kv_retention_s"),
        ({"session_final": "yes"}, {}, "session_final"),
        ({"session_final": True}, {}, "session_final"),
        ({}, {"x-dynamo-session-final": "true"}, "X-Dynamo-Session-Final"),
        ({}, {"x-dynamo-session-final": "maybe", "x-session-id": "s"}, "X-Dynamo-Session-Final"),
        ({}, {"x-dynamo-session-id": "two words"}, "X-Dynamo-Session-ID"),
        ({}, {"x-dynamo-session-id": ""}, "X-Dynamo-Session-ID"),
        ({}, {"x-pdmesh-session-id": "two words"}, "x-pdmesh-session-id"),
        ({}, {"x-pdmesh-kv-retention-s": "long"}, "x-pdmesh-kv-retention-s"),
        ({"priority": "high"}, {}, "priority"),
        ({"prompt_cache_key": 5}, {}, "prompt_cache_key"),
        ({"prompt_cache_retention": "1w"}, {}, "prompt_cache_retention"),
        ({"nvext": []}, {}, "nvext"),
        ({"nvext": {"agent_hints": 5}}, {}, "nvext.agent_hints"),
        ({"nvext": {"agent_hints": {"priority": 1.5}}}, {}, "nvext.agent_hints.priority"),
        ({"nvext": {"cache_control": {"type": "forever"}}}, {}, "nvext.cache_control.type"),
        ({"nvext": {"cache_control": {"type": "ephemeral", "ttl": "soon"}}}, {}, "nvext.cache_control.ttl"),
        ({"nvext": {"cache_control": {"type": "ephemeral", "ttl": -1}}}, {}, "nvext.cache_control.ttl"),
        ({"nvext": {"session_control": {}}}, {}, "nvext.session_control.session_id"),
        ({"nvext": {"session_control": {"session_id": "s", "action": "pause"}}}, {}, "nvext.session_control.action"),
        # Two that contradict each other.
        ({"session_id": "s"}, {"x-dynamo-session-id": "t"}, "X-Dynamo-Session-ID"),
        ({"session_id": "s"}, {"x-pdmesh-session-id": "t"}, "x-pdmesh-session-id"),
        ({"session_id": "s", "nvext": {"session_control": {"session_id": "t"}}}, {}, "nvext.session_control.session_id"),
        ({"session_final": True, "nvext": SESSION_CONTROL}, {}, "nvext.session_control.action"),
        ({"priority": 5, "nvext": {"agent_hints": {"priority": 5}}}, {}, "nvext.agent_hints.priority"),
    ],
)
async def test_nonsense_and_contradictions_are_refused_by_their_name(
    told: Told, body: Json, headers: dict[str, str], param: str
) -> None:
    error = await told.refusal(body, headers)
    assert error["param"] == param and error["message"].startswith(f"{param}: ")
    assert "two words" not in error["message"]


@pytest.mark.parametrize(
    "name",
    ["x-pdmesh-session-id", "X-Dynamo-Session-ID", "X-Dynamo-Session-Final", "x-pdmesh-session-final", "x-pdmesh-kv-retention-s"],
)
async def test_a_header_that_is_there_twice_has_to_agree_with_itself(http: httpx.AsyncClient, name: str) -> None:
    body = {**ENDPOINTS["/v1/completions"], "session_id": "1"}
    same = await http.post("/v1/completions", json=body, headers=[(name, "1"), (name, "1")])
    assert same.status_code == 200
    refused = await http.post("/v1/completions", json=body, headers=[(name, "1"), (name, "0")])
    assert refused.status_code == 400
    assert (refused.json()["error"]["param"], "twice" in refused.json()["error"]["message"]) == (name, True)


async def test_objectives_by_the_names_of_llm_d(served: Mesh, told: Told, monkeypatch: pytest.MonkeyPatch) -> None:
    admitted, admit = [], served.router.frontend.open_requests.admit

    def spy(request: Any) -> None:
        admitted.append((request.prepared.slo_ttft_ms, request.prepared.slo_tpot_ms))
        admit(request)

    monkeypatch.setattr(served.router.frontend.open_requests, "admit", spy)
    theirs = {"x-llm-d-slo-ttft-ms": "800", "x-llm-d-slo-tpot-ms": "50"}
    await told.of("/v1/completions", {}, theirs)
    await told.of("/v1/completions", {}, {"x-pdmesh-slo-ttft-ms": "900", "x-pdmesh-slo-tpot-ms": "60", **theirs})
    await told.of("/v1/completions", {}, {**theirs, "x-pdmesh-slo-ttft-ms": "900"})
    assert admitted == [(800, 50), (900, 60), (900, 50)]
    assert (await told.refusal({}, {"x-llm-d-slo-ttft-ms": "soon"}))["param"] == "x-llm-d-slo-ttft-ms"


EPHEMERAL, LONG = {"type": "ephemeral"}, {"type": "ephemeral", "ttl": "1h"}
TEXT = {"type": "text", "text": "hello"}
CALL = {"type": "tool_use", "id": "t", "name": "f", "input": {}}
TOOL = {"name": "f", "input_schema": {"type": "object"}}


def turns(*blocks: Json, result: Json | None = None) -> list[Json]:
    answered = {"type": "tool_result", "tool_use_id": "t", "content": [result or TEXT]}
    return [
        {"role": "user", "content": list(blocks) or [TEXT]},
        {"role": "assistant", "content": [CALL]},
        {"role": "user", "content": [answered]},
    ]


@pytest.mark.parametrize(
    ("body", "seconds"),
    [
        ({"cache_control": EPHEMERAL}, 300),
        ({"system": [{**TEXT, "cache_control": LONG}]}, 3600),
        ({"system": [{**TEXT, "cache_control": LONG}], "messages": turns({**TEXT, "cache_control": EPHEMERAL})}, 3600),
        ({"messages": turns({**TEXT, "cache_control": {**EPHEMERAL, "scope": "global"}})}, 300),
        ({"messages": turns(result={**TEXT, "cache_control": {"type": "ephemeral", "ttl": "5m"}})}, 300),
        ({"messages": turns(), "tools": [{**TOOL, "cache_control": EPHEMERAL}]}, 300),
        ({"cache_control": LONG, "kv_retention_s": 30}, 30),
        ({"cache_control": EPHEMERAL, "nvext": {"cache_control": LONG}}, 3600),
        ({"messages": turns()}, 0),
    ],
)
async def test_anthropics_cache_control_is_retention_of_the_request(told: Told, body: Json, seconds: int) -> None:
    asked = await told.of("/v1/messages", body)
    assert (asked.kv_retention_s, asked.session_id) == (seconds, "")


async def test_a_wrong_cache_control_is_refused_where_it_stands(told: Told) -> None:
    body = {"messages": turns({**TEXT, "cache_control": {"type": "ephemeral", "ttl": "a while"}})}
    error = await told.refusal(body, path="/v1/messages")
    assert "messages[0].content[0].cache_control.ttl" in error["message"]


async def test_each_prompt_of_a_completion_is_of_the_session(served: Mesh, http: httpx.AsyncClient) -> None:
    before = len(served["d0"].submits)
    answer = await http.post("/v1/completions", json={"prompt": ["a", "b"], "max_tokens": 2, "session_id": "s"})
    assert answer.status_code == 200
    assert [submit.request.session_id for submit in served["d0"].submits[before:]] == ["s", "s"]


async def test_a_session_is_released_by_its_path(served: Mesh, http: httpx.AsyncClient) -> None:
    served["d0"].retained = {("", "a/b?c"): 3, ("t", "s"): 2}
    try:
        released = await http.delete("/v1/sessions/a%2Fb%3Fc")
        assert released.json() == {
            "id": "a/b?c", "object": "session.released", "num_blocks": 3, "num_workers": 1, "num_unreachable": 0,
        }  # fmt: skip
        theirs = await http.delete("/v1/sessions/s?model=tiny", headers={"X-Tenant": "t"})
        assert theirs.json()["num_blocks"] == 2
        for path, status, param in (("two%20words", 400, "session_id"), ("s?model=unknown", 404, "model")):
            refused = await http.delete(f"/v1/sessions/{path}")
            assert (refused.status_code, refused.json()["error"]["param"]) == (status, param)
    finally:
        served["d0"].retained = None


async def test_only_a_key_of_the_tenant_releases_it(model_folder: Path, tmp_path: Path) -> None:
    for number in (1, 2):
        add_key(tmp_path / "keys.json", f"key-{number}", tenant=f"tenant-{number}")
    async with (
        running_mesh(model_folder, prefill=0, http_port=0, api_keys=str(tmp_path / "keys.json")) as limited,
        httpx.AsyncClient(base_url=url(limited)) as http,
    ):
        limited["d0"].retained = {("tenant-1", "s"): 1}
        assert (await http.delete("/v1/sessions/s")).status_code == 401
        headers = {"Authorization": "Bearer key-2"}
        assert (await http.delete("/v1/sessions/s", headers=headers)).json()["num_blocks"] == 0
        assert (await http.delete("/v1/sessions/s", headers={**headers, "X-Tenant": "tenant-1"})).status_code == 403
        headers = {"Authorization": "Bearer key-1"}
        assert (await http.delete("/v1/sessions/s", headers=headers)).json()["num_blocks"] == 1


async def test_the_description_has_the_release_and_the_fields(http: httpx.AsyncClient) -> None:
    described = (await http.get("/openapi.json")).json()
    assert "delete" in described["paths"]["/v1/sessions/{session_id}"]
    schemas = described["components"]["schemas"]
    for kind in ("ChatCompletionRequest", "CompletionRequest", "CreateResponse", "MessageBody"):
        assert {"session_id", "kv_retention_s", "session_final", "priority", "nvext"} <= schemas[kind]["properties"].keys()


async def test_the_page_names_every_field_and_header() -> None:
    page = (Path(__file__).parents[2] / "docs/sessions.md").read_text(encoding="utf-8").lower()
    names = (*SessionBody.model_fields, *AGENT_HEADERS, DYNAMO_SESSION, DYNAMO_FINAL)
    assert [name for name in names if f"`{name.lower()}" not in page] == []
