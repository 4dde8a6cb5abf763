"""Options of `pdmesh loadtest`, and what they say as a workload, objectives and a target."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from pdmesh.client.types import Priority
from pdmesh.commands.options import flat
from pdmesh.loadtest import lengths, mix, objectives, traces
from pdmesh.loadtest.objectives import ObjectiveBook, Objectives
from pdmesh.loadtest.workload import Arrivals, Limits, TrafficClass, Workload
from pdmesh.runtime.rpc.tls import ClientTlsConfig

_DISTRIBUTION = f"a number, or one of {lengths.usage()}"


@dataclass(frozen=True)
class When:
    """When requests start, and which of them count."""

    rate: float = field(default=1.0, metadata={"help": "sessions per second; a session is one request unless --turns says more"})
    arrivals: Literal["poisson", "gamma", "constant", "ramp"] = field(default="poisson", metadata={"help": "how they are spread"})
    burstiness: float = field(default=1.0, metadata={"help": "shape of gamma: 1 is poisson, below 1 comes in bursts"})
    ramp_to: float = field(default=0.0, metadata={"help": "rate at the end of a ramp from --rate"})
    duration_s: float = field(default=60.0, metadata={"help": "seconds that count"})
    warmup_s: float = field(default=0.0, metadata={"help": "seconds of load before them, which do not count"})
    trace: str = field(default="", metadata={"help": "replay this trace: its times, lengths and shared blocks"})
    trace_speed: float = field(default=1.0, metadata={"help": "replay so many times as fast"})

    def validate(self) -> None:
        """Raises ValueError that names the field."""
        for name in ("rate", "burstiness", "duration_s", "trace_speed"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name}: must be more than 0")
        if self.warmup_s < 0:
            raise ValueError("warmup_s: must not be negative")
        if self.ramp_to < 0 or (self.arrivals == "ramp") != (self.ramp_to > 0):
            raise ValueError("ramp_to: give the last rate, more than 0, together with --arrivals ramp")

    def of(self) -> Arrivals:
        return Arrivals(self.arrivals, self.rate, self.burstiness, self.ramp_to or self.rate)


@dataclass(frozen=True)
class What:
    """What is asked."""

    input_tokens: str = field(default="128", metadata={"help": f"prompt length, shared prefix included: {_DISTRIBUTION}"})
    output_tokens: str = field(default="64", metadata={"help": f"answer length: {_DISTRIBUTION}"})
    lengths_from: str = field(default="", metadata={"help": "draw pairs of lengths from this trace instead"})
    max_input_tokens: int | None = field(default=None, metadata={"help": "cut longer prompts"})
    max_output_tokens: int | None = field(default=None, metadata={"help": "cut longer answers"})
    prefix_tokens: int = field(default=0, metadata={"help": "tokens at the beginning of prompts that several share"})
    num_prefixes: int = field(default=1, metadata={"help": "different prefixes"})
    turns: str = field(default="1", metadata={"help": f"requests of a conversation: {_DISTRIBUTION}"})
    think_s: str = field(default="0", metadata={"help": f"seconds between an answer and the next turn: {_DISTRIBUTION}"})
    priorities: str = field(default="standard", metadata={"help": "shares of priorities, such as interactive:1,batch:3"})
    tenants: str = field(default="", metadata={"help": "shares of tenants, such as a:1,b:2"})
    mix: str = field(default="", metadata={"help": "TOML file of classes of traffic, instead of the above"})
    cancel_share: float = field(default=0.0, metadata={"help": "share of requests that are cancelled"})
    cancel_after_s: str = field(default="exponential:1", metadata={"help": f"seconds until then: {_DISTRIBUTION}"})
    seed: int | None = field(
        default=None, metadata={"help": "same seed, same arrivals, lengths and prompts (which caches may know); empty: a new one"}
    )

    def validate(self) -> None:
        """Raises ValueError that names the field."""
        for name in ("input_tokens", "output_tokens", "turns", "think_s", "cancel_after_s"):
            _named(name, lambda name=name: lengths.parse(getattr(self, name)))  # type: ignore[misc]
        for name in ("max_input_tokens", "max_output_tokens", "num_prefixes"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise ValueError(f"{name}: must be at least 1")
        if self.prefix_tokens < 0:
            raise ValueError("prefix_tokens: must not be negative")
        if not 0 <= self.cancel_share <= 1:
            raise ValueError("cancel_share: must be between 0 and 1")
        known = {priority.value for priority in Priority}
        for name in _shares("priorities", self.priorities):
            if name not in known:
                raise ValueError(f"priorities: {name!r} is not known; give some of {', '.join(sorted(known))}")
        if self.tenants:
            _shares("tenants", self.tenants)

    def classes(self) -> tuple[TrafficClass, ...]:
        """A class for each priority and tenant, named after the priority."""
        tenants = _shares("tenants", self.tenants) if self.tenants else {"": 1.0}
        return tuple(
            TrafficClass(
                priority, share * of, priority, tenant, lengths.parse(self.input_tokens), lengths.parse(self.output_tokens)
            )
            for priority, share in _shares("priorities", self.priorities).items()
            for tenant, of in tenants.items()
        )


@dataclass(frozen=True)
class Goals:
    """What is to be kept. A request that keeps all of them is good; the exit code says whether enough did."""

    ttft_ms: float | None = field(default=None, metadata={"help": "objective: time to the first token, from when it was due"})
    tpot_ms: float | None = field(default=None, metadata={"help": "objective: mean time per token after the first"})
    e2e_ms: float | None = field(default=None, metadata={"help": "objective: time to the last token"})
    quantile: float | None = field(default=None, metadata={"help": "share of requests that must keep them; else 0.9"})
    objectives: str = field(default="", metadata={"help": "objectives file that the router reads; the flags above win over it"})

    def validate(self) -> None:
        """Raises ValueError that names the field."""
        for name in ("ttft_ms", "tpot_ms", "e2e_ms"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ValueError(f"{name}: must be more than 0 milliseconds")
        if self.quantile is not None and not 0 < self.quantile <= 1:
            raise ValueError("quantile: must be above 0 and at most 1")

    def of(self, model: str) -> Objectives:
        """The objectives for `model`. Raises ValueError or ConfigError for a file that does not have them."""
        base = objectives.from_file(self.objectives, model) if self.objectives else Objectives()
        given = {name: getattr(self, name) for name in ("ttft_ms", "tpot_ms", "e2e_ms", "quantile")}
        return replace(base, **{name: value for name, value in given.items() if value is not None})


@dataclass(frozen=True)
class How:
    """How requests are put to the target."""

    model: str = field(default="", metadata={"help": "model to use; empty while the target serves exactly one"})
    vocab_size: int = field(default=32_000, metadata={"help": "prompts are random token ids below this"})
    temperature: float = field(default=0.0, metadata={"help": "0: always the most likely token"})
    ignore_eos: bool = field(default=True, metadata={"help": "answers are as long as planned (OpenAI: an extension)"})
    timeout_s: float = field(default=60.0, metadata={"help": "a request without a complete answer by then has failed"})
    max_concurrency: int = field(default=10_000, metadata={"help": "what is due beyond is not sent: it never waits"})
    max_lateness_ms: float = field(default=10.0, metadata={"help": "own delay (p99) beyond which a result is invalid"})
    connections: int = field(default=1, metadata={"help": "gRPC connections; at least one for each router"})
    resume_timeout_s: float = field(default=0.0, metadata={"help": "gRPC: how long to look for another router when one is lost"})
    send_objectives: bool = field(default=True, metadata={"help": "gRPC: tell the mesh TTFT and TPOT objectives of each request"})
    endpoint: Literal["completions", "chat"] = field(default="completions", metadata={"help": "OpenAI: which one"})
    prompt: Literal["tokens", "words"] = field(
        default="tokens", metadata={"help": "gRPC, OpenAI completions: token ids, or text"}
    )
    api_key: str = field(default="", metadata={"help": "key that requests show: the bearer token", "secret": True})
    priority_header: str = field(default="", metadata={"help": "OpenAI: header for the priority, if the server reads one"})
    tenant_header: str = field(default="", metadata={"help": "OpenAI: header for the tenant, if the server reads one"})
    tls: ClientTlsConfig = field(default_factory=ClientTlsConfig, metadata=flat())

    def validate(self) -> None:
        """Raises ValueError that names the field."""
        if self.vocab_size < 1000:
            raise ValueError("vocab_size: must be at least 1000")
        for name in ("timeout_s", "max_lateness_ms", "max_concurrency", "connections"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name}: must be more than 0")
        if self.temperature < 0 or self.resume_timeout_s < 0:
            raise ValueError(f"{'temperature' if self.temperature < 0 else 'resume_timeout_s'}: must not be negative")


def workload_of(when: When, what: What, max_context: int | None) -> tuple[Workload, Mapping[str, Objectives]]:
    """The workload, and the objectives of classes that have their own. Raises ValueError that names file and field."""
    classes, own = (what.classes(), {}) if not what.mix else mix.read_mix(what.mix)
    workload = Workload(
        arrivals=when.of(),
        classes=classes,
        trace=traces.read_trace(when.trace) if when.trace else (),
        trace_speed=when.trace_speed,
        length_rows=traces.read_trace(what.lengths_from) if what.lengths_from else (),
        prefix_tokens=what.prefix_tokens,
        num_prefixes=what.num_prefixes,
        turns=lengths.parse(what.turns),
        think_s=lengths.parse(what.think_s),
        cancel_share=what.cancel_share,
        cancel_after_s=lengths.parse(what.cancel_after_s),
        limits=Limits(what.max_input_tokens, what.max_output_tokens, max_context),
    )
    return workload, own


def book_of(common: Objectives, own: Mapping[str, Objectives]) -> ObjectiveBook:
    """Classes take from the common objectives what their own leave open."""
    merged = {
        name: Objectives(
            ttft_ms=common.ttft_ms if mine.ttft_ms is None else mine.ttft_ms,
            tpot_ms=common.tpot_ms if mine.tpot_ms is None else mine.tpot_ms,
            e2e_ms=common.e2e_ms if mine.e2e_ms is None else mine.e2e_ms,
            quantile=common.quantile,
        )
        for name, mine in own.items()
    }
    return ObjectiveBook(common, merged)


def _shares(field_: str, text: str) -> dict[str, float]:
    """Share by name, of `NAME:SHARE,…`; a name alone has a share of 1."""
    shares: dict[str, float] = {}
    for item in text.split(","):
        name, _, share = item.strip().partition(":")
        try:
            value = float(share or 1)
        except ValueError:
            value = -1.0
        if not name or not 0 < value < float("inf"):
            raise ValueError(f"{field_}: {item.strip()!r} must be NAME or NAME:SHARE with a share above 0")
        if name in shares:
            raise ValueError(f"{field_}: {name!r} is named twice")
        shares[name] = value
    return shares


def _named(field_: str, parse: Callable[[], object]) -> None:
    try:
        parse()
    except ValueError as error:
        raise ValueError(f"{field_}: {error}") from None
