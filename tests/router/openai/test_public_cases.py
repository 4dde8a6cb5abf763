"""Cases from public reports: each gets the right value (`public_cases/` has the list)."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio

from pdmesh.v1 import common_pb2
from tests.router import stub_model
from tests.router.mesh import Mesh, running_mesh
from tests.router.openai.conftest import url
from tests.router.openai.public_cases import answers, refusals, tools
from tests.router.openai.public_cases.case import CHAT, ORIGIN, TEXT, Case, Seen
from tests.router.stub_texts import sayer

pytestmark = pytest.mark.asyncio(loop_scope="module")
CASES = [*tools.CASES, *answers.CASES, *refusals.CASES]
LIMITS = {CHAT: "max_tokens", TEXT: "max_tokens", "/v1/messages": "max_tokens", "/v1/responses": "max_output_tokens"}


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def mesh(model_folder: Path) -> AsyncIterator[Mesh]:
    """One mesh for all cases, which a page of one origin may call."""
    async with running_mesh(model_folder, http_port=0, http_cors_origin=(ORIGIN,)) as mesh:
        yield mesh
        await mesh.until_whole()


@pytest.fixture(autouse=True)
def _alternatives(monkeypatch: pytest.MonkeyPatch) -> None:
    """The alternatives to a token are those with the following ids."""

    def logprobs(request: common_pb2.TokenRequest, token_id: int) -> list[common_pb2.Logprobs]:
        if not request.sampling.HasField("logprobs"):
            return []
        top = [
            common_pb2.TokenLogprob(token_id=token_id + more, logprob=-0.5 - more) for more in range(request.sampling.logprobs)
        ]
        return [common_pb2.Logprobs(chosen=common_pb2.TokenLogprob(token_id=token_id, logprob=-0.5), top=top)]

    monkeypatch.setattr(stub_model, "logprobs", logprobs)


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def http() -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient() as http:
        yield http


async def _asked(http: httpx.AsyncClient, mesh: Mesh, case: Case, body: dict[str, Any]) -> Seen:
    submits = mesh["d0"].submits
    before = len(submits)
    content = json.dumps(body) if case.method == "POST" else None
    headers = {"content-type": "application/json", **case.headers}
    answer = await http.request(case.method, url(mesh, case.path), headers=headers, content=content)
    request = submits[-1].request if len(submits) > before else common_pb2.TokenRequest()
    tokenizer = mesh.router.core.models["tiny"].tokenizer
    return Seen(answer.status_code, answer.headers, answer.text, request, len(submits) - before, tokenizer)


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
async def test_a_public_case_is_right(http: httpx.AsyncClient, mesh: Mesh, case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    body = {"model": "tiny", "seed": 5, **case.body}
    if case.says:
        body = {LIMITS[case.path]: sayer(monkeypatch)(mesh, case.says), **body}
    seen = await _asked(http, mesh, case, body)
    assert case.find(seen) == case.right, f"{case.about}: {seen.text[:2000]}"
    await mesh.until_whole()


async def test_the_list_is_one_of_reports() -> None:
    assert len({case.name for case in CASES}) == len(CASES) >= 60
    assert all(case.about and ("#" in case.source or case.source.startswith("own: ")) for case in CASES)
