"""The package `litellm`."""

import litellm

from tests.interop.agents.checks import CITY_SCHEMA, QUESTION, WEATHER, Place, require, serve

_TOOLS = [{"type": "function", "function": {"name": "weather", "description": "Weather.", "parameters": CITY_SCHEMA}}]


def _options(place: Place) -> dict:
    return {
        "model": f"openai/{place.model}",
        "api_base": f"{place.url}/v1",
        "api_key": "none",
        "temperature": 0,
        "max_tokens": 120,
    }


def tools(place: Place) -> str:
    messages = [{"role": "user", "content": QUESTION}]
    called = litellm.completion(messages=messages, tools=_TOOLS, tool_choice="required", **_options(place)).choices[0].message
    require(called.tool_calls and called.tool_calls[0].function.name == "weather", f"calls {called.tool_calls}")
    results = [{"role": "tool", "tool_call_id": call.id, "content": WEATHER} for call in called.tool_calls]
    messages += [called.model_dump(exclude_none=True), *results]
    answer = litellm.completion(messages=messages, tools=_TOOLS, tool_choice="none", **_options(place)).choices[0].message
    require(answer.content, f"answer {answer}")
    return f"{called.tool_calls[0].function.arguments}, {answer.content!r}"


def streamed(place: Place) -> str:
    chunks = list(litellm.completion(messages=[{"role": "user", "content": QUESTION}], stream=True, **_options(place)))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    require(text and len(chunks) > 2, f"{len(chunks)} chunks")
    return f"{len(chunks)} chunks, {text!r}"


def responses(place: Place) -> str:
    options = _options(place)
    options["max_output_tokens"] = options.pop("max_tokens")
    types = [str(getattr(event.type, "value", event.type)) for event in litellm.responses(input=QUESTION, stream=True, **options)]
    require(types[-1] in ("response.completed", "response.incomplete"), f"ends with {types[-1]}")
    return f"{len(types)} events, the last {types[-1]}"


if __name__ == "__main__":
    serve({"tools: forced call, result, answer": tools, "stream": streamed, "responses, streamed": responses})
