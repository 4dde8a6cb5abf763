"""Responses that are kept in Redis: the next turn at another router, references, tenants, bounds; Redis away or with garbage."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
import pytest
import pytest_asyncio
from redis.asyncio import Redis

from pdmesh.runtime.config import ConfigError
from pdmesh.runtime.registry.redis_server import EmbeddedRedis
from router.api.responses.kept import KeepSettings, KeptResponses
from router.config import RouterConfig
from tests.router.api_keys import add_key
from tests.router.mesh import Mesh, running_mesh
from tests.router.responses.conftest import client_of
from tests.router.stub_texts import Say, prompt_of

pytestmark = pytest.mark.asyncio(loop_scope="module")
TOOLS: Any = [
    {"type": "function", "name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}
]
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Lyon"}}\n</tool_call>'
ASKED: Any = {"model": "tiny", "max_output_tokens": 100}


@dataclass
class Keeping:
    """Two routers that keep responses in one Redis, each with workers of its own, as a stub serves one router; their clients."""

    mesh: Mesh
    other: Mesh
    redis: EmbeddedRedis
    here: Any
    there: Any


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def keeping(thinking_folder: Path) -> AsyncIterator[Keeping]:
    async with EmbeddedRedis() as redis:
        kept: Any = {"http_port": 0, "redis": redis.url, "http_keep_responses_s": 100}
        meshes = running_mesh(thinking_folder, **kept), running_mesh(thinking_folder, **kept)
        async with meshes[0] as mesh, meshes[1] as other, client_of(mesh) as here, client_of(other) as there:
            yield Keeping(mesh, other, redis, here, there)


async def test_the_next_turn_is_served_by_another_router(keeping: Keeping, says: Say) -> None:
    says(keeping.mesh, f"I call.</think>{CALL}")
    first = await keeping.here.responses.create(**ASKED, input="hello", instructions="Be brief.", tools=TOOLS)
    assert first.model_extra["store"] is True
    says(keeping.mesh, "So.</think>It is sunny.")
    call_id = first.output[1].call_id
    output = [{"type": "function_call_output", "call_id": call_id, "output": "Sunny."}]
    async with keeping.there.responses.stream(**ASKED, input=output, previous_response_id=first.id) as stream:
        second = await stream.get_final_response()
    assert second.previous_response_id == first.id and second.output_text == "It is sunny."
    turns = f"[user] hello[assistant] <{call_id} weather Lyon>(I call.)[tool weather] Sunny."
    assert prompt_of(keeping.other) == f"{turns}[assistant] <think>\n"  # instructions are not carried over
    await keeping.here.responses.create(**ASKED, input="thanks", previous_response_id=second.id, instructions="Be kind.")
    assert prompt_of(keeping.mesh) == f"[system] Be kind.{turns}[assistant] It is sunny.(So.)[user] thanks[assistant] <think>\n"


async def test_a_response_is_read_and_deleted(keeping: Keeping, says: Say) -> None:
    says(keeping.mesh, "Hm.</think>Yes.")
    found = await keeping.here.responses.create(**ASKED, input="hello", metadata={"a": "b"})
    again = await keeping.there.responses.retrieve(found.id)
    assert again.model_dump() == found.model_dump()
    with pytest.raises(openai.BadRequestError, match="stream: "):
        await keeping.here.responses.retrieve(found.id, stream=True)
    await keeping.there.responses.delete(found.id)
    with pytest.raises(openai.NotFoundError):
        await keeping.here.responses.retrieve(found.id)
    with pytest.raises(openai.NotFoundError):
        await keeping.here.responses.delete(found.id)
    with pytest.raises(openai.NotFoundError) as refused:
        await keeping.here.responses.create(**ASKED, input="a", previous_response_id=found.id)
    assert (refused.value.param, refused.value.code) == ("previous_response_id", "previous_response_not_found")


async def test_a_call_that_was_cut_off_is_not_continued(keeping: Keeping, says: Say) -> None:
    says(keeping.mesh, f"Hm.</think>{CALL}")
    first = await keeping.here.responses.create(model="tiny", max_output_tokens=66, input="hello", tools=TOOLS)
    (call,) = [item for item in first.output if item.type == "function_call"]
    assert call.status == first.status == "incomplete" and CALL.startswith(first.output_text)
    with pytest.raises(openai.BadRequestError, match="cut off") as refused:
        await keeping.here.responses.create(**ASKED, input="go on", previous_response_id=first.id)
    assert refused.value.param == "previous_response_id"


async def test_store_false_keeps_nothing(keeping: Keeping) -> None:
    found = await keeping.here.responses.create(model="tiny", input="hello", store=False, max_output_tokens=1)
    assert found.model_extra["store"] is False
    with pytest.raises(openai.NotFoundError):
        await keeping.here.responses.retrieve(found.id)


async def test_items_are_named_by_reference(keeping: Keeping, says: Say) -> None:
    says(keeping.mesh, "Hm.</think>Yes.")
    first = await keeping.here.responses.create(**ASKED, input="hello")
    named: Any = [{"role": "user", "content": "hello"}, *({"type": "item_reference", "id": item.id} for item in first.output)]
    second = await keeping.there.responses.create(**ASKED, input=[*named, {"role": "user", "content": "and?"}])
    assert prompt_of(keeping.other) == "[user] hello[assistant] Yes.(Hm.)[user] and?[assistant] <think>\n"
    await keeping.here.responses.create(**ASKED, input="so", previous_response_id=second.id)
    assert prompt_of(keeping.mesh).startswith("[user] hello[assistant] Yes.(Hm.)[user] and?[assistant] Yes.(Hm.)[user] so")
    for unknown in ("msg_1", f"msg_{'0' * 24}_0", first.output[0].id + "1"):
        with pytest.raises(openai.NotFoundError) as refused:
            await keeping.here.responses.create(**ASKED, input=[{"type": "item_reference", "id": unknown}])
        assert refused.value.param == "input[0].id"
    many: Any = [{"type": "item_reference", "id": item.id} for _ in range(35) for item in first.output]
    await keeping.here.responses.create(**ASKED, input=many)  # one response, read once


async def test_items_of_many_responses_are_read_for_no_request(keeping: Keeping) -> None:
    found = [await keeping.here.responses.create(model="tiny", input="a", max_output_tokens=1) for _ in range(65)]
    named: Any = [{"type": "item_reference", "id": each.output[0].id} for each in found]
    await keeping.here.responses.create(model="tiny", input=named[1:], max_output_tokens=1)
    with pytest.raises(openai.BadRequestError) as refused:
        await keeping.here.responses.create(model="tiny", input=named, max_output_tokens=1)
    assert refused.value.param == "input[0].id"


async def test_tenants_do_not_see_each_other(keeping: Keeping) -> None:
    def of(tenant: str) -> Any:
        return keeping.here.with_options(default_headers={"X-Tenant": tenant}).responses

    found = await of("one").create(model="tiny", input="hello", max_output_tokens=1)
    assert (await of("one").retrieve(found.id)).id == found.id
    for other in (of("two"), keeping.here.responses):
        for call in (other.retrieve(found.id), other.delete(found.id)):
            with pytest.raises(openai.NotFoundError):
                await call
        with pytest.raises(openai.NotFoundError):
            await other.create(model="tiny", input="a", previous_response_id=found.id)
        with pytest.raises(openai.NotFoundError):
            await other.create(model="tiny", input=[{"type": "item_reference", "id": found.output[0].id}])
    assert (await of("one").retrieve(found.id)).id == found.id


async def test_keys_name_the_tenant(keeping: Keeping, model_folder: Path, tmp_path: Path) -> None:
    for number in (1, 2):
        add_key(tmp_path / "keys.json", f"key-{number}", tenant=f"tenant-{number}")
    kept: Any = {"redis": keeping.redis.url, "http_keep_responses_s": 100}
    async with running_mesh(model_folder, http_port=0, api_keys=str(tmp_path / "keys.json"), **kept) as mesh:
        async with client_of(mesh, api_key="key-1") as one, client_of(mesh, api_key="key-2") as two:
            found = await one.responses.create(model="tiny", input="hello", max_output_tokens=1)
            assert (await one.responses.retrieve(found.id)).id == found.id
            with pytest.raises(openai.NotFoundError):
                await two.responses.retrieve(found.id)
            with pytest.raises(openai.PermissionDeniedError):
                await two.responses.retrieve(found.id, extra_headers={"X-Tenant": "tenant-1"})
        async with client_of(mesh, api_key="wrong") as nobody:
            with pytest.raises(openai.AuthenticationError):
                await nobody.responses.retrieve(found.id)


async def test_a_broken_value_says_what_to_do(keeping: Keeping) -> None:
    found = await keeping.here.responses.create(model="tiny", input="hello", max_output_tokens=1)
    async with Redis.from_url(keeping.redis.url, protocol=2) as redis:
        (key,) = [key async for key in redis.scan_iter("pdmesh:default:responses:*") if await redis.hexists(key, found.id)]
        good = json.loads(await redis.hget(key, found.id) or b"")
        for broken in (
            "nonsense",
            "[]",
            json.dumps({**good, "version": 2}),
            json.dumps({**good, "input": [{"type": "web_search_call"}]}),
            json.dumps({**good, "response": {**good["response"], "id": "resp_other"}}),
        ):
            await redis.hset(key, found.id, broken)
            with pytest.raises(openai.InternalServerError, match=f"DELETE /v1/responses/{found.id}") as refused:
                await keeping.here.responses.create(model="tiny", input="a", previous_response_id=found.id)
            assert refused.value.param == "previous_response_id"
        await keeping.here.responses.delete(found.id)


async def test_without_redis_only_what_needs_it_fails(model_folder: Path) -> None:
    async with EmbeddedRedis() as redis:
        kept: Any = {"redis": redis.url, "http_keep_responses_s": 100}
        async with running_mesh(model_folder, http_port=0, **kept) as mesh, client_of(mesh) as client:
            found = await client.responses.create(model="tiny", input="hello", max_output_tokens=1)
            await redis.stop()
            without: Any = await client.responses.create(model="tiny", input="hello", max_output_tokens=1)
            assert without.model_extra["store"] is False and without.status == "incomplete"
            asked: Any
            for asked in ({"previous_response_id": found.id}, {"store": True}):
                with pytest.raises(openai.InternalServerError, match="Redis, which does not answer") as refused:
                    await client.responses.create(model="tiny", input="a", **asked)
                assert refused.value.status_code == 503 and refused.value.param in asked
            with pytest.raises(openai.InternalServerError):
                await client.responses.retrieve(found.id)


@pytest_asyncio.fixture(loop_scope="module")
async def stores() -> AsyncIterator[Any]:
    """Makes stores with bounds of their own."""
    made: list[KeptResponses] = []
    async with EmbeddedRedis() as redis:

        def make(ttl_s: int = 100, max_responses: int = 3, max_bytes: int = 10_000) -> KeptResponses:
            made.append(KeptResponses(redis.url, "default", KeepSettings(ttl_s, max_responses, max_bytes)))
            return made[-1]

        yield make
        for store in made:
            await store.close()


def response(number: int, size: int = 1) -> dict[str, Any]:
    return {"id": f"resp_{number:024x}", "output": [{"type": "message", "role": "assistant", "content": "x" * size}]}


SENT: list[Any] = [{"role": "user", "content": "a"}]


async def ids(store: KeptResponses, tenant: str = "") -> list[int]:
    return [number for number in range(10) if await store.get(tenant, str(response(number)["id"])) is not None]


async def test_the_oldest_goes_first(stores: Any) -> None:
    store = stores()
    for number in range(5):
        assert await store.put("", response(number), SENT)
    assert await store.put("other", response(7), SENT)
    assert await ids(store) == [2, 3, 4] and await ids(store, "other") == [7]
    assert await store.put("", response(5, size=9_700), SENT)  # leaves no room for others
    assert await ids(store) == [5] and await ids(store, "other") == [7]
    assert not await store.put("", response(6, size=10_000), SENT)
    assert await ids(store) == [5]


async def test_a_response_lapses(stores: Any) -> None:
    brief, lasting = stores(ttl_s=1), stores()
    assert await brief.put("", response(0), SENT)
    assert await lasting.put("", response(1), SENT)  # both have the keys of the tenant: the longer time is the keys'

    async with asyncio.timeout(20):
        while await ids(lasting) != [1]:  # noqa: ASYNC110  # the clock is Redis's
            await asyncio.sleep(0.05)


async def test_keeping_needs_redis() -> None:
    with pytest.raises(ValueError, match="http_keep_responses_s: needs --redis"):
        RouterConfig(models=("tiny=/x",), http_keep_responses_s=5).validate()
    with pytest.raises(ConfigError):
        KeptResponses("http://x", "default", KeepSettings(1, 1, 1))
