"""The package `llama-index-llms-openai-like`."""

from llama_index.core.llms import ChatMessage
from llama_index.core.prompts import PromptTemplate
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel, Field

from tests.interop.agents.checks import QUESTION, WEATHER, Place, require, serve


class City(BaseModel):
    """A city."""

    name: str = Field(max_length=20)
    is_sunny: bool


def weather(city: str) -> str:
    """Tells the weather of a city."""
    return WEATHER


def _llm(place: Place) -> OpenAILike:
    return OpenAILike(
        model=place.model,
        api_base=f"{place.url}/v1",
        api_key="none",
        is_chat_model=True,
        is_function_calling_model=True,
        context_window=2048,
        temperature=0,
        max_tokens=120,
        max_retries=0,
    )


def tools(place: Place) -> str:
    llm = _llm(place)
    tool = FunctionTool.from_defaults(weather)
    history = [ChatMessage(role="user", content=QUESTION)]
    called = llm.chat_with_tools([tool], chat_history=history, tool_required=True)
    calls = llm.get_tool_calls_from_response(called)
    require(calls and calls[0].tool_name == "weather", f"calls {calls}")
    results = [ChatMessage(role="tool", content=WEATHER, additional_kwargs={"tool_call_id": call.tool_id}) for call in calls]
    answer = llm.chat([*history, called.message, *results])
    require(answer.message.content, f"answer {answer}")
    return f"{calls[0].tool_kwargs}, {answer.message.content!r}"


def structured(place: Place) -> str:
    city = _llm(place).structured_predict(City, PromptTemplate("Lyon is sunny."))
    require(isinstance(city, City), f"got {city!r}")
    return repr(city)


def streamed(place: Place) -> str:
    pieces = [piece.delta for piece in _llm(place).stream_chat([ChatMessage(role="user", content=QUESTION)])]
    require(len([piece for piece in pieces if piece]) > 1, f"pieces {pieces}")
    return f"{len(pieces)} pieces"


if __name__ == "__main__":
    serve({"chat_with_tools: forced call, result, answer": tools, "structured_predict": structured, "stream_chat": streamed})
