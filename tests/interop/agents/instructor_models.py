"""The package `instructor`."""

import instructor
import openai
from pydantic import BaseModel, Field

from tests.interop.agents.checks import Place, require, serve


class City(BaseModel):
    name: str = Field(max_length=20)
    is_sunny: bool


def _made(place: Place, mode: instructor.Mode) -> str:
    client = instructor.from_openai(openai.OpenAI(base_url=f"{place.url}/v1", api_key="none", max_retries=0), mode=mode)
    messages = [{"role": "user", "content": "Lyon is sunny."}]
    city = client.chat.completions.create(
        model=place.model, response_model=City, messages=messages, temperature=0, max_tokens=150, max_retries=0
    )
    require(isinstance(city, City), f"got {city!r}")
    return repr(city)


def by_tool(place: Place) -> str:
    return _made(place, instructor.Mode.TOOLS)


def by_schema(place: Place) -> str:
    return _made(place, instructor.Mode.JSON_SCHEMA)


if __name__ == "__main__":
    serve({"a pydantic model, mode TOOLS": by_tool, "a pydantic model, mode JSON_SCHEMA": by_schema})
