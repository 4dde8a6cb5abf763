"""Overrides of a model's config.json from the command line: KEY=VALUE, such as `rope_scaling.factor=4`.

VALUE is JSON; what is no JSON is text. KEY names a key within a mapping by dots. `null` takes a key away.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence

HELP = "key of config.json that is read otherwise: KEY=VALUE (JSON), such as rope_scaling.factor=4; null takes it away"
_KEY = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*(\.[A-Za-z0-9_-]+)*")


def parsed(override: str) -> tuple[tuple[str, ...], object]:
    """Return the key's path and the value. Raises ValueError that begins with `override`."""
    key, separator, text = override.partition("=")
    if not separator or not _KEY.fullmatch(key):
        raise ValueError(f"override: {override[:80]!r} is not KEY=VALUE; give one such as rope_scaling.factor=4")
    try:
        return tuple(key.split(".")), json.loads(text)
    except ValueError:
        return tuple(key.split(".")), text


def check(overrides: Sequence[str]) -> None:
    """Raise ValueError that begins with `override` unless all can be read, each key once."""
    keys = [parsed(override)[0] for override in overrides]
    for key in keys:
        if keys.count(key) > 1:
            raise ValueError(f"override: {'.'.join(key)} is given twice; give it once")


def overridden(content: Mapping[str, object], overrides: Sequence[str]) -> dict[str, object]:
    """Return the content of a config.json with the overrides. Raises ValueError that begins with `override`."""
    result = dict(content)
    for override in overrides:
        path, value = parsed(override)
        _set(result, path, value)
    return result


def _set(content: dict[str, object], path: tuple[str, ...], value: object) -> None:
    key, *rest = path
    if rest:
        inner = content.get(key)
        if inner is not None and not isinstance(inner, Mapping):
            raise ValueError(f"override: {'.'.join(path)}: {key} holds no mapping; give {key}=VALUE")
        content[key] = dict(inner or {})
        _set(content[key], tuple(rest), value)  # type: ignore[arg-type]
    elif value is None:
        content.pop(key, None)
    else:
        content[key] = value
