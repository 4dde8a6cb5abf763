"""Which proposers an engine has: names in its configuration, made here, one line for each kind."""

from __future__ import annotations

from collections.abc import Callable

from engine.config import EngineConfig
from engine.speculation.prompt_lookup import PromptLookup
from engine.speculation.proposer import Proposer

AUTO = ("prompt_lookup",)
NONE = "none"


def make_proposers(config: EngineConfig) -> list[Proposer]:
    """In the order of the configuration. Raises ValueError naming the field for what cannot be."""
    return [_KINDS[name](config) for name in proposer_names(config.speculation)]


def proposer_names(value: str) -> tuple[str, ...]:
    """`auto`, `none` or names joined by commas. Raises ValueError for others."""
    if value == "auto":
        return AUTO
    if value == NONE:
        return ()
    names = tuple(dict.fromkeys(name.strip() for name in value.split(",")))
    for name in names:
        if name not in _KINDS:
            raise ValueError(f"speculation: {name!r} is not known; give auto, none or some of {', '.join(_KINDS)}")
    return names


_KINDS: dict[str, Callable[[EngineConfig], Proposer]] = {
    "prompt_lookup": lambda _: PromptLookup(),
}
