"""The description of the endpoints: valid OpenAPI, complete, and of the same opinion as the checks of requests."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from html import escape
from types import SimpleNamespace
from typing import Any

import httpx
import jsonschema
import pytest
from jsonschema import Draft202012Validator
from starlette.routing import Route

from pdmesh.runtime.errors import InvalidArgument
from pdmesh.sampling_params import PARAMETERS
from router.api.anthropic.bodies import MessageBody
from router.api.http import docs_page
from router.api.http.body import HttpSettings
from router.api.http.openapi import Endpoint, document, with_description
from router.api.http.types import Body, checked
from router.api.openai.bodies import ChatCompletionRequest, CompletionRequest, TokenizeChatRequest
from router.api.protocols import all_routes
from router.api.responses.requests import CreateResponse
from router.config import RouterConfig
from tests.router.answer_checks import RecordedAnswers, problems
from tests.router.mesh import Mesh
from tests.router.openai.conftest import url

pytestmark = pytest.mark.asyncio(loop_scope="module")
SCHEMA = {
    "type": "object",
    "required": ["openapi", "info", "paths"],
    "properties": {
        "openapi": {"pattern": r"^3\.1\.\d+$"},
        "info": {"required": ["title", "version"]},
        "paths": {
            "propertyNames": {"pattern": "^/"},
            "additionalProperties": {
                "propertyNames": {"enum": ["get", "post", "put", "delete", "patch", "head", "options"]},
                "additionalProperties": {"$ref": "#/$defs/operation"},
            },
        },
        "components": {
            "properties": {
                "schemas": {"propertyNames": {"pattern": r"^[a-zA-Z0-9._-]+$"}},
                "securitySchemes": {"type": "object"},
            },
            "additionalProperties": False,
        },
    },
    "additionalProperties": False,
    "$defs": {
        "operation": {
            "required": ["responses", "operationId"],
            "properties": {
                "operationId": {"pattern": "^[a-z0-9_A-Z]+$"},
                "summary": {"type": "string"},
                "description": {"type": "string"},
                "security": {"type": "array"},
                "parameters": {"items": {"$ref": "#/$defs/parameter"}},
                "requestBody": {"required": ["content"], "properties": {"content": {"$ref": "#/$defs/content"}}},
                "responses": {
                    "propertyNames": {"pattern": "^([1-5][0-9X][0-9X]|default)$"},
                    "additionalProperties": {"required": ["description"], "properties": {"content": {"$ref": "#/$defs/content"}}},
                },
            },
            "additionalProperties": False,
        },
        "parameter": {
            "required": ["name", "in", "schema"],
            "properties": {"in": {"enum": ["path", "header", "query", "cookie"]}},
        },
        "content": {"propertyNames": {"pattern": "^[a-z]+/[a-z-]+$"}, "additionalProperties": {"required": ["schema"]}},
    },
}
"""What OpenAPI 3.1 demands of the parts that are used here (https://spec.openapis.org/oas/v3.1.0)."""


FRONTEND: Any = SimpleNamespace(core=SimpleNamespace(config=RouterConfig()), closing=[])
BATCHES: Any = SimpleNamespace(store=None, config=RouterConfig().batches)
WITHOUT_JSON = {"/v1/files", "/v1/batches/{batch_id}/cancel", "/pause", "/resume", "/sleep", "/wake_up"}
"""A file is sent as multipart/form-data, stopping a batch needs no body, and vLLM's endpoints for trainers have a query."""


def routes() -> list[Route]:
    """All that a router can serve."""
    return all_routes(FRONTEND, BATCHES, HttpSettings(1))


@pytest.fixture(scope="module")
def described() -> dict[str, Any]:
    made: dict[str, Any] = json.loads(json.dumps(document(routes()), allow_nan=False))
    return made


def _refs(value: object) -> Iterator[str]:
    if isinstance(value, dict):
        if isinstance(value.get("$ref"), str):
            yield value["$ref"]
        for each in value.values():
            yield from _refs(each)
    elif isinstance(value, list):
        for each in value:
            yield from _refs(each)


def _with_defaults(value: object, name: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    if isinstance(value, dict):
        if "default" in value:
            yield name, value
        for key, each in value.items():
            yield from _with_defaults(each, f"{name}.{key}")


async def test_it_is_valid(described: dict[str, Any]) -> None:
    jsonschema.validate(described, SCHEMA)
    schemas = described["components"]["schemas"]
    for schema in schemas.values():
        Draft202012Validator.check_schema(schema)
    assert {ref.removeprefix("#/components/schemas/") for ref in _refs(described)} == set(schemas)
    for name, each in _with_defaults(described["components"]["schemas"]):
        assert Draft202012Validator({**each, "components": described["components"]}).is_valid(each["default"]), name
    operations = [(path, each) for path, of in described["paths"].items() for each in of.values()]
    assert len({each["operationId"] for _, each in operations}) == len(operations)
    for path, each in operations:
        named = {parameter["name"] for parameter in each["parameters"] if parameter["in"] == "path"}
        assert named == set(re.findall(r"{(\w+)}", path))
        assert all(parameter.get("required") for parameter in each["parameters"] if parameter["in"] == "path")


async def test_every_route_is_described(described: dict[str, Any]) -> None:
    for route in routes():
        assert isinstance(route, Endpoint), f"{route.path}: make it an Endpoint, with the types of its bodies"
        path = re.sub(r"{(\w+):\w+}", r"{\1}", route.path)
        for method in (route.methods or set()) - {"HEAD"}:
            operation = described["paths"][path][method.lower()]
            assert operation["summary"]
            if method != "POST" or path in WITHOUT_JSON:
                continue
            assert operation["requestBody"]["content"]["application/json"]["schema"]


async def test_every_answer_has_a_type(described: dict[str, Any]) -> None:
    for path, operations in described["paths"].items():
        for method, operation in operations.items():
            content = operation["responses"]["200"]["content"]
            assert all(each["schema"] for each in content.values()), f"{method} {path}"
            assert not operation.get("security") or "content" in operation["responses"]["default"], f"{method} {path}"


@pytest.mark.parametrize(("path", "least"), [("/v1/responses", 16), ("/v1/messages", 8)])
async def test_events_are_told_apart_by_their_type(described: dict[str, Any], path: str, least: int) -> None:
    content = described["paths"][path]["post"]["responses"]["200"]["content"]
    schema, schemas = content["text/event-stream"]["schema"], described["components"]["schemas"]
    assert schema["discriminator"]["propertyName"] == "type" and len(schema["oneOf"]) == len(schema["discriminator"]["mapping"])
    refs = {each["$ref"] for each in schema["oneOf"]}
    for kind, ref in schema["discriminator"]["mapping"].items():
        assert ref in refs and schemas[ref.rpartition("/")[2]]["properties"]["type"]["const"] == kind
        assert schemas[ref.rpartition("/")[2]]["additionalProperties"] is False
    assert len(refs) >= least


async def test_a_path_of_two_apis_has_both_answers(described: dict[str, Any]) -> None:
    models = described["paths"]["/v1/models"]["get"]
    shown = models["responses"]["200"]["content"]["application/json"]["schema"]["anyOf"]
    assert {each["$ref"].rpartition("/")[2] for each in shown} == {"ModelList", "ModelPage"}
    assert "anthropic-version" in {each["name"] for each in models["parameters"]}


async def test_a_route_without_a_description_is_listed() -> None:
    async def bare(request: object) -> None:
        """Does nothing."""

    made = document(with_description([Route("/bare/{name}", bare, methods=["PUT"])]))
    jsonschema.validate(made, SCHEMA)
    assert made["paths"]["/bare/{name}"]["put"]["parameters"][0]["name"] == "name"


HELLO: Any = [{"role": "user", "content": "hello"}]
CALL = {"id": "c", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
ANSWER = {"role": "tool", "tool_call_id": "c", "content": [{"type": "text", "text": "a"}]}
BODIES: list[tuple[type[Body], dict[str, Any], str | None]] = [
    (CompletionRequest, {"prompt": "a"}, None),
    (CompletionRequest, {"prompt": [1, 2]}, None),
    (CompletionRequest, {"prompt": ["a", [1]], "temperature": 0, "top_k": -1, "seed": -5, "stop": ["a"], "suffix": ""}, None),
    (CompletionRequest, {"prompt": "a", "response_format": {"type": "json_schema", "json_schema": {"schema": {}}}}, None),
    (CompletionRequest, {"prompt": [1, "a"]}, "prompt[1]"),
    (CompletionRequest, {"prompt": "a", "use_beam_search": True}, "use_beam_search"),
    (CompletionRequest, {"prompt": "a", "response_format": {"type": "xml"}}, "response_format.type"),
    (CompletionRequest, {"prompt": "a", "response_format": {}}, "response_format.type"),
    (CompletionRequest, {"prompt": "a", "response_format": 3}, "response_format"),
    (CompletionRequest, {"prompt": "a", "n": 17}, "n"),
    (CompletionRequest, {}, "prompt"),
    (ChatCompletionRequest, {"messages": HELLO, "tools": [TOOL], "tool_choice": "required", "user": {"any": 1}}, None),
    (ChatCompletionRequest, {"messages": HELLO, "tools": [TOOL], "tool_choice": TOOL | {"function": {"name": "weather"}}}, None),
    (ChatCompletionRequest, {"messages": [*HELLO, {"role": "assistant", "content": None, "tool_calls": [CALL]}]}, None),
    (
        ChatCompletionRequest,
        {"messages": [{"role": "tool", "tool_call_id": "c", "content": [{"type": "text", "text": "a"}]}]},
        None,
    ),
    (ChatCompletionRequest, {"messages": [{"role": "user"}]}, "messages[0].content"),
    (ChatCompletionRequest, {"messages": HELLO, "tool_choice": {"type": "function"}}, "tool_choice.function"),
    (ChatCompletionRequest, {"messages": HELLO, "tool_choice": 3}, "tool_choice"),
    (ChatCompletionRequest, {"messages": HELLO, "max_token": 3}, "max_token"),
    (TokenizeChatRequest, {"messages": HELLO, "add_special_tokens": False}, None),
    (TokenizeChatRequest, {"messages": HELLO, "prompt": "a"}, "prompt"),
]


BODIES += [
    (CreateResponse, {"input": [{"role": "user", "content": "a"}], "text": {"format": {"type": "json_object"}}}, None),
    (CreateResponse, {"input": "a", "tools": [{"type": "function", "name": "f"}], "tool_choice": "required"}, None),
    (
        CreateResponse,
        {"input": [{"type": "reasoning", "summary": []}, {"type": "message", "role": "user", "content": "a"}]},
        None,
    ),
    (CreateResponse, {"input": "a", "tools": [{"type": "code_interpreter"}]}, "tools[0].type"),
    (CreateResponse, {"input": "a", "text": {"format": {"type": "xml"}}}, "text.format.type"),
    (CreateResponse, {"input": [{"type": "web_search_call", "id": "w"}]}, "input[0].type"),
    (CreateResponse, {"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].type"),
    (MessageBody, {"max_tokens": 1, "messages": HELLO, "tools": [{"name": "f", "input_schema": {"type": "object"}}]}, None),
    (
        MessageBody,
        {"max_tokens": 1, "messages": [{"role": "user", "content": [{"type": "image"}]}]},
        "messages[0].content[0].type",
    ),
    (MessageBody, {"max_tokens": 1, "messages": HELLO, "tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools[0].type"),
]


@pytest.mark.parametrize(("kind", "body", "param"), BODIES)
async def test_description_and_checks_agree(
    described: dict[str, Any], kind: type[Body], body: dict[str, Any], param: str | None
) -> None:
    schema = {"$ref": f"#/components/schemas/{kind.__name__}", "components": described["components"]}
    is_described = Draft202012Validator(schema).is_valid(body)
    if param is None:
        checked(kind, body)
        assert is_described
        return
    with pytest.raises(InvalidArgument) as refused:
        checked(kind, body)
    assert refused.value.field == param and refused.value.message.startswith(f"{param}: ") and not is_described


async def test_ranges_are_those_of_the_sampling_parameters(described: dict[str, Any]) -> None:
    for name in ("CompletionRequest", "ChatCompletionRequest"):
        shown = described["components"]["schemas"][name]["properties"]
        assert {parameter.name for parameter in PARAMETERS} <= set(shown)
        assert (shown["temperature"]["minimum"], shown["temperature"]["maximum"]) == (0, 100)
        assert (shown["presence_penalty"]["minimum"], shown["presence_penalty"]["maximum"]) == (-2, 2)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({f"name{number}": number for number in range(200_000)}, "name0"),
        ({"\ud800": 1}, "\ud800"),
        ({"x" * 5000: 1}, "x" * 60),
        ({"messages": [{}] * 5000}, "messages[0].role"),
    ],
)
async def test_what_is_strange_gives_one_short_error(body: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidArgument) as refused:
        checked(ChatCompletionRequest, {"messages": HELLO, **body})
    assert refused.value.field == param and len(refused.value.message) < 200


async def test_both_are_served(served: Mesh) -> None:
    async with httpx.AsyncClient() as http:
        answer = await http.get(url(served, "/openapi.json"))
        assert answer.status_code == 200 and answer.json()["openapi"] == "3.1.0"
        assert (await http.get(url(served, "/openapi.json"))).content == answer.content
        page = await http.get(url(served, "/docs"))
    assert page.headers["content-type"].startswith("text/html")
    for path in answer.json()["paths"]:
        assert path in page.text
    assert "max_completion_tokens" in page.text and not re.search(r"(src|href)=[\"']?(https?:)?//", page.text)


async def test_the_page_says_what_each_field_and_header_means(described: dict[str, Any]) -> None:
    shown = docs_page.page(described)
    schemas = described["components"]["schemas"]
    tables = re.findall(r"<table>(.*?)</table>", shown)
    assert all(re.match(r"<tr>(<th>[a-z]+)+</tr>", table) or table.startswith("<tr><th>endpoint<th></tr>") for table in tables)
    for name, schema in schemas.items():
        for field, value in schema.get("properties", {}).items():
            if "description" in value:
                assert escape(value["description"]) in shown, f"{name}.{field}"
    by_type = {row.name: row.description for row in docs_page.rows(schemas["MessageBody"], schemas)}
    assert by_type["cache_control"] == schemas["CacheControl"]["description"]
    assert "<code>x-pdmesh-session-id</code>" in shown


async def test_answers_are_checked(served: Mesh) -> None:
    """An answer that is not of its type is a problem."""
    text = {"prompt": "abc", "max_tokens": 2}
    async with httpx.AsyncClient() as http:
        for path, body in (("/detokenize", {"tokens": [70]}), ("/v1/completions", {**text, "stream": True}), ("/tokenize", {})):
            await http.post(url(served, path), json=body)
    answers = RecordedAnswers.answers[-3:]
    assert [answer.status for answer in answers] == [200, 200, 400] and not [*problems(answers)]
    for answer, name in zip(answers, (b"prompt", b"choices", b"param"), strict=True):
        assert [*problems([replace(answer, sent=answer.sent.replace(b'"%b"' % name, b'"other"'))])]
