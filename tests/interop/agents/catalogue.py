"""The agents' libraries that are tried, with the versions that were tried."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.metadata import version

from benchmarks.peers.environments import Environment
from tests.interop.agents.node import locked_version

INSTALL_LIMIT_S = 900.0
"""Each of these comes as wheels: some minutes on a slow machine."""


@dataclass(frozen=True)
class Library:
    """`program`: a module of this package, or a file of its folder `npm`. `environment` None: this Python, or npm's packages."""

    name: str
    program: str
    environment: Environment | None = None

    @property
    def is_node(self) -> bool:
        """Return whether Node.js runs the program."""
        return self.program.endswith(".mjs")


def _installed(name: str, pinned: str, program: str, *beside: str) -> Library:
    package = pinned.partition("[")[0] if "[" in pinned else pinned.partition("==")[0]
    environment = Environment(f"agents-{package}", (("install", pinned, *beside),), limit_s=INSTALL_LIMIT_S)
    return Library(f"{name} {pinned.rpartition('==')[2]}", program, environment)


LIBRARIES = (
    _installed("openai-agents", "openai-agents==0.24.0", "openai_agents_loop"),
    _installed("pydantic-ai", "pydantic-ai-slim[openai]==2.68.0", "pydantic_ai_agent"),
    _installed("langchain-openai", "langchain-openai==1.7.4", "langchain_chat"),
    _installed("instructor", "instructor==1.17.0", "instructor_models"),
    _installed("litellm", "litellm==1.110.2", "litellm_completion"),
    _installed("llama-index-llms-openai-like", "llama-index-llms-openai-like==0.8.1", "llama_index_llm"),
    Library(f"openai {version('openai')}", "openai_client"),
    Library(f"anthropic {version('anthropic')}", "anthropic_client"),
    Library(f"ai {locked_version('ai')} (npm)", "ai.mjs"),
)
