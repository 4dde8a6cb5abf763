"""Tools: calls, their streams, histories with calls."""

from __future__ import annotations

import json
from typing import Any

from tests.router.openai.public_cases.case import HELLO, Case, Seen, refusal, refused

WEATHER: Any = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS: Any = [
    {"type": "function", "function": {"name": "weather", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "stop"}},
]
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Lyon"}}\n</tool_call>'
STOP = '<tool_call>\n{"name": "stop", "arguments": {}}\n</tool_call>'
ASK: dict[str, Any] = {"messages": HELLO, "tools": TOOLS}
STREAM: dict[str, Any] = {**ASK, "stream": True}
NAMED: Any = {"type": "function", "function": {"name": "weather"}}


def history(arguments: Any, content: Any = None, **more: Any) -> dict[str, Any]:
    """A conversation in which the assistant has called a tool."""
    call = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": arguments}}
    answer = {"role": "tool", "tool_call_id": "call_1", "content": "sunny", **more}
    return {"messages": [*HELLO, {"role": "assistant", "content": content, "tool_calls": [call]}, answer], "max_tokens": 2}


def without_content() -> dict[str, Any]:
    body = history("{}")
    del body["messages"][1]["content"]
    return body


def function(**parameters: Any) -> dict[str, Any]:
    return {**ASK, "tools": [{"type": "function", "function": {"name": "a", "parameters": parameters}}], "max_tokens": 2}


def joined(seen: Seen) -> object:
    """The arguments of each call, put together by index."""
    found: dict[int, str] = {}
    for call in seen.calls:
        found[call["index"]] = found.get(call["index"], "") + call["function"]["arguments"]
    return {index: json.loads(text) for index, text in found.items()}


def named(seen: Seen) -> object:
    """Index, type and name of each piece that begins a call, and whether it has an id."""
    firsts = [call for call in seen.calls if call.get("id")]
    return [(call["index"], call["type"], call["function"]["name"]) for call in firsts]


def status(seen: Seen) -> object:
    return seen.status


