"""The package `openai-agents`, on Responses."""

import agents
import openai
from pydantic import BaseModel, Field

from tests.interop.agents.checks import QUESTION, WEATHER, Place, require, serve


class City(BaseModel):
    name: str = Field(max_length=20)
    is_sunny: bool


def _model(place: Place) -> agents.OpenAIResponsesModel:
    agents.set_tracing_disabled(True)
    client = openai.AsyncOpenAI(base_url=f"{place.url}/v1", api_key="none", max_retries=0)
    return agents.OpenAIResponsesModel(model=place.model, openai_client=client)


def _agent(place: Place, calls: list[str]) -> agents.Agent:
    def weather(city: str) -> str:
        """Tells the weather of a city."""
        calls.append(city)
        return WEATHER

    settings = agents.ModelSettings(tool_choice="required", temperature=0, max_tokens=120, parallel_tool_calls=False)
    tools = [agents.function_tool(weather)]
    return agents.Agent(name="A", instructions="Be brief.", model=_model(place), tools=tools, model_settings=settings)


async def two_steps(place: Place) -> str:
    calls: list[str] = []
    done = await agents.Runner.run(_agent(place, calls), QUESTION)
    kinds = [type(item).__name__ for item in done.new_items]
    require(len(calls) == 1 and len(done.raw_responses) == 2, f"called {calls} in {len(done.raw_responses)} steps")
    require(kinds[:2] == ["ToolCallItem", "ToolCallOutputItem"] and done.final_output, f"items {kinds}")
    return f"{kinds}, called with {calls[0]!r}, answer {done.final_output!r}"


async def streamed_then_continued(place: Place) -> str:
    calls: list[str] = []
    agent = _agent(place, calls)
    run = agents.Runner.run_streamed(agent, QUESTION)
    num_events = len([event async for event in run.stream_events()])
    done = await agents.Runner.run(agent, [*run.to_input_list(), {"role": "user", "content": "And in Rome?"}])
    require(len(calls) == 2 and num_events > 2 and done.final_output, f"called {calls}, {num_events} events")
    return f"{num_events} events, calls {calls}"


async def typed(place: Place) -> str:
    settings = agents.ModelSettings(temperature=0, max_tokens=200)
    agent = agents.Agent(name="B", model=_model(place), output_type=City, model_settings=settings)
    done = await agents.Runner.run(agent, "Lyon is sunny.")
    require(isinstance(done.final_output, City), f"got {done.final_output!r}")
    return repr(done.final_output)


if __name__ == "__main__":
    serve(
        {
            "a loop of two steps: a tool that must be called, then the answer": two_steps,
            "the same streamed, then another turn with its items": streamed_then_continued,
            "an answer of a pydantic type": typed,
        }
    )
