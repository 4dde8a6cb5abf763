"""The package `langchain-openai`, on chat completions and on Responses."""

from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, Field

from tests.interop.agents.checks import QUESTION, WEATHER, Place, require, serve


class City(BaseModel):
    name: str = Field(max_length=20)
    is_sunny: bool


@tool
def weather(city: str) -> str:
    """Tells the weather of a city."""
    return WEATHER


def _models(place: Place) -> list[ChatOpenAI]:
    options = {"model": place.model, "base_url": f"{place.url}/v1", "api_key": "none", "temperature": 0}
    return [ChatOpenAI(**options, max_tokens=120, max_retries=0, use_responses_api=flag) for flag in (False, True)]


def tools(place: Place) -> str:
    got = []
    for model in _models(place):
        forced = model.bind_tools([weather], tool_choice="required", parallel_tool_calls=False)
        history = [HumanMessage(QUESTION)]
        called = forced.invoke(history)
        require([call["name"] for call in called.tool_calls] == ["weather"], f"calls {called.tool_calls}")
        result = weather.invoke(called.tool_calls[0]["args"])
        history += [called, ToolMessage(result, tool_call_id=called.tool_calls[0]["id"])]
        answer = model.bind_tools([weather], tool_choice="none").invoke(history)
        require(answer.text and not answer.tool_calls, f"answer {answer.content!r}")
        got.append(f"{called.tool_calls[0]['args']}, {answer.text[:40]!r}")
    return "; ".join(got)


def structured(place: Place) -> str:
    got = []
    for model in _models(place):
        for method in ("json_schema", "function_calling"):
            made = model.with_structured_output(City, method=method).invoke("Lyon is sunny.")
            require(isinstance(made, City), f"{method} got {made!r}")
            got.append(repr(made))
    return "; ".join(got)


def streamed(place: Place) -> str:
    got = []
    for model in _models(place):
        pieces = [chunk.text for chunk in model.stream([HumanMessage("Tell me of Lyon.")])]
        require(len([piece for piece in pieces if piece]) > 1, f"pieces {pieces}")
        got.append(f"{len(pieces)} pieces")
    return "; ".join(got)


if __name__ == "__main__":
    serve({"bind_tools: forced call, result, answer": tools, "with_structured_output": structured, "stream": streamed})
