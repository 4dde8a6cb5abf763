"""Tools of the Responses API: offered, chosen. Tools that OpenAI runs itself are refused by name."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, Tag

from pdmesh.v1 import mesh_pb2
from router.api.http.fields import JsonObject, shown
from router.api.http.types import Body, Ignored, Refused, Text, Unsupported
from router.api.responses.items import tagged
from router.api.validation import refuse


def _no_such_tool(value: object) -> object:
    raise ValueError(
        f'{shown(value)} is not run here; offer it as a tool of the type "function", which your program or its agent calls'
    )


class FunctionTool(Body):
    """A function that the client runs."""

    type: Literal["function"]
    name: Text
    description: Text | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    output_schema: Ignored = None
    allowed_callers: Ignored = None
    defer_loading: Annotated[Any, Unsupported(False)] = None
    run_async: Annotated[Any, Unsupported(False)] = Field(None, alias="async")

    def shown(self) -> JsonObject:
        """Return the tool as responses repeat it."""
        return {
            "type": "function",
            "name": self.name,
            "description": self.description,
            "parameters": self.parameters,
            "strict": self.strict,
        }


class OtherTool(Body):
    """A tool that OpenAI's own servers run."""

    model_config = ConfigDict(extra="ignore")
    type: Annotated[Any, Refused(_no_such_tool)]


Tool = Annotated[Annotated[FunctionTool, Tag("<function>")] | Annotated[OtherTool, Tag("<other>")], tagged(("function",))]
"""Any entry of `tools`."""


class NamedTool(Body):
    """The name of a function."""

    type: Literal["function"]
    name: Text


class ChosenFunction(NamedTool):
    """`tool_choice`: one call of this function."""


class AllowedTools(Body):
    """`tool_choice`: some of the tools."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: list[NamedTool]


class OtherChoice(Body):
    """`tool_choice`: a tool that OpenAI's own servers run."""

    model_config = ConfigDict(extra="ignore")
    type: Annotated[Any, Refused(_no_such_tool)]


Chosen = Annotated[
    Annotated[ChosenFunction, Tag("<function>")]
    | Annotated[AllowedTools, Tag("<allowed_tools>")]
    | Annotated[OtherChoice, Tag("<other>")],
    tagged(("function", "allowed_tools")),
]
ToolChoice = Literal["auto", "none", "required"] | Chosen
"""Any value of `tool_choice`."""

_MODES = {
    "auto": mesh_pb2.TOOL_CHOICE_AUTO,
    "none": mesh_pb2.TOOL_CHOICE_NONE,
    "required": mesh_pb2.TOOL_CHOICE_REQUIRED,
}


def offer(request: mesh_pb2.ChatRequest, tools: list[FunctionTool | OtherTool]) -> None:
    """Add tools to a request. Raises InvalidArgument that names the field."""
    for number, tool in enumerate(tools):
        assert isinstance(tool, FunctionTool)  # others were refused
        request.tools.add(
            name=tool.name,
            description=tool.description or "",
            parameters="" if tool.parameters is None else dumped(f"tools[{number}].parameters", tool.parameters),
            strict=bool(tool.strict),
        )


def choose(request: mesh_pb2.ChatRequest, choice: str | ChosenFunction | AllowedTools | OtherChoice) -> None:
    """Set which of its tools a request may call."""
    if isinstance(choice, str):
        request.tool_choice = _MODES[choice]
    elif isinstance(choice, ChosenFunction):
        request.tool_choice = mesh_pb2.TOOL_CHOICE_REQUIRED
        request.tool_names.append(choice.name)
    elif isinstance(choice, AllowedTools):
        request.tool_choice = _MODES[choice.mode]
        request.tool_names.extend(tool.name for tool in choice.tools)


def dumped(param: str, value: object) -> str:
    """Return JSON text. Raises InvalidArgument."""
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
        text.encode()
    except (ValueError, RecursionError):
        refuse(param, "is not valid Unicode, not a JSON number, or nested too deeply")
    return text
