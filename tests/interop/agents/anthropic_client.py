"""Anthropic's own package."""

import anthropic

from tests.interop.agents.checks import CITY_SCHEMA, QUESTION, WEATHER, Place, require, serve

_TOOLS = [{"name": "weather", "description": "Weather of a city.", "input_schema": CITY_SCHEMA}]


def _messages(place: Place) -> "anthropic.resources.Messages":
    return anthropic.Anthropic(base_url=place.url, api_key="none", max_retries=0).messages


def tools(place: Place) -> str:
    options = {"model": place.model, "max_tokens": 120, "tools": _TOOLS}
    history: list = [{"role": "user", "content": QUESTION}]
    choice = {"type": "any", "disable_parallel_tool_use": True}
    called = _messages(place).create(messages=history, tool_choice=choice, **options)
    uses = [block for block in called.content if block.type == "tool_use"]
    require(called.stop_reason == "tool_use" and len(uses) == 1, f"{called.stop_reason}, {called.content}")
    result = {"type": "tool_result", "tool_use_id": uses[0].id, "content": WEATHER}
    history += [{"role": "assistant", "content": called.content}, {"role": "user", "content": [result]}]
    answer = _messages(place).create(messages=history, tool_choice={"type": "none"}, **options)
    require(answer.content and answer.content[0].type == "text", f"answer {answer.content}")
    return f"{uses[0].input}, {answer.content[0].text!r}"


def streamed(place: Place) -> str:
    history = [{"role": "user", "content": QUESTION}]
    with _messages(place).stream(model=place.model, max_tokens=40, messages=history) as stream:
        pieces = list(stream.text_stream)
        final = stream.get_final_message()
    require(len(pieces) > 1 and final.content[0].text == "".join(pieces), f"{pieces}, {final}")
    return f"{len(pieces)} pieces, {final.usage.output_tokens} tokens"


def counted(place: Place) -> str:
    history = [{"role": "user", "content": QUESTION}]
    counted = _messages(place).count_tokens(model=place.model, messages=history).input_tokens
    usage = _messages(place).create(model=place.model, messages=history, max_tokens=1).usage
    used = usage.input_tokens + (usage.cache_read_input_tokens or 0)
    require(counted == used, f"{counted} counted, {used} used")
    return f"{counted} tokens"


if __name__ == "__main__":
    serve({"messages: any tool, its result, text": tools, "stream()": streamed, "count_tokens(): as many as used": counted})
