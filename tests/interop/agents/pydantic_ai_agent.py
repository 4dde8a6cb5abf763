"""The package `pydantic-ai-slim[openai]`, on chat completions and on Responses."""

from pydantic import BaseModel, Field
from pydantic_ai import Agent, NativeOutput
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

from tests.interop.agents.checks import WEATHER, Place, require, serve

_SETTINGS = {"temperature": 0.0, "max_tokens": 200, "parallel_tool_calls": False}


class City(BaseModel):
    name: str = Field(max_length=20)
    is_sunny: bool


def _models(place: Place) -> list:
    provider = OpenAIProvider(base_url=f"{place.url}/v1", api_key="none")
    return [kind(place.model, provider=provider) for kind in (OpenAIChatModel, OpenAIResponsesModel)]


async def output_by_tool(place: Place) -> str:
    got = []
    for model in _models(place):
        done = await Agent(model, output_type=City, model_settings=_SETTINGS).run("Lyon is sunny.")
        require(isinstance(done.output, City), f"got {done.output!r}")
        got.append(repr(done.output))
    return "; ".join(got)


async def output_by_schema(place: Place) -> str:
    settings = {"temperature": 0.0, "max_tokens": 200}
    got = []
    for model in _models(place):
        agent = Agent(model, output_type=NativeOutput(City), model_settings=settings)
        done = await agent.run("Lyon is sunny.")
        again = await agent.run("And Paris?", message_history=done.all_messages())
        require(isinstance(again.output, City), f"got {again.output!r}")
        got.append(repr(again.output))
    return "; ".join(got)


async def tool_then_output(place: Place) -> str:
    """Output tools make the choice "required": the model takes the function or ends with the output."""
    got = []
    for model in _models(place):
        calls: list[str] = []
        agent = Agent(model, output_type=City, model_settings=_SETTINGS)

        def weather(city: str, calls: list[str] = calls) -> str:
            calls.append(city)
            return WEATHER

        agent.tool_plain(lambda city: weather(city), name="weather", description="Tells the weather of a city.")
        done = await agent.run("Lyon is sunny. Give the final result.")
        require(isinstance(done.output, City), f"got {done.output!r}")
        got.append(f"{done.output!r} after {len(calls)} calls of the tool")
    return "; ".join(got)


if __name__ == "__main__":
    serve(
        {
            "an output type, as a call of its tool": output_by_tool,
            "an output type by schema, and another turn": output_by_schema,
            "a tool beside the output's": tool_then_output,
        }
    )
