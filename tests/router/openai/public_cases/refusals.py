"""What is refused, and how; what is taken although it looks odd; what is around requests."""

from __future__ import annotations

import math
from typing import Any

from tests.router.openai.public_cases.case import HELLO, ORIGIN, TEXT, Case, Seen, refusal, refused

PAGE = {"Origin": ORIGIN, "Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
OK: dict[str, Any] = {"messages": HELLO, "max_tokens": 2}


def status(seen: Seen) -> object:
    return seen.status


def keyword(seen: Seen) -> object:
    """Status, field and the keyword within a schema that an error names."""
    error = seen.body["error"]
    words = error["message"].removeprefix(error["param"] + ": ").partition(":")[0]
    return seen.status, error["param"], words


def schema(wanted: Any) -> dict[str, Any]:
    return {**OK, "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": wanted}}}


CASES = [
    Case(
        "model-unknown",
        "An unknown model is 404 with a code",
        "runpod-workers/worker-vllm#57",
        {**OK, "model": "gpt-4"},
        refusal,
        refused("model", "model_not_found", 404),
    ),
    Case(
        "model-unknown-stream",
        "So it is where a stream was asked for",
        "runpod-workers/worker-vllm#57",
        {**OK, "model": "gpt-4", "stream": True},
        refusal,
        refused("model", "model_not_found", 404),
    ),
    Case(
        "overflow-code",
        "A prompt beyond the context has the code that agents look for",
        "cline/cline#13194",
        {"messages": [{"role": "user", "content": "a" * 3000}], "max_tokens": 2},
        refusal,
        refused("messages", "context_length_exceeded"),
    ),
    Case(
        "overflow-words",
        "It has the words that clients look for",
        "mckaywrigley/chatbot-ui#102",
        {"messages": [{"role": "user", "content": "a" * 3000}], "max_tokens": 2},
        lambda seen: seen.body["error"]["message"].startswith(
            "This model's maximum context length is 2048 tokens. However, you requested "
        ),
        True,
    ),
    Case(
        "overflow-output",
        "max_tokens that does not fit beside the prompt is the same error",
        "diffbot/code-gpt-docs#123",
        {"messages": HELLO, "max_tokens": 2040},
        refusal,
        refused("max_tokens", "context_length_exceeded"),
    ),
    Case(
        "overflow-huge",
        "A huge message is refused and breaks nothing",
        "ggml-org/llama.cpp#27427",
        {"messages": [{"role": "user", "content": "a" * 50_000}]},
        refusal,
        refused("messages", "context_length_exceeded"),
    ),
    Case(
        "surrogate",
        "Half a surrogate pair is refused by name",
        "volcengine/OpenViking#4238",
        {"messages": [{"role": "user", "content": "a\ud800"}]},
        refusal,
        refused("messages[0].content"),
    ),
    Case("seed-beyond", "A seed of 2^64 is refused", "vllm-project/vllm#4529", {**OK, "seed": 2**64}, refusal, refused("seed")),
    Case(
        "seed-large",
        "A seed of 2^63 reaches the worker as it is",
        "vllm-project/vllm#57018",
        {**OK, "seed": 2**63},
        lambda seen: seen.sampling.seed,
        2**63,
    ),
    Case(
        "temperature-negative",
        "A negative temperature is refused",
        "michaelasper/kir-ai#160",
        {**OK, "temperature": -0.5},
        refusal,
        refused("temperature"),
    ),
    Case(
        "temperature-two",
        "A temperature of 2 is taken",
        "raullenchai/Rapid-MLX#740",
        {**OK, "temperature": 2},
        lambda seen: seen.sampling.temperature,
        2.0,
    ),
    Case(
        "temperature-zero",
        "A temperature of 0 is sent as 0, not as missing",
        "FlashML-org/FreeToken#223",
        {**OK, "temperature": 0},
        lambda seen: (seen.sampling.HasField("temperature"), seen.sampling.temperature),
        (True, 0.0),
    ),
    Case(
        "top-p-beyond", "A top_p above 1 is refused", "NVIDIA/TensorRT-LLM#17158", {**OK, "top_p": 7}, refusal, refused("top_p")
    ),
    Case(
        "nan",
        "NaN is no JSON",
        "sgl-project/sglang#28153",
        {**OK, "temperature": math.nan},
        lambda seen: (seen.status, "NaN" in seen.body["error"]["message"], seen.num_submits),
        (400, True, 0),
    ),
    Case(
        "bias-unknown",
        "A bias of a token beyond the vocabulary is refused",
        "vllm-project/vllm#16529",
        {**OK, "logit_bias": {"191222": -100}},
        refusal,
        refused("logit_bias"),
    ),
    Case(
        "bias-word",
        "A bias of a word is refused by its key",
        "vllm-project/vllm#5963",
        {**OK, "logit_bias": {"AI": -100}},
        refusal,
        refused("logit_bias.AI"),
    ),
    Case("stop-null", "stop may be null", "AI-DM-Foundry/AI-Combat-Assistant-Pf2e#8", {**OK, "stop": None}, status, 200),
    Case("stop-list-empty", "stop may be an empty list", "tenstorrent/tt-inference-server#4260", {**OK, "stop": []}, status, 200),
    Case(
        "stop-empty",
        "An empty stop string is refused and never matches",
        "mlc-ai/mlc-llm#2070",
        {**OK, "stop": ""},
        refusal,
        refused("stop"),
    ),
    Case(
        "nulls",
        "Fields with defaults may be null",
        "LostRuins/koboldcpp#1503",
        {
            **OK,
            "seed": None,
            "temperature": None,
            "top_p": None,
            "n": None,
            "stream": None,
            "stream_options": None,
            "response_format": None,
            "logprobs": None,
            "logit_bias": None,
            "presence_penalty": None,
        },
        status,
        200,
    ),
    Case(
        "format-without-schema",
        "json_schema without its member is 400",
        "vllm-project/vllm#35438",
        {**OK, "response_format": {"type": "json_schema", "schema": {"type": "object"}}},
        lambda seen: (seen.status, seen.body["error"]["param"].startswith("response_format"), seen.num_submits),
        (400, True, 0),
    ),
    Case(
        "format-bad-schema",
        "A schema with an unknown type is 400",
        "vllm-project/vllm#28113",
        schema({"type": "none"}),
        refusal,
        refused("response_format.json_schema.schema"),
    ),
    Case(
        "format-unknown",
        "An unknown kind of format is named",
        "own: no thread found",
        {**OK, "response_format": {"type": "xml"}},
        refusal,
        refused("response_format.type"),
    ),
    Case(
        "format-reaches-worker",
        "A schema is used and not ignored",
        "ogx-ai/ogx#528",
        schema({"type": "object"}),
        lambda seen: seen.sampling.constraint.json_schema,
        '{"type":"object"}',
    ),
    Case(
        "format-defs",
        "A schema with $defs, anyOf, enum and const is taken",
        "own: no thread found",
        schema({"$defs": {"a": {"enum": ["x", 1, None]}}, "anyOf": [{"$ref": "#/$defs/a"}, {"const": True}]}),
        status,
        200,
    ),
    Case(
        "number-exact",
        "A number that a double does not hold is refused by its keyword, and never turned into another",
        "own: shared cases, numbers in schemas",
        schema({"const": 1234567890123456789}),
        keyword,
        (400, "response_format.json_schema.schema", "const"),
    ),
    Case(
        "number-enum",
        "So it is among alternatives",
        "own: no thread found",
        schema({"enum": [2**64 - 1, 3]}),
        keyword,
        (400, "response_format.json_schema.schema", "enum"),
    ),
    Case(
        "number-held",
        "The largest number that is held is written as it is",
        "own: no thread found",
        schema({"const": 2**53}),
        lambda seen: (seen.allows(str(2**53)), seen.allows(str(2**53 - 1))),
        (True, False),
    ),
    Case(
        "number-bound",
        "A bound that cannot be kept exactly is refused",
        "own: no thread found",
        schema({"type": "integer", "minimum": 2**63}),
        refusal,
        refused("response_format.json_schema.schema"),
    ),
    Case(
        "class-of-controls",
        "A class of control characters allows them as JSON writes them, and nothing else",
        "own: shared cases, a class that reaches beyond itself",
        schema({"type": "string", "pattern": r"^[\x00-\x1f]{2}$"}),
        lambda seen: [seen.allows(text) for text in (r'"\n\t"', r'"\\\n"', '"ab"', r'"\u0001\u001f"')],
        [True, False, False, True],
    ),
    Case(
        "strict-shape",
        "A schema's members alone are allowed where it closes itself",
        "own: no thread found",
        schema({"type": "object", "properties": {"a": {"enum": ["x", "y"]}}, "required": ["a"], "additionalProperties": False}),
        lambda seen: [seen.allows(text) for text in ('{"a": "x"}', '{"a": "z"}', '{"a": "x", "b": 1}', "{}")],
        [True, False, False, False],
    ),
    Case(
        "messages-empty",
        "An empty conversation is refused by name",
        "ai-dynamo/dynamo#2067",
        {"messages": []},
        refusal,
        refused("messages"),
    ),
    Case(
        "role-unknown-part",
        "A part that the model cannot read is named",
        "own: no thread found",
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        refusal,
        refused("messages[0].content[0].type"),
    ),
    Case(
        "deadline",
        "A deadline that nothing could meet is 504 and not to be retried",
        "own: shared cases, deadlines",
        OK,
        lambda seen: (seen.status, seen.headers.get("retry-after")),
        (504, None),
        headers={"X-Request-Timeout-Ms": "1"},
    ),
    Case(
        "preflight",
        "A page may ask before it calls",
        "lm-sys/RouteLLM#43",
        {},
        lambda seen: (seen.status, seen.headers["access-control-allow-origin"]),
        (200, ORIGIN),
        method="OPTIONS",
        headers=PAGE,
    ),
    Case(
        "preflight-key",
        "It may send its key",
        "dphnAI/sonar#434",
        {},
        lambda seen: "authorization" in seen.headers["access-control-allow-headers"].lower(),
        True,
        method="OPTIONS",
        headers=PAGE,
    ),
    Case(
        "page-reads-errors",
        "A page can read an error",
        "caigee-cmd/cli2api#148",
        {"messages": []},
        lambda seen: (seen.status, seen.headers["access-control-allow-origin"]),
        (400, ORIGIN),
        headers={"Origin": ORIGIN},
    ),
    Case(
        "method",
        "GET where POST is due is 405 in the form of an error",
        "own: no thread found",
        {},
        lambda seen: (seen.status, seen.headers["allow"], sorted(seen.body["error"])),
        (405, "POST", ["code", "message", "param", "type"]),
        method="GET",
    ),
    Case(
        "tokenize-chat",
        "A conversation is counted as it is shown",
        "vllm-project/vllm#13951",
        {"messages": HELLO, "seed": None},
        lambda seen: (seen.status, seen.body["count"] == len(seen.body["tokens"]) > 5),
        (200, True),
        path="/tokenize",
    ),
    Case(
        "echo-nothing",
        "lm-eval's request: echo, logprobs and no output at all",
        "vllm-project/vllm#6521",
        {"prompt": "abc", "echo": True, "logprobs": 1, "max_tokens": 0},
        lambda seen: seen.sampling.prompt_logprobs,
        1,
        path=TEXT,
    ),
]
