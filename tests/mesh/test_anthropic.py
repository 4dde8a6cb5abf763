"""The real model over Anthropic's API: a loop of tools that is forced at each step, whole and streamed; the counts are those of
the prompts that the model computed."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import anthropic
import jsonschema
import pytest
import pytest_asyncio

from pdmesh.launcher.mesh import LocalMesh
from pdmesh.launcher.plan import LocalMeshConfig
from pdmesh.models.registry import ensure_model
from tests.mesh.checks import Footprint, assert_whole

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.real_model, pytest.mark.timeout(300)]
SCHEMAS: dict[str, dict[str, Any]] = {
    "find_city": {"type": "object", "properties": {"country": {"enum": ["France", "Italy", "Spain"]}}, "required": ["country"]},
    "weather": {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 12}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
        "required": ["city", "days"],
    },
}
TOOLS: Any = [{"name": name, "description": f"It does {name}.", "input_schema": schema} for name, schema in SCHEMAS.items()]
STEPS = (("find_city", "Lyon"), ("weather", "Sunny, 21 degrees."))


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def mesh() -> AsyncIterator[LocalMesh]:
    folder = ensure_model("smollm2-135m-instruct", print)
    mesh = LocalMesh(LocalMeshConfig(model=str(folder), model_name="smollm2", port=0, http_port=0, num_threads=1))
    async with mesh:
        footprint = Footprint.of(mesh)
        yield mesh
        footprint.grow(mesh)
    footprint.assert_gone()


@pytest_asyncio.fixture(loop_scope="module")
async def client(mesh: LocalMesh) -> AsyncIterator[Any]:
    async with anthropic.AsyncAnthropic(base_url=mesh.http_urls[0], api_key="none", timeout=60) as client:
        yield client


@pytest.mark.parametrize("mode", ["remote", "local"])
async def test_a_loop_of_two_tools(mesh: LocalMesh, client: Any, mode: str) -> None:
    messages: list[Any] = [{"role": "user", "content": "Which city of France is sunny?"}]
    prompt: dict[str, Any] = {
        "model": "smollm2",
        "system": [{"type": "text", "text": "Use the tools.", "cache_control": {"type": "ephemeral"}}],
        "tools": TOOLS,
    }
    more: Any = {"max_tokens": 200, "extra_body": {"seed": 11}, "extra_headers": {"X-Prefill-Mode": mode}}
    for name, result in STEPS:
        choice: Any = {"type": "tool", "name": name}
        said = await client.messages.create(**prompt, messages=messages, tool_choice=choice, **more)
        async with client.messages.stream(**prompt, messages=messages, tool_choice=choice, **more) as stream:
            streamed = await stream.get_final_message()
        (call,) = said.content
        assert (said.stop_reason, call.type, call.name) == ("tool_use", "tool_use", name)
        jsonschema.validate(call.input, SCHEMAS[name])
        assert [block.model_dump() for block in streamed.content] == [call.model_dump()]
        assert await counted(client, **prompt, messages=messages, tool_choice=choice) == num_input(said) == num_input(streamed)
        answer = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": result}]}
        messages += [{"role": "assistant", "content": said.content}, {"role": "user", "content": [answer]}]
    final = await client.messages.create(**prompt, messages=messages, tool_choice={"type": "none"}, **more | {"max_tokens": 12})
    assert final.stop_reason in ("end_turn", "max_tokens") and [block.type for block in final.content] == ["text"]
    assert await counted(client, **prompt, messages=messages, tool_choice={"type": "none"}) == num_input(final)
    assert final.usage.output_tokens <= 12
    await assert_whole(mesh)


async def counted(client: Any, **prompt: Any) -> int:
    return int((await client.messages.count_tokens(**prompt)).input_tokens)


def num_input(message: Any) -> int:
    """All tokens of the prompt, from a cache or not."""
    return int(message.usage.input_tokens + message.usage.cache_read_input_tokens + message.usage.cache_creation_input_tokens)


async def test_a_prefill_is_continued_by_the_model(mesh: LocalMesh, client: Any) -> None:
    """Greedy, the rest of an answer follows from its beginning as it did when the model wrote both."""
    asked: Any = {"model": "smollm2", "max_tokens": 16, "extra_body": {"temperature": 0}}
    hello: list[Any] = [{"role": "user", "content": "Name three colours of a rainbow."}]
    text = (await client.messages.create(**asked, messages=hello)).content[0].text
    begun = text[: text.index(" ", 8)]
    rest = (await client.messages.create(**asked, messages=[*hello, {"role": "assistant", "content": begun}])).content[0].text
    assert (begun + rest).startswith(text) and rest
    await assert_whole(mesh)
