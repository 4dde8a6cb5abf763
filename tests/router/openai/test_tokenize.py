"""/tokenize and /detokenize in vLLM's form, and web pages of other origins."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.router.mesh import Mesh, running_mesh
from tests.router.openai.conftest import url

pytestmark = pytest.mark.asyncio(loop_scope="module")
HELLO = [{"role": "user", "content": "hello"}]
ORIGIN = "https://chat.example"


async def _posted(mesh: Mesh, path: str, body: dict[str, object]) -> tuple[int, Any]:
    async with httpx.AsyncClient() as http:
        answer = await http.post(url(mesh, path), json=body)
        return answer.status_code, answer.json()


async def test_texts_and_conversations_become_tokens_and_text_again(served: Mesh) -> None:
    tokenizer = served.router.core.models["tiny"].tokenizer
    for text in ("abc €", "long " * 3000):
        status, found = await _posted(served, "/tokenize", {"model": "tiny", "prompt": text})
        assert status == 200
        assert found == {
            "count": len(found["tokens"]),
            "max_model_len": 2048,
            "tokens": tokenizer.encode(text),
            "token_strs": None,
        }
        assert await _posted(served, "/detokenize", {"model": "tiny", "tokens": found["tokens"]}) == (200, {"prompt": text})
        _, plain = await _posted(served, "/tokenize", {"prompt": text, "add_special_tokens": False})
        assert plain["tokens"] == tokenizer.encode(text, add_special_tokens=False)
    status, chat = await _posted(served, "/tokenize", {"messages": HELLO, "return_token_strs": True})
    text = "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    assert status == 200 and chat["tokens"] == tokenizer.encode(text, add_special_tokens=False)
    assert "".join(chat["token_strs"]) == text
    assert (await _posted(served, "/detokenize", {"tokens": chat["tokens"]}))[1] == {"prompt": text}


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": 3}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": HELLO}, "prompt"),
        ("/tokenize", {"prompt": "a", "add_special_tokens": 1}, "add_special_tokens"),
        ("/tokenize", {"prompt": "a", "promt": "b"}, "promt"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": "a"}, "tokens"),
        ("/detokenize", {"tokens": [1, 400]}, "tokens[1]"),
        ("/detokenize", {"tokens": [1, -1]}, "tokens[1]"),
    ],
)
async def test_wrong_fields_are_named(served: Mesh, path: str, body: dict[str, object], param: str) -> None:
    status, answer = await _posted(served, path, body)
    assert (status, answer["error"]["param"]) == (400, param)


async def test_they_need_a_key_where_others_do(limited: Mesh) -> None:
    assert (await _posted(limited, "/tokenize", {"prompt": "a"}))[0] == 401
    assert (await _posted(limited, "/detokenize", {"tokens": [1]}))[0] == 401


async def test_pages_of_named_origins_may_call(model_folder: Path) -> None:
    asked = {"Origin": ORIGIN, "Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
    async with running_mesh(model_folder, http_port=0, http_cors_origin=(ORIGIN,)) as mesh, httpx.AsyncClient() as http:
        where = url(mesh, "/v1/completions")
        before = await http.options(where, headers=asked)
        assert before.status_code == 200 and before.headers["access-control-allow-origin"] == ORIGIN
        assert "POST" in before.headers["access-control-allow-methods"]
        assert "authorization" in before.headers["access-control-allow-headers"].lower()
        for body, status in (({"prompt": "abc", "max_tokens": 2, "stream": True}, 200), ({}, 400)):
            answer = await http.post(where, json=body, headers={"Origin": ORIGIN})
            assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (status, ORIGIN)
            assert "x-request-id" in answer.headers["access-control-expose-headers"].lower()
        other = await http.options(where, headers={**asked, "Origin": "https://other.example"})
        assert other.status_code == 400 and "access-control-allow-origin" not in other.headers
        await mesh.until_whole()


async def test_without_origins_there_are_no_headers(served: Mesh) -> None:
    async with httpx.AsyncClient() as http:
        answer = await http.get(url(served, "/v1/models"), headers={"Origin": ORIGIN})
        assert answer.status_code == 200 and not any(name.startswith("access-control") for name in answer.headers)
