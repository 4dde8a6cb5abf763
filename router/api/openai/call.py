"""What a client has asked for: the messages of `pdmesh.v1` that answer it, and how their responses are to be shown."""

from __future__ import annotations

from dataclasses import dataclass, field

from pdmesh.v1 import mesh_pb2
from router.api.openai.errors import Names
from router.api.openai.fields import Fields
from router.api.openai.shapes import Shape
from router.api.validation import refuse

MeshRequest = mesh_pb2.GenerateRequest | mesh_pb2.ChatRequest

# They change nothing about an answer: hints and accounting, OpenAI's and those that other servers know.
IGNORED = frozenset(
    {
        "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention",
        "prompt_cache_options", "prediction", "parallel_tool_calls", "request_id", "priority",
    }
)  # fmt: skip


@dataclass(frozen=True)
class Streaming:
    """Whether and how the answer streams; None in `Call` for one whole body."""

    usage: bool = False  # a last chunk has the usage
    continuous_usage: bool = False  # every chunk has it


@dataclass(frozen=True)
class Call:
    """One HTTP request. With several prompts, choice c of prompt p has the index p * num_choices + c."""

    requests: tuple[MeshRequest, ...]
    num_choices: int
    shape: Shape
    streaming: Streaming | None
    names: Names = field(default_factory=dict)
    echo: bool = False

    def names_of(self, number: int) -> Names:
        """For errors of the prompt `number`."""
        if len(self.requests) == 1:
            return self.names
        return {**self.names, "prompt": f"prompt[{number}]", "tokens.ids": f"prompt[{number}]"}


def read_streaming(fields: Fields) -> Streaming | None:
    """`stream` and `stream_options`. Raises InvalidArgument."""
    stream, options = fields.flag("stream"), fields.inner("stream_options")
    if options is None:
        return Streaming() if stream else None
    if not stream:
        refuse("stream_options", "needs stream: true")
    streaming = Streaming(options.flag("include_usage"), options.flag("continuous_usage_stats"))
    options.finish({"include_obfuscation"}, {})
    return streaming