CASES = [
    Case(
        "stream-call-id",
        "The first piece of a streamed call has its id, type and name",
        "vllm-project/vllm#18412",
        STREAM,
        named,
        [(0, "function", "weather")],
        says=CALL,
    ),
    Case(
        "stream-call-id-once",
        "Later pieces of a call have its index and no id or name",
        "openai/codex#7517",
        STREAM,
        lambda seen: [(c["index"], c["function"].get("name")) for c in seen.calls if c.get("id") or c["function"].get("name")],
        [(0, "weather")],
        says=CALL,
    ),
    Case(
        "stream-arguments",
        "Arguments come in streams too",
        "vllm-project/vllm#9693",
        STREAM,
        joined,
        {0: {"city": "Lyon"}},
        says=CALL,
    ),
    Case(
        "stream-two-calls",
        "Two streamed calls have different indexes",
        "InternLM/lmdeploy#3412",
        STREAM,
        joined,
        {0: {"city": "Lyon"}, 1: {}},
        says=CALL + STOP,
    ),
    Case(
        "stream-two-ids",
        "Two streamed calls have different ids",
        "SamSaffron/term-llm#314",
        STREAM,
        lambda seen: len({call["id"] for call in seen.calls if call.get("id")}),
        2,
        says=CALL + STOP,
    ),
    Case(
        "stream-call-index-0",
        "A call after text has index 0",
        "pipecat-ai/pipecat#4987",
        STREAM,
        named,
        [(0, "function", "weather")],
        says="Let me see. " + CALL,
    ),
    Case(
        "stream-call-text",
        "Text before a streamed call is content and the marks of the call are not",
        "own: no thread found",
        STREAM,
        lambda seen: "".join(p["delta"].get("content") or "" for p in seen.pieces).strip(),
        "Let me see.",
        says="Let me see. " + CALL,
    ),
    Case(
        "stream-call-finish",
        "A stream with a call ends with tool_calls",
        "vllm-project/vllm#9209",
        STREAM,
        lambda seen: [p["finish_reason"] for p in seen.pieces if p["finish_reason"]],
        ["tool_calls"],
        says=CALL,
    ),
    Case(
        "call-finish",
        "A whole answer with a call ends with tool_calls",
        "sgl-project/sglang#2877",
        ASK,
        lambda seen: seen.choice["finish_reason"],
        "tool_calls",
        says=CALL,
    ),
    Case(
        "required-finish",
        "A required call ends with tool_calls, not stream alone",
        "vllm-project/vllm#25054",
        {**ASK, "tool_choice": "required"},
        lambda seen: seen.choice["finish_reason"],
        "tool_calls",
        says=CALL,
    ),
    Case(
        "named-finish",
        "A call of the named tool ends with tool_calls",
        "vllm-project/vllm#32018",
        {**ASK, "tool_choice": NAMED},
        lambda seen: (seen.choice["finish_reason"], seen.message["tool_calls"][0]["function"]["name"]),
        ("tool_calls", "weather"),
        says=CALL,
    ),
    Case(
        "no-call-finish",
        "An answer without a call does not end with tool_calls",
        "vllm-project/vllm#53255",
        ASK,
        lambda seen: (seen.choice["finish_reason"], seen.message.get("tool_calls")),
        ("stop", None),
        says="It is sunny.",
    ),
    Case(
        "call-cut-off",
        "A call that max_tokens cuts off ends with length",
        "own: no thread found",
        {**ASK, "max_tokens": 30},
        lambda seen: seen.choice["finish_reason"],
        "length",
        says=CALL,
    ),
    Case(
        "call-content-null",
        "Content beside calls alone is null",
        "vercel/ai#14987",
        ASK,
        lambda seen: seen.message["content"],
        None,
        says=CALL,
    ),
    Case(
        "no-arguments",
        "A call without arguments has an empty object, not an empty text",
        "sigoden/aichat#1217",
        ASK,
        lambda seen: seen.message["tool_calls"][0]["function"]["arguments"],
        "{}",
        says=STOP,
    ),
    Case(
        "stream-no-arguments",
        "A streamed call without arguments has arguments",
        "simonw/llm#1164",
        STREAM,
        joined,
        {0: {}},
        says=STOP,
    ),
    Case(
        "one-call",
        "parallel_tool_calls false leaves one call",
        "sgl-project/sglang#9696",
        {**ASK, "parallel_tool_calls": False},
        lambda seen: len(seen.message["tool_calls"]),
        1,
        says=CALL + STOP,
    ),
    Case(
        "one-streamed-call",
        "parallel_tool_calls false leaves one call in a stream",
        "vllm-project/vllm#9451",
        {**STREAM, "parallel_tool_calls": False},
        named,
        [(0, "function", "weather")],
        says=CALL + STOP,
    ),
    Case(
        "two-calls",
        "Without parallel_tool_calls both calls come",
        "own: no thread found",
        ASK,
        lambda seen: [call["function"]["name"] for call in seen.message["tool_calls"]],
        ["weather", "stop"],
        says=CALL + STOP,
    ),
    Case(
        "choices-with-calls",
        "Each of several choices has calls and an end",
        "BerriAI/litellm#3276",
        {**ASK, "n": 2},
        lambda seen: [(c["index"], c["finish_reason"], len(c["message"]["tool_calls"])) for c in seen.body["choices"]],
        [(0, "tool_calls", 1), (1, "tool_calls", 1)],
        says=CALL,
    ),
    Case(
        "history-null",
        "An assistant's content may be null beside calls",
        "mistralai/mistral-common#324",
        history("{}"),
        status,
        200,
    ),
    Case(
        "history-without-content",
        "An assistant's content may be missing beside calls",
        "abetlen/llama-cpp-python#1805",
        without_content(),
        status,
        200,
    ),
    Case(
        "history-kept",
        "Such a message is shown to the model",
        "cubist38/mlx-openai-server#205",
        history('{"city": "Lyon"}'),
        lambda seen: "Lyon" in seen.prompt and "None" not in seen.prompt,
        True,
    ),
    Case(
        "history-empty-arguments",
        "Empty arguments in a history are no arguments",
        "vllm-project/vllm#19419",
        history(""),
        status,
        200,
    ),
    Case(
        "history-bad-arguments",
        "Arguments that are no JSON are named, and are no error of the server",
        "vllm-project/vllm#43995",
        history('{"city": "Ly'),
        refusal,
        refused("messages[1].tool_calls[0].function.arguments"),
    ),
    Case(
        "history-tool-parts",
        "A tool's answer may be parts",
        "own: no thread found",
        history("{}", content=None)
        | {
            "messages": [
                *history("{}")["messages"][:2],
                {"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": "rain"}]},
            ]
        },
        lambda seen: (seen.status, "rain" in seen.prompt),
        (200, True),
    ),
    Case(
        "tool-without-id",
        "A tool's answer names its call",
        "CherryHQ/cherry-studio#13206",
        {"messages": [*HELLO, {"role": "tool", "content": "a"}]},
        refusal,
        refused("messages[1].tool_call_id"),
    ),
    Case(
        "assistant-nothing",
        "An assistant without content and calls is refused",
        "InsForge/InsForge#1749",
        {"messages": [*HELLO, {"role": "assistant", "content": None}]},
        refusal,
        refused("messages[1].content"),
    ),
    Case(
        "tools-empty",
        "An empty list of tools is none",
        "evalstate/fast-agent#781",
        {"messages": HELLO, "tools": [], "max_tokens": 2},
        status,
        200,
    ),
    Case(
        "tools-null",
        "Tools and the choice among them may be null",
        "LostRuins/koboldcpp#1503",
        {"messages": HELLO, "tools": None, "tool_choice": None, "max_tokens": 2},
        status,
        200,
    ),
    Case(
        "parameters-empty",
        "A tool's parameters may be an empty object",
        "lmstudio-ai/lmstudio-bug-tracker#2254",
        function(),
        status,
        200,
    ),
    Case(
        "parameters-missing",
        "A tool may have no parameters",
        "run-llama/llama_index#18928",
        {**ASK, "tools": [TOOLS[1]], "max_tokens": 2},
        status,
        200,
    ),
    Case(
        "tools-many",
        "Seventeen and more tools are taken",
        "vllm-project/vllm#27921",
        {**ASK, "tools": [{"type": "function", "function": {"name": f"t{n}"}} for n in range(20)], "max_tokens": 2},
        status,
        200,
    ),
    Case(
        "choice-unknown",
        "A choice of a tool that was not offered is refused",
        "own: no thread found",
        {**ASK, "tool_choice": {"type": "function", "function": {"name": "fly"}}},
        refusal,
        refused("tool_choice"),
    ),
    Case(
        "choice-without-tools",
        "required without tools is refused",
        "own: no thread found",
        {"messages": HELLO, "tool_choice": "required"},
        refusal,
        refused("tool_choice"),
    ),
    Case(
        "name-unicode",
        "A name that OpenAI does not take is named",
        "own: no thread found",
        {**ASK, "tools": [{"type": "function", "function": {"name": "查天气"}}]},
        refusal,
        refused("tools[0].function.name"),
    ),
    Case(
        "choice-none",
        "With none a text that looks like a call is text",
        "vllm-project/vllm#55080",
        {**ASK, "tool_choice": "none"},
        lambda seen: (seen.message["content"], seen.choice["finish_reason"]),
        (CALL, "stop"),
        says=CALL,
    ),
]
