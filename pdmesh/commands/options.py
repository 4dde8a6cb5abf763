"""Options that several commands share."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Literal, cast

from pdmesh.client.channel import DEFAULT_ADDRESS, addresses, checked_key
from pdmesh.client.client import Client
from pdmesh.client.types import GenerateOptions
from pdmesh.runtime.rpc.tls import ClientTlsConfig


@dataclass(frozen=True)
class Connection:
    """Say which mesh to talk to, and how patiently."""

    router: str = field(
        default=DEFAULT_ADDRESS, metadata={"help": "address of the router; several, comma-separated, stand in for each other"}
    )
    timeout_s: float = field(default=0.0, metadata={"help": "deadline of the request in seconds; 0: none"})
    resume_timeout_s: float = field(default=5.0, metadata={"help": "how long to look for a router that is lost or not there yet"})
    retry_overload: bool = field(default=False, metadata={"help": "wait and retry when the mesh has no capacity"})
    api_key: str = field(default="", metadata={"help": "API key, for routers that require one", "secret": True})
    tls: ClientTlsConfig = field(default_factory=ClientTlsConfig, metadata={"flatten": True})

    def validate(self) -> None:
        """Raise ValueError that names the field."""
        if self.timeout_s < 0:
            raise ValueError("timeout_s: must not be negative; give 0 for none")
        if self.resume_timeout_s < 0:
            raise ValueError("resume_timeout_s: must not be negative")
        checked_key(self.api_key)
        try:
            addresses(self.router)
        except ValueError:
            raise ValueError(f"router: is empty; give an address such as {DEFAULT_ADDRESS}") from None

    @property
    def timeout(self) -> float | None:
        """Return the seconds for the client library; None for no deadline."""
        return self.timeout_s or None

    def client(self) -> Client:
        """Return a client, which the caller closes."""
        return Client(
            self.router,
            resume_timeout_s=self.resume_timeout_s,
            retry_overload=self.retry_overload,
            tls=self.tls,
            api_key=self.api_key,
        )


@dataclass(frozen=True)
class Sampling:
    """Say how tokens are drawn. Options not given are left to the mesh."""

    max_tokens: int | None = field(default=None, metadata={"help": "most tokens to generate"})
    min_tokens: int | None = field(default=None, metadata={"help": "tokens to generate before an end is allowed"})
    temperature: float | None = field(
        default=None, metadata={"help": "0: always the most likely token; 1: the model's distribution"}
    )
    top_k: int | None = field(default=None, metadata={"help": "draw from the k most likely tokens; 0: all"})
    top_p: float | None = field(default=None, metadata={"help": "draw from the most likely tokens that make up this probability"})
    min_p: float | None = field(default=None, metadata={"help": "drop tokens less likely than this share of the most likely"})
    repetition_penalty: float | None = field(default=None, metadata={"help": "above 1: tokens seen before become less likely"})
    presence_penalty: float | None = field(default=None, metadata={"help": "-2 to 2, once for each token in the output"})
    frequency_penalty: float | None = field(default=None, metadata={"help": "-2 to 2, for each occurrence in the output"})
    seed: int | None = field(default=None, metadata={"help": "same seed, same tokens; empty: a random one"})
    stop: tuple[str, ...] = field(default=(), metadata={"help": "texts that end the output"})
    stop_token_ids: tuple[int, ...] = field(default=(), metadata={"help": "tokens that end the output"})
    ignore_eos: bool = field(default=False, metadata={"help": "continue past the model's end-of-sequence token"})

    def given(self) -> GenerateOptions:
        """Return the options that were set, for the client library."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        # By identity: a temperature of 0 equals False but is not False.
        return cast(GenerateOptions, {name: v for name, v in values.items() if v is not None and v is not False and v != ()})


@dataclass(frozen=True)
class Constraint:
    """Constrain the output."""

    json_schema: str = field(default="", metadata={"help": "file with a JSON schema that the output matches"})
    regex: str = field(default="", metadata={"help": "regular expression that the whole output matches"})
    choice: tuple[str, ...] = field(default=(), metadata={"help": "the output is one of these texts"})
    grammar: str = field(default="", metadata={"help": "file with a Lark grammar that the output follows"})

    def validate(self) -> None:
        """Raise ValueError that names the field."""
        given = [f.name for f in fields(self) if getattr(self, f.name)]
        if len(given) > 1:
            raise ValueError(f"{given[1]}: excludes {given[0]}; give one of them")
        self.given()

    def given(self) -> GenerateOptions:
        """Return the option that was set, for the client library. Raises ValueError, naming the field, for an unreadable file."""
        if self.json_schema:
            return {"json_schema": _read("json_schema", self.json_schema)}
        if self.grammar:
            return {"grammar": _read("grammar", self.grammar)}
        if self.regex:
            return {"regex": self.regex}
        return {"choice": self.choice} if self.choice else {}


@dataclass(frozen=True)
class Routing:
    """Hold the options besides sampling."""

    model: str = field(default="", metadata={"help": "model to use; empty while the mesh serves exactly one"})
    mode: Literal["auto", "local", "remote"] = field(
        default="auto", metadata={"help": "where the prompt is computed: on the decode worker, or on a prefill worker"}
    )
    priority: Literal["interactive", "standard", "batch"] = field(default="standard", metadata={"help": "place under load"})
    tenant: str = field(default="", metadata={"help": "tenant that the request belongs to"})
    request_id: str = field(default="", metadata={"help": "name of the request in logs and traces"})

    def given(self) -> GenerateOptions:
        """Return the options for the client library; the model is passed separately."""
        options = GenerateOptions(priority=self.priority, tenant=self.tenant, request_id=self.request_id)
        if self.mode != "auto":
            options["mode"] = self.mode
        return options


def _read(name: str, path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ValueError(f"{name}: {path} cannot be read: {error}") from error


def flat(help_: str = "") -> dict[str, object]:
    """Return the metadata of a nested group whose flags carry no prefix."""
    return {"flatten": True, "help": help_}
