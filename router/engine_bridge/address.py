"""The value of `--engine-address`: where a stock engine listens, and the model's name for clients if it is not the engine's."""

import re
from collections.abc import Iterable
from dataclasses import dataclass

SCHEME = "grpc://"
_FORM = f"[NAME=]{SCHEME}HOST:PORT"
_TARGET = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[^:/\s\[\]]+):([0-9]{1,5})")


@dataclass(frozen=True)
class EngineAddress:
    """Hold one engine. `target`: host:port; `model`: the name that clients ask for, empty: what the engine says."""

    target: str
    model: str = ""


def parse(text: str) -> EngineAddress:
    """Return the engine that the text names. Raises ValueError."""
    name, separator, url = text.rpartition("=")
    if separator and not name:
        raise ValueError(f"{text!r} has no name before the =; give {_FORM}")
    if not url.startswith(SCHEME):
        raise ValueError(f"{text!r} is not {_FORM}{_hint(url)}")
    found = _TARGET.fullmatch(url.removeprefix(SCHEME).removesuffix("/"))
    if found is None or not 0 < int(found[2]) <= 65535:
        raise ValueError(f"{text!r} names no host and port; give {_FORM}")
    return EngineAddress(found[0], name)


def parse_all(texts: Iterable[str]) -> tuple[EngineAddress, ...]:
    """Return the engines, no two of them at one address. Raises ValueError."""
    engines: dict[str, EngineAddress] = {}
    for text in texts:
        engine = parse(text)
        if engine.target in engines:
            raise ValueError(f"{engine.target} is given twice; an engine serves one model")
        engines[engine.target] = engine
    return tuple(engines.values())


def _hint(url: str) -> str:
    scheme = url.partition("://")[0] if "://" in url else ""
    if scheme in ("http", "https"):
        return ": engines are spoken to over gRPC (`vllm serve MODEL --grpc`), not over HTTP"
    if scheme == "grpcs":
        return ": the servers of these engines have no TLS"
    return ""
