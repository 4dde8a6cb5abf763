"""Structured output of the real model through the mesh: whole documents, and the same tokens whichever way they were computed."""

import json
from collections.abc import AsyncIterator
from pathlib import Path

import jsonschema
import pytest
import pytest_asyncio

from pdmesh.client.client import AsyncClient
from pdmesh.client.types import FinishReason, GenerateOptions, Generation
from pdmesh.launcher.mesh import LocalMesh
from pdmesh.launcher.plan import LocalMeshConfig
from pdmesh.models.registry import ensure_model
from pdmesh.runtime.rpc.channel import connect
from pdmesh.v1 import common_pb2, mesh_pb2, mesh_pb2_grpc
from tests.mesh.checks import assert_whole

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.real_model, pytest.mark.timeout(300)]

PROMPT = "Describe a person as a JSON object.\n"
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "occupation": {"enum": ["software engineer", "teacher", "nurse"]},
        "languages": {"type": "array", "items": {"type": "string", "maxLength": 10}, "minItems": 1, "maxItems": 3},
    },
    "required": ["name", "age", "occupation", "languages"],
    "additionalProperties": False,
}
DRAWS: dict[str, GenerateOptions] = {
    "greedy": {"temperature": 0.0},
    "sampled": {"temperature": 0.8, "top_p": 0.95, "seed": 11, "n": 3, "frequency_penalty": 0.2},
}


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def real() -> AsyncIterator[LocalMesh]:
    """One prefill worker, one decode worker."""
    folder: Path = ensure_model("smollm2-135m-instruct", print)
    async with LocalMesh(LocalMeshConfig(model=str(folder), num_prefill=1, num_decode=1, port=0)) as mesh:
        yield mesh


async def ask(mesh: LocalMesh, **options: object) -> Generation:
    async with AsyncClient(mesh.router_addresses) as client:
        return await client.generate(PROMPT, timeout=120, **{"json_schema": SCHEMA, "max_tokens": 200, **options})  # type: ignore[arg-type]


def tokens(answer: Generation) -> list[tuple[int, ...]]:
    return [choice.token_ids for choice in answer.choices]


@pytest.mark.parametrize("draw", DRAWS)
async def test_documents_are_valid_and_equal_on_every_way(real: LocalMesh, draw: str) -> None:
    remote = await ask(real, mode="remote", **DRAWS[draw])
    for choice in remote.choices:
        assert choice.finish_reason is FinishReason.STOP
        jsonschema.validate(json.loads(choice.text), SCHEMA)
    assert tokens(await ask(real, mode="local", **DRAWS[draw])) == tokens(remote)
    computed = await ask(real, mode="remote", logprobs=1, **DRAWS[draw])  # forced tokens do not skip the model
    assert tokens(computed) == tokens(remote)
    assert all(len(choice.logprobs) == len(choice.token_ids) for choice in computed.choices)
    await assert_whole(real)


async def test_other_kinds(real: LocalMesh) -> None:
    for mode in ("remote", "local"):
        answer = await ask(real, mode=mode, json_schema=None, choice=["Paris is the capital", "Berlin"], temperature=0.0)
        assert answer.text in ("Paris is the capital", "Berlin")
        answer = await ask(real, mode=mode, json_schema=None, regex="[A-Z][a-z]{2,9}: [0-9]{4}", seed=3)
        assert answer.text[-4:].isdigit() and answer.choices[0].finish_reason is FinishReason.STOP
        lark = 'start: "<" WORD ("," WORD){2} ">"\nWORD: /[a-z]{1,8}/'
        answer = await ask(real, mode=mode, json_schema=None, grammar=lark, seed=3)
        assert answer.text.count(",") == 2 and answer.text[0] + answer.text[-1] == "<>"


async def test_resumed_in_the_middle(real: LocalMesh) -> None:
    """As a client does that lost its router: behind the first tokens, within forced runs too."""
    whole = await ask(real, mode="local", temperature=0.0)
    channel = connect(real.router_addresses[0])
    stub: mesh_pb2_grpc.MeshAsyncStub = mesh_pb2_grpc.MeshStub(channel)
    for number, length in enumerate(range(1, len(whole.token_ids), 7)):
        emitted = common_pb2.EmittedChoice(index=0, token_ids=whole.token_ids[:length])
        mode = (mesh_pb2.PREFILL_MODE_LOCAL, mesh_pb2.PREFILL_MODE_REMOTE)[number % 2]
        request = mesh_pb2.GenerateRequest(
            text=PROMPT,
            sampling=common_pb2.SamplingParams(
                temperature=0.0, max_tokens=200, constraint=common_pb2.Constraint(json_schema=json.dumps(SCHEMA))
            ),
            options=mesh_pb2.RequestOptions(mode=mode),
            resume=mesh_pb2.Resume(seed=whole.seed, emitted=[emitted]),
        )
        rest = [token async for message in stub.Generate(request, timeout=60) for token in message.delta.token_ids]
        assert (*emitted.token_ids, *rest) == whole.token_ids
    await channel.close()
    await assert_whole(real)
