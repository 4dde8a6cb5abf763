"""Answers and their streams: text, ends, usage, log-probabilities; the Responses and Messages APIs."""

from __future__ import annotations

from typing import Any

from tests.router.openai.public_cases.case import HELLO, TEXT, Case, Seen

CHATTED: dict[str, Any] = {"messages": HELLO, "max_tokens": 4}
STREAM: dict[str, Any] = {**CHATTED, "stream": True}
COUNTED: dict[str, Any] = {**STREAM, "stream_options": {"include_usage": True}}
SPOKEN: dict[str, Any] = {"messages": HELLO}
LIKELY: dict[str, Any] = {**SPOKEN, "logprobs": True, "top_logprobs": 2}
MESSAGE: Any = {"messages": HELLO, "stream": True}


def kinds(seen: Seen) -> list[str]:
    """The types of events, each once in a row."""
    found: list[str] = []
    for event in seen.events:
        found += [event["type"]] if event["type"] not in found[-1:] else []
    return found


def text(seen: Seen) -> str:
    return "".join(piece["delta"].get("content") or "" for piece in seen.pieces)


def own_bytes(seen: Seen) -> list[Any]:
    return [entry["bytes"] for entry in seen.choice["logprobs"]["content"]]


CASES = [
    Case(
        "usage-chunk",
        "Usage comes last, in a chunk without choices",
        "ggml-org/llama.cpp#15444",
        COUNTED,
        lambda seen: (seen.events[-1]["choices"], seen.events[-1]["usage"]["completion_tokens"]),
        ([], 4),
    ),
    Case(
        "usage-null",
        "Before it, usage is null in all chunks",
        "huggingface/text-generation-inference#3003",
        COUNTED,
        lambda seen: {event["usage"] for event in seen.events[:-1]},
        {None},
    ),
    Case(
        "usage-unasked",
        "Without being asked for it does not come",
        "Arthur-Ficial/apfel#100",
        STREAM,
        lambda seen: [event for event in seen.events if event.get("usage") or not event["choices"]],
        [],
    ),
    Case(
        "usage-text",
        "Completions have the chunk of usage too",
        "ogx-ai/ogx#6541",
        {"prompt": "abc", "max_tokens": 3, "stream": True, "stream_options": {"include_usage": True}},
        lambda seen: (seen.events[-1]["choices"], seen.events[-1]["usage"]["total_tokens"]),
        ([], 6),
        path=TEXT,
    ),
    Case(
        "usage-sums",
        "The total is the sum",
        "openvinotoolkit/model_server#2640",
        CHATTED,
        lambda seen: seen.body["usage"]["total_tokens"] - seen.body["usage"]["prompt_tokens"],
        4,
    ),
    Case("done", "A stream ends with [DONE]", "own: no thread found", STREAM, lambda seen: seen.lines[-1], "[DONE]"),
    Case(
        "finish-null",
        "Chunks before the last have finish_reason null",
        "vllm-project/vllm#19662",
        STREAM,
        lambda seen: [piece["finish_reason"] for piece in seen.pieces[:-1] if piece["finish_reason"] is not None],
        [],
    ),
    Case(
        "finish-length",
        "The last chunk says length where max_tokens ended it",
        "ModelTC/LightLLM#130",
        STREAM,
        lambda seen: seen.pieces[-1]["finish_reason"],
        "length",
    ),
    Case(
        "finish-stop",
        "A whole answer says stop where the model ended it",
        "mudler/LocalAI#788",
        SPOKEN,
        lambda seen: (seen.choice["finish_reason"], seen.message["content"]),
        ("stop", "It is sunny."),
        says="It is sunny.",
    ),
    Case(
        "finish-with-logprobs",
        "Log-probabilities do not take the end from a stream",
        "BerriAI/litellm#10686",
        {**STREAM, "logprobs": True},
        lambda seen: seen.pieces[-1]["finish_reason"],
        "length",
    ),
    Case(
        "role-once",
        "Only the first chunk has the role",
        "ollama/ollama#4357",
        STREAM,
        lambda seen: (
            [piece["delta"].get("role") for piece in seen.pieces].index("assistant") == 0
            and not any(piece["delta"].get("role") for piece in seen.pieces[1:])
        ),
        True,
    ),
    Case(
        "index-of-choice",
        "index counts choices, not tokens",
        "huggingface/text-generation-inference#1648",
        STREAM,
        lambda seen: {piece["index"] for piece in seen.pieces},
        {0},
    ),
    Case(
        "choices-streamed",
        "Several streamed choices have an index and an end each",
        "BerriAI/litellm#3276",
        {**STREAM, "n": 3},
        lambda seen: sorted((p["index"], p["finish_reason"]) for p in seen.pieces if p["finish_reason"]),
        [(0, "length"), (1, "length"), (2, "length")],
    ),
    Case(
        "id-stable",
        "All chunks of a stream have one id, object and time",
        "own: no thread found",
        COUNTED,
        lambda seen: len({(event["id"], event["object"], event["created"]) for event in seen.events}),
        1,
    ),
    Case(
        "chunk-object",
        "The object of a chunk is chat.completion.chunk",
        "ml-explore/mlx-examples#913",
        STREAM,
        lambda seen: {event["object"] for event in seen.events},
        {"chat.completion.chunk"},
    ),
    Case(
        "stop-across-tokens",
        "A stop string across tokens ends a stream, and none of it is sent",
        "mzau/mlx-knife#68",
        {**SPOKEN, "stream": True, "stop": ["beta gamma"]},
        lambda seen: (text(seen), seen.pieces[-1]["finish_reason"]),
        ("alpha ", "stop"),
        says="alpha beta gamma delta",
    ),
    Case(
        "stop-text",
        "stop may be a text",
        "raullenchai/Rapid-MLX#2358",
        {**SPOKEN, "stop": "STOP"},
        lambda seen: seen.message["content"],
        "alpha ",
        says="alpha STOP omega",
    ),
    Case(
        "stop-list",
        "Completions take a list of stop strings",
        "ollama/ollama#5545",
        {"prompt": "a", "stop": ["User:", "Bot:"]},
        lambda seen: seen.choice["text"],
        "Yes. ",
        path=TEXT,
        says="Yes. Bot: no",
    ),
    Case(
        "stop-begun",
        "What only begins like a stop string is sent at the end",
        "ggml-org/llama.cpp#9867",
        {**SPOKEN, "stream": True, "stop": ["sky?!"]},
        text,
        "the sky?",
        says="the sky?",
    ),
    Case(
        "stop-shown",
        "An end mark is not part of the text",
        "own: no thread found",
        {**SPOKEN, "stop": []},
        lambda seen: seen.message["content"],
        "Hi!",
        says="Hi!",
    ),
    Case(
        "unicode-stream",
        "A character of several tokens comes whole in a stream",
        "vllm-project/vllm#34875",
        {**SPOKEN, "stream": True},
        lambda seen: (text(seen), "\ufffd" in seen.text),
        ("日本 🙂", False),
        says="日本 🙂",
    ),
    Case(
        "bytes-partial",
        "Each token of a character has its own bytes",
        "ollama/ollama#13497",
        LIKELY,
        lambda seen: [b for each in own_bytes(seen)[:6] for b in each],
        list("é🙂".encode()),
        says="é🙂",
    ),
    Case(
        "bytes-replacement",
        "No token has the bytes of U+FFFD",
        "standardcompletions/rfcs#2",
        LIKELY,
        lambda seen: [239, 191, 189] in own_bytes(seen),
        False,
        says="é🙂",
    ),
    Case(
        "alternatives",
        "As many alternatives as asked for, with different keys",
        "own: shared cases, alternatives that read alike",
        {"prompt": "a", "logprobs": 5},
        lambda seen: {len(top) for top in seen.choice["logprobs"]["top_logprobs"][:6]},
        {5},
        path=TEXT,
        says="é🙂",
    ),
    Case(
        "max-completion-tokens",
        "max_completion_tokens limits the output",
        "ScalingIntelligence/tokasaurus#7",
        {"messages": HELLO, "max_completion_tokens": 3},
        lambda seen: seen.body["usage"]["completion_tokens"],
        3,
    ),
    Case(
        "both-limits",
        "Both names of the limit may come together",
        "HKUDS/nanobot#2468",
        {**CHATTED, "max_completion_tokens": 4},
        lambda seen: (seen.status, seen.body["usage"]["completion_tokens"]),
        (200, 4),
    ),
    Case(
        "developer",
        "A developer's message is one of the system",
        "peonist-ai/halogen-flash-server#32",
        {"messages": [{"role": "developer", "content": "Be brief."}, *HELLO], "max_tokens": 2},
        lambda seen: "<|im_start|>system\nBe brief." in seen.prompt,
        True,
    ),
    Case(
        "parts-of-system",
        "Messages of all roles may be parts",
        "sgl-project/sglang#37845",
        {
            "messages": [
                {"role": role, "content": [{"type": "text", "text": role[:2]}, {"type": "text", "text": "two"}]}
                for role in ("system", "user", "assistant", "user")
            ],
            "max_tokens": 2,
        },
        lambda seen: (seen.status, seen.prompt.count("two")),
        (200, 4),
    ),
    Case(
        "id-header",
        "A client's id of a request comes back",
        "own: clients match answers by it",
        CHATTED,
        lambda seen: (seen.headers["x-request-id"], seen.body["id"]),
        ("mine-7", "chatcmpl-mine-7"),
        headers={"X-Request-Id": "mine-7"},
    ),
    Case(
        "responses-first",
        "The first event of a response is response.created",
        "BerriAI/litellm#9545",
        {"input": "hello", "stream": True},
        lambda seen: kinds(seen)[:2],
        ["response.created", "response.in_progress"],
        path="/v1/responses",
        says="Yes.",
    ),
    Case(
        "responses-numbers",
        "Events are numbered without gaps",
        "ggml-org/llama.cpp#24957",
        {"input": "hello", "stream": True},
        lambda seen: [event["sequence_number"] for event in seen.events] == list(range(len(seen.events))) != [],
        True,
        path="/v1/responses",
        says="Yes.",
    ),
    Case(
        "responses-last",
        "The last event has the whole response",
        "onyx-dot-app/onyx#13624",
        {"input": "hello", "stream": True},
        lambda seen: (seen.events[-1]["type"], seen.events[-1]["response"]["output"][0]["content"][0]["text"]),
        ("response.completed", "Yes."),
        path="/v1/responses",
        says="Yes.",
    ),
    Case(
        "messages-order",
        "Events of a message come in Anthropic's order",
        "BerriAI/litellm#5011",
        MESSAGE,
        kinds,
        ["message_start", "content_block_start", "content_block_delta", "content_block_stop", "message_delta", "message_stop"],
        path="/v1/messages",
        says="Yes.",
    ),
    Case(
        "messages-tool",
        "A streamed tool_use block has its input",
        "BerriAI/litellm#25561",
        {**MESSAGE, "tools": [{"name": "stop", "input_schema": {"type": "object"}}]},
        lambda seen: "".join(e["delta"].get("partial_json", "") for e in seen.events if "delta" in e),
        "{}",
        path="/v1/messages",
        says='<tool_call>\n{"name": "stop", "arguments": {}}\n</tool_call>',
    ),
]
