"""Bodies of Anthropic's requests as types: what a client may send to `/v1/messages` and `/v1/messages/count_tokens`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, ConfigDict, Discriminator, Field, Tag

from router.api.http.fields import MAX_UINT32, shown
from router.api.http.sessions import CacheControl, SessionBody
from router.api.http.types import Body, Ignored, Refused, Text, unsupported


def _filled(text: str) -> str:
    if not text:
        raise ValueError("is empty")
    return text


Name = Annotated[Text, AfterValidator(_filled)]
"""Type of a string that is not empty."""

# Content blocks. Each union ends with a type for all other kinds, whose error names the kind.

_BLOCKS = ("text", "tool_use", "tool_result", "thinking", "redacted_thinking")


class TextBlock(Body):
    """Text, of any role."""

    type: Literal["text"]
    text: Text
    cache_control: CacheControl | None = None
    citations: Ignored = None


class ToolUseBlock(Body):
    """A call that the assistant made."""

    type: Literal["tool_use"]
    id: Name
    name: Name
    input: dict[str, Any]
    cache_control: CacheControl | None = None
    caller: Ignored = None
    toolset_name: unsupported() = None  # type: ignore[valid-type]


class ThinkingBlock(Body):
    """What the assistant thought in an earlier turn. Signatures are not made here, so none is checked."""

    type: Literal["thinking"]
    thinking: Text
    signature: Ignored = None


class RedactedThinkingBlock(Body):
    """Thoughts that only Anthropic's servers can read: they are left out."""

    type: Literal["redacted_thinking"]
    data: Ignored = None


def _refuse_block(kind: str) -> str:
    raise ValueError(f"{shown(kind)} is not supported: the models read text, and tools run at the client; leave the block out")


class OtherBlock(Body):
    """A block of any other kind, which is refused."""

    model_config = ConfigDict(extra="allow")
    type: Annotated[Text, Refused(_refuse_block)]


def _type_of(value: object) -> object:
    return value.get("type") if isinstance(value, dict) else getattr(value, "type", None)


def _result_tag(value: object) -> str:
    return "text block" if _type_of(value) == "text" else "other block"


def _block_tag(value: object) -> str:
    """Return the tag of a block's type. No tag is a field's name: errors could not be located otherwise."""
    kind = _type_of(value)
    return f"{kind} block" if kind in _BLOCKS else "other block"


ResultBlock = Annotated[
    Annotated[TextBlock, Tag("text block")] | Annotated[OtherBlock, Tag("other block")], Discriminator(_result_tag)
]


class ToolResultBlock(Body):
    """What a tool answered to a call."""

    type: Literal["tool_result"]
    tool_use_id: Name
    content: Text | list[ResultBlock] = ""
    is_error: bool = False
    cache_control: CacheControl | None = None
    toolset_name: unsupported() = None  # type: ignore[valid-type]


Block = Annotated[
    Annotated[TextBlock, Tag("text block")]
    | Annotated[ToolUseBlock, Tag("tool_use block")]
    | Annotated[ToolResultBlock, Tag("tool_result block")]
    | Annotated[ThinkingBlock, Tag("thinking block")]
    | Annotated[RedactedThinkingBlock, Tag("redacted_thinking block")]
    | Annotated[OtherBlock, Tag("other block")],
    Discriminator(_block_tag),
]


class Message(Body):
    """One turn of the conversation."""

    role: Literal["user", "assistant", "system"]
    content: Text | list[Block]


# Tools, and what may be called.


class CustomTool(Body):
    """A tool that runs at the client."""

    type: Literal["custom"] = "custom"
    name: Name
    description: Text = ""
    input_schema: dict[str, Any]
    strict: bool = False
    input_examples: list[dict[str, Any]] = Field(default_factory=list)
    cache_control: CacheControl | None = None
    eager_input_streaming: Ignored = None
    defer_loading: unsupported(False) = None  # type: ignore[valid-type]
    allowed_callers: unsupported(["direct"], []) = None  # type: ignore[valid-type]


def _refuse_tool(kind: str) -> str:
    raise ValueError(f"{shown(kind)} is a tool that Anthropic defines; only tools with an input_schema of their own are taken")


class OtherTool(Body):
    """A tool of any other type, which is refused."""

    model_config = ConfigDict(extra="allow")
    type: Annotated[Text, Refused(_refuse_tool)]


def _tool_tag(value: object) -> str:
    return "custom tool" if not isinstance(value, dict) or _type_of(value) in (None, "custom") else "other tool"


Tool = Annotated[Annotated[CustomTool, Tag("custom tool")] | Annotated[OtherTool, Tag("other tool")], Discriminator(_tool_tag)]


class ToolChoice(Body):
    """Whether the output is calls of tools, and how many."""

    type: Literal["auto", "any", "tool", "none"]
    name: Text | None = None
    disable_parallel_tool_use: bool = False


# How the model thinks, and the form of its answer.


class Thinking(Body):
    """Whether the model is to think before it answers."""

    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: Annotated[int, Field(ge=1, le=MAX_UINT32)] | None = None
    display: Literal["summarized", "omitted"] | None = None


class OutputFormat(Body):
    """A JSON schema that the answer satisfies."""

    type: Literal["json_schema"]
    json_schema: dict[str, Any] = Field(alias="schema")


class OutputConfig(Body):
    """The answer's form, and the effort for it."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None
    task_budget: Ignored = None


# Whole bodies.


class PromptBody(Body):
    """The body of `POST /v1/messages/count_tokens`: all that the prompt is made of."""

    model: Text = ""
    messages: list[Message]
    system: Text | list[TextBlock] = ""
    tools: list[Tool] = Field(default_factory=list)
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None
    cache_control: CacheControl | None = None
    context_management: Ignored = None
    billing_policy: Ignored = None
    speed: Ignored = None
    compaction: unsupported() = None  # type: ignore[valid-type]
    mcp_servers: unsupported([]) = None  # type: ignore[valid-type]


class MessageBody(PromptBody, SessionBody):
    """The body of `POST /v1/messages`."""

    max_tokens: Annotated[int, Field(ge=1, le=MAX_UINT32)]
    stop_sequences: list[Text] = Field(default_factory=list)
    temperature: float | None = None
    top_p: float | None = None
    top_k: Annotated[int, Field(ge=0, le=MAX_UINT32)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**64)] | None = None
    stream: bool = False
    metadata: Ignored = None
    service_tier: Ignored = None
    diagnostics: Ignored = None
    inference_geo: Ignored = None
    fallbacks: Ignored = None
    fallback_credit_token: Ignored = None
    container: unsupported() = None  # type: ignore[valid-type]
    thread: unsupported() = None  # type: ignore[valid-type]

    def wishes_s(self) -> Iterator[int]:
        """Yield also what each `cache_control` says: it means the whole request, whatever it stands at."""
        yield from super().wishes_s()
        marks = (self.cache_control, *(each.cache_control for each in self._marked()))
        yield from (mark.ttl for mark in marks if mark is not None)

    def _marked(self) -> Iterator[TextBlock | ToolUseBlock | ToolResultBlock | CustomTool]:
        """Yield everything that may have a `cache_control`."""
        yield from (tool for tool in self.tools if isinstance(tool, CustomTool))
        yield from (() if isinstance(self.system, str) else self.system)
        blocks = [block for message in self.messages if not isinstance(message.content, str) for block in message.content]
        for block in blocks:
            if isinstance(block, TextBlock | ToolUseBlock | ToolResultBlock):
                yield block
            if isinstance(block, ToolResultBlock) and not isinstance(block.content, str):
                yield from (part for part in block.content if isinstance(part, TextBlock))
