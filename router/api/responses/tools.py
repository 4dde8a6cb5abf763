"""Tools of the Responses API: offered, chosen. Tools that OpenAI runs itself are refused by name, or left out where functions
remain that the model can call instead.

A namespace groups functions: Codex offers those of a group of its own and of each MCP server that way. A chat template knows
functions alone, so each of them gets the name NAMESPACE__NAME there; its calls name both again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import ConfigDict, Field, Tag

from pdmesh.text import exact_json
from pdmesh.v1 import mesh_pb2
from router.api.http.fields import JsonObject, shown
from router.api.http.types import Body, Ignored, Refused, Text, Unsupported
from router.api.responses.items import model_name, tagged
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


class HostedTool(Body):
    """A tool that OpenAI runs, and that agents offer beside their own without being asked."""

    model_config = ConfigDict(extra="ignore")
    type: Literal["web_search", "web_search_preview", "image_generation"]


class OtherTool(Body):
    """A tool of any other type, which is refused."""

    model_config = ConfigDict(extra="ignore")
    type: Annotated[Any, Refused(_no_such_tool)]


Member = Annotated[Annotated[FunctionTool, Tag("<function>")] | Annotated[OtherTool, Tag("<other>")], tagged(("function",))]


class NamespaceTool(Body):
    """Functions that share a namespace."""

    type: Literal["namespace"]
    name: Annotated[Text, Field(min_length=1)]
    description: Text = ""
    tools: list[Member]

    def shown(self) -> JsonObject:
        """Return the namespace as responses repeat it."""
        members = [tool.shown() for tool in self.tools if isinstance(tool, FunctionTool)]
        return {"type": self.type, "name": self.name, "description": self.description, "tools": members}


HOSTED = ("web_search", "web_search_preview", "image_generation")
Tool = Annotated[
    Annotated[FunctionTool, Tag("<function>")]
    | Annotated[NamespaceTool, Tag("<namespace>")]
    | Annotated[HostedTool, Tag("<web_search>")]
    | Annotated[HostedTool, Tag("<web_search_preview>")]
    | Annotated[HostedTool, Tag("<image_generation>")]
    | Annotated[OtherTool, Tag("<other>")],
    tagged(("function", "namespace", *HOSTED)),
]
"""Any entry of `tools`."""


class NamedTool(Body):
    """The name of a function."""

    type: Literal["function"]
    name: Text
    namespace: Text | None = None


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


class Offered(NamedTuple):
    """A function, where the client wrote it, and the namespace that it is in."""

    function: FunctionTool
    path: str
    namespace: NamespaceTool | None = None

    @property
    def model_name(self) -> str:
        """Return the name by which the model knows the function."""
        return model_name(self.function.name, None if self.namespace is None else self.namespace.name)

    @property
    def description(self) -> str:
        """Return what the model reads of the function; the first of a namespace also tells of the namespace."""
        own = self.function.description or ""
        is_first = self.namespace is not None and self.namespace.tools[0] is self.function
        return "\n\n".join(filter(None, (self.namespace.description, own))) if is_first and self.namespace else own


AnyTool = FunctionTool | NamespaceTool | HostedTool | OtherTool


def functions_of(tools: Sequence[AnyTool]) -> Iterator[Offered]:
    """Yield all functions, those of namespaces too."""
    for number, tool in enumerate(tools):
        if isinstance(tool, FunctionTool):
            yield Offered(tool, f"tools[{number}]")
        elif isinstance(tool, NamespaceTool):
            for at, member in enumerate(tool.tools):
                assert isinstance(member, FunctionTool)  # others were refused
                yield Offered(member, f"tools[{number}].tools[{at}]", tool)


def offer(request: mesh_pb2.ChatRequest, tools: Sequence[AnyTool]) -> dict[str, str]:
    """Add tools to a request; return the client's name of each. Raises InvalidArgument that names the field."""
    names: dict[str, str] = {}
    known: set[str] = set()
    for number, offered in enumerate(functions_of(tools)):
        path, function = offered.path, offered.function
        if offered.namespace is not None and offered.model_name in known:
            refuse(f"{path}.name", f"the model knows it as {shown(offered.model_name)}, which another tool is called, too")
        known.add(offered.model_name)
        parameters = "" if function.parameters is None else dumped(f"{path}.parameters", function.parameters)
        request.tools.add(
            name=offered.model_name, description=offered.description, parameters=parameters, strict=bool(function.strict)
        )
        names[f"tools[{number}]"] = path
    _refuse_hosted_alone(tools, known)
    return names


def _refuse_hosted_alone(tools: Sequence[AnyTool], known: set[str]) -> None:
    for number, tool in enumerate(tools):
        if isinstance(tool, HostedTool) and not known:
            refuse(f"tools[{number}].type", f"{shown(tool.type)} is not run here, and there is no function beside it")


def left_out(tools: Sequence[AnyTool]) -> list[str]:
    """Return warnings of tools that the model was not offered."""
    hosted = ((number, tool.type) for number, tool in enumerate(tools) if isinstance(tool, HostedTool))
    return [f"tools[{number}]: {shown(kind)} is not run here and was left out" for number, kind in hosted]


def namespaces_of(tools: Sequence[AnyTool]) -> Mapping[str, tuple[str, str]]:
    """Return namespace and name of each function in a namespace, by the name by which the model knows it."""
    return {
        offered.model_name: (offered.namespace.name, offered.function.name)
        for offered in functions_of(tools)
        if offered.namespace is not None
    }


def choose(request: mesh_pb2.ChatRequest, choice: str | ChosenFunction | AllowedTools | OtherChoice) -> None:
    """Set which of its tools a request may call."""
    if isinstance(choice, str):
        request.tool_choice = _MODES[choice]
    elif isinstance(choice, ChosenFunction):
        request.tool_choice = mesh_pb2.TOOL_CHOICE_REQUIRED
        request.tool_names.append(model_name(choice.name, choice.namespace))
    elif isinstance(choice, AllowedTools):
        request.tool_choice = _MODES[choice.mode]
        request.tool_names.extend(model_name(tool.name, tool.namespace) for tool in choice.tools)


def dumped(param: str, value: object) -> str:
    """Return JSON text. Raises InvalidArgument."""
    try:
        text = exact_json.dumps(value, ensure_ascii=False, allow_nan=False)
        text.encode()
    except (ValueError, RecursionError):
        refuse(param, "is not valid Unicode, not a JSON number, or nested too deeply")
    return text
