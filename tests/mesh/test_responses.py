"""The Responses API with real weights, by the real `openai` client: a tool loop, typed output, and turns at two routers."""

from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest
import pytest_asyncio
from pydantic import BaseModel, Field

from pdmesh.launcher.mesh import LocalMesh
from pdmesh.launcher.plan import LocalMeshConfig
from pdmesh.models.registry import ensure_model
from tests.mesh.checks import assert_whole

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.real_model, pytest.mark.timeout(300)]
WEATHER: Any = {
    "type": "function",
    "name": "weather",
    "description": "Tells the weather of a city.",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 20}},
        "required": ["city"],
        "additionalProperties": False,
    },
    "strict": True,
}
ASKED: Any = {"model": "smollm2", "temperature": 0, "max_output_tokens": 60}


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def mesh() -> AsyncIterator[LocalMesh]:
    config = LocalMeshConfig(
        model=str(ensure_model("smollm2-135m-instruct", print)),
        model_name="smollm2",
        port=0,
        http_port=0,
        num_threads=1,
        num_routers=2,
        router_args=("--http-keep-responses-s", "100"),
    )
    async with LocalMesh(config) as mesh:
        yield mesh


@pytest_asyncio.fixture(loop_scope="module")
async def clients(mesh: LocalMesh) -> AsyncIterator[list[Any]]:
    """One of each router."""
    opened = [openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", timeout=60) for url in mesh.http_urls]
    yield opened
    for client in opened:
        await client.close()


async def test_a_tool_loop_sent_whole_or_as_the_next_turn(mesh: LocalMesh, clients: list[Any]) -> None:
    here, there = clients
    asked: Any = {**ASKED, "tools": [WEATHER], "parallel_tool_calls": False}
    items: Any = [{"role": "user", "content": "What is the weather in Lyon?"}]
    first = await here.responses.create(**asked, input=items, tool_choice="required")
    (call,) = first.output
    assert (call.type, call.name, first.status) == ("function_call", "weather", "completed") and '"city"' in call.arguments
    output = {"type": "function_call_output", "call_id": call.call_id, "output": "Sunny, 25 degrees."}
    whole = await here.responses.create(**asked, input=[*items, *first.output, output], tool_choice="none", store=False)
    async with there.responses.stream(**asked, input=[output], previous_response_id=first.id, tool_choice="none") as stream:
        next_turn = await stream.get_final_response()
    assert whole.output_text and next_turn.output_text == whole.output_text
    assert next_turn.usage.input_tokens == whole.usage.input_tokens
    await assert_whole(mesh)


class City(BaseModel):
    name: str = Field(max_length=20)
    is_large: bool


async def test_typed_output(mesh: LocalMesh, clients: list[Any]) -> None:
    asked: Any = {**ASKED, "input": "Describe the city of Lyon.", "text_format": City}
    parsed = await clients[0].responses.parse(**asked)
    assert isinstance(parsed.output_parsed, City) and parsed.status == "completed"
    async with clients[0].responses.stream(**asked) as stream:
        final = await stream.get_final_response()
    assert final.output_parsed == parsed.output_parsed
    await assert_whole(mesh)
