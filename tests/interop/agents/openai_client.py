"""OpenAI's own package: chat completions and Responses."""

import openai
from pydantic import BaseModel, Field

from tests.interop.agents.checks import CITY_SCHEMA, QUESTION, WEATHER, Place, require, serve

_FUNCTION = {"name": "weather", "description": "Weather of a city.", "parameters": CITY_SCHEMA, "strict": True}


class City(BaseModel):
    name: str = Field(max_length=20)
    is_sunny: bool


def _client(place: Place) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{place.url}/v1", api_key="none", max_retries=0)


def chat_tools(place: Place) -> str:
    create, tools = _client(place).chat.completions.create, [{"type": "function", "function": _FUNCTION}]
    messages: list = [{"role": "user", "content": QUESTION}]
    options = {"model": place.model, "tools": tools, "temperature": 0, "max_tokens": 120}
    called = create(messages=messages, tool_choice="required", parallel_tool_calls=False, **options).choices[0].message
    require(called.tool_calls and called.tool_calls[0].function.name == "weather", f"calls {called.tool_calls}")
    messages += [called, {"role": "tool", "tool_call_id": called.tool_calls[0].id, "content": WEATHER}]
    answer = create(messages=messages, tool_choice="none", **options).choices[0].message.content
    require(answer, "no answer")
    return f"{called.tool_calls[0].function.arguments}, {answer!r}"


def chat_stream(place: Place) -> str:
    messages = [{"role": "user", "content": QUESTION}]
    # With a schema the answer ends by itself: the helper raises for one that max_tokens cuts off.
    options = {"model": place.model, "response_format": City, "max_tokens": 150}
    with _client(place).chat.completions.stream(messages=messages, **options) as stream:
        num_events = sum(1 for _ in stream)
        text = stream.get_final_completion().choices[0].message.content
    require(text and num_events > 2, f"{num_events} events")
    return f"{num_events} events, {text!r}"


def chat_parse(place: Place) -> str:
    messages = [{"role": "user", "content": "Lyon is sunny."}]
    done = _client(place).chat.completions.parse(model=place.model, messages=messages, response_format=City, max_tokens=150)
    require(isinstance(done.choices[0].message.parsed, City), f"got {done.choices[0].message}")
    return repr(done.choices[0].message.parsed)


def responses_tools(place: Place) -> str:
    create, tools = _client(place).responses.create, [{"type": "function", **_FUNCTION}]
    options = {"model": place.model, "tools": tools, "temperature": 0, "max_output_tokens": 120, "store": False}
    items: list = [{"role": "user", "content": QUESTION}]
    called = create(input=items, tool_choice="required", parallel_tool_calls=False, **options).output
    require([item.type for item in called] == ["function_call"], f"items {called}")
    items += [*called, {"type": "function_call_output", "call_id": called[0].call_id, "output": WEATHER}]
    answer = create(input=items, tool_choice="none", **options).output_text
    require(answer, "no answer")
    return f"{called[0].arguments}, {answer!r}"


def responses_stream_and_parse(place: Place) -> str:
    options = {"model": place.model, "input": "Lyon is sunny.", "text_format": City, "max_output_tokens": 150}
    parsed = _client(place).responses.parse(**options).output_parsed
    with _client(place).responses.stream(**options) as stream:
        num_events = sum(1 for _ in stream)
        streamed = stream.get_final_response().output_parsed
    require(isinstance(parsed, City) and isinstance(streamed, City), f"got {parsed!r} and {streamed!r}")
    return f"{parsed!r}; {num_events} events"


if __name__ == "__main__":
    serve(
        {
            "chat: forced call, result, answer": chat_tools,
            "chat: stream()": chat_stream,
            "chat: parse() with pydantic": chat_parse,
            "responses: forced call, result, answer": responses_tools,
            "responses: parse() and stream() with pydantic": responses_stream_and_parse,
        }
    )
