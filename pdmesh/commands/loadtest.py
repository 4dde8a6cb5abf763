"""`pdmesh loadtest TARGET`: open-loop load, and its outcome."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import signal
import sys
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from pdmesh.client.channel import DEFAULT_ADDRESS
from pdmesh.client.types import Priority
from pdmesh.commands.options import flat
from pdmesh.loadtest import arrivals as loadtest_arrivals
from pdmesh.loadtest import record, result, traces
from pdmesh.loadtest import workload as loadtest_workload
from pdmesh.loadtest.measure import Found, Measurement, Search, Watch, find_capacity, measure
from pdmesh.loadtest.progress import Progress
from pdmesh.loadtest.record import ObjectiveBook, Objectives
from pdmesh.loadtest.reports import html as reports_html
from pdmesh.loadtest.reports import text as reports_text
from pdmesh.loadtest.result import Result
from pdmesh.loadtest.runner import RunSettings
from pdmesh.loadtest.sessions import AgentFlags
from pdmesh.loadtest.targets.grpc import GrpcSettings, GrpcTarget
from pdmesh.loadtest.targets.target import Target, TargetError
from pdmesh.loadtest.traces import BLOCK_TOKENS, TraceRow
from pdmesh.loadtest.workload import Arrivals, Limits, TrafficClass, Workload, num_cut
from pdmesh.runtime.config import dump
from pdmesh.runtime.rpc.tls import ClientTlsConfig
from pdmesh.terminal import show

# The options, and their conversion to a workload, objectives and a target.


_DISTRIBUTION = f"a number, or one of {loadtest_arrivals.usage()}"


@dataclass(frozen=True)
class When:
    """Say when requests start, and which of them count."""

    rate: float = field(default=1.0, metadata={"help": "sessions per second; a session is one request unless --turns says more"})
    arrivals: Literal["poisson", "gamma", "constant", "ramp"] = field(default="poisson", metadata={"help": "how they are spread"})
    burstiness: float = field(default=1.0, metadata={"help": "shape of gamma: 1 is poisson, below 1 comes in bursts"})
    ramp_to: float = field(default=0.0, metadata={"help": "rate at the end of a ramp from --rate"})
    duration_s: float = field(default=60.0, metadata={"help": "seconds that count"})
    warmup_s: float = field(default=0.0, metadata={"help": "seconds of load before them, which do not count"})
    trace: str = field(default="", metadata={"help": "replay this trace: its times, lengths and shared blocks"})
    trace_speed: float = field(default=1.0, metadata={"help": "replay so many times as fast"})
    trace_scale: float = field(default=1.0, metadata={"help": "divide the trace's lengths, and what prompts share, by this"})
    trace_requests: int | None = field(default=None, metadata={"help": "replay the trace's first requests only, so many"})
    trace_sessions: bool = field(
        default=False, metadata={"help": "a request that continues an earlier one is not sent before that one has ended"}
    )
    trace_share: float = field(default=1.0, metadata={"help": "with --trace-sessions: share of the sessions, drawn at random"})
    max_sessions: int | None = field(default=None, metadata={"help": "start so many sessions at most"})
    finish_sessions: bool = field(
        default=False, metadata={"help": "sessions that have started go on after --duration-s, and all of their turns count"}
    )

    def validate(self) -> None:
        """Raise ValueError that names the field."""
        for name, default in (("trace_scale", 1.0), ("trace_requests", None), ("trace_sessions", False)):
            if getattr(self, name) != default and not self.trace:
                raise ValueError(f"{name}: changes how a trace is replayed; give --trace, too")
        if not 0 < self.trace_share <= 1 or (self.trace_share < 1 and not self.trace_sessions):
            raise ValueError("trace_share: must be above 0 and at most 1, and needs --trace-sessions")
        if not 1 <= self.trace_scale <= BLOCK_TOKENS:
            raise ValueError(f"trace_scale: must be from 1 to {BLOCK_TOKENS}")
        for name in ("trace_requests", "max_sessions"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise ValueError(f"{name}: must be at least 1")
        for name in ("rate", "burstiness", "duration_s", "trace_speed"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name}: must be more than 0")
        if self.warmup_s < 0:
            raise ValueError("warmup_s: must not be negative")
        if self.ramp_to < 0 or (self.arrivals == "ramp") != (self.ramp_to > 0):
            raise ValueError("ramp_to: give the last rate, more than 0, together with --arrivals ramp")

    def of(self) -> Arrivals:
        return Arrivals(self.arrivals, self.rate, self.burstiness, self.ramp_to or self.rate)

    def rows(self) -> tuple[TraceRow, ...]:
        """Return the trace as it is to be replayed; empty without one. Raises TraceError."""
        rows = traces.read_trace(self.trace) if self.trace else ()
        if self.trace_sessions:
            rows = traces.some_sessions(traces.link_sessions(rows), self.trace_share)
        return traces.scaled(rows[: self.trace_requests], self.trace_scale)


@dataclass(frozen=True)
class What:
    """Say what is requested."""

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
        """Raise ValueError that names the field."""
        for name in ("input_tokens", "output_tokens", "turns", "think_s", "cancel_after_s"):
            loadtest_arrivals.parse_flag(name, getattr(self, name))
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
        """Return a class for each priority and tenant, named after the priority."""
        tenants = _shares("tenants", self.tenants) if self.tenants else {"": 1.0}
        return tuple(
            TrafficClass(
                priority,
                share * of,
                priority,
                tenant,
                loadtest_arrivals.parse(self.input_tokens),
                loadtest_arrivals.parse(self.output_tokens),
            )
            for priority, share in _shares("priorities", self.priorities).items()
            for tenant, of in tenants.items()
        )


@dataclass(frozen=True)
class Goals:
    """Set the objectives. A request that keeps all of them is good; the exit code says whether enough did."""

    ttft_ms: float | None = field(default=None, metadata={"help": "objective: time to the first token, from the scheduled time"})
    tpot_ms: float | None = field(default=None, metadata={"help": "objective: mean time per token after the first"})
    e2e_ms: float | None = field(default=None, metadata={"help": "objective: time to the last token"})
    quantile: float | None = field(default=None, metadata={"help": "share of requests that must keep them; else 0.9"})
    objectives: str = field(default="", metadata={"help": "objectives file that the router reads; the flags above win over it"})

    def validate(self) -> None:
        """Raise ValueError that names the field."""
        for name in ("ttft_ms", "tpot_ms", "e2e_ms"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ValueError(f"{name}: must be more than 0 milliseconds")
        if self.quantile is not None and not 0 < self.quantile <= 1:
            raise ValueError("quantile: must be above 0 and at most 1")

    def of(self, model: str) -> Objectives:
        """Return the objectives for `model`. Raises ValueError or ConfigError for a file that does not have them."""
        base = record.from_file(self.objectives, model) if self.objectives else Objectives()
        given = {name: getattr(self, name) for name in ("ttft_ms", "tpot_ms", "e2e_ms", "quantile")}
        return replace(base, **{name: value for name, value in given.items() if value is not None})


@dataclass(frozen=True)
class How:
    """Say how requests are sent to the target."""

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
    send_sessions: bool = field(default=False, metadata={"help": "gRPC: requests name their session (session_id)"})
    return_token_ids: bool = field(
        default=False, metadata={"help": "OpenAI completions: answers with their ids, for --turns with tokens (vLLM has it)"}
    )
    endpoint: Literal["completions", "chat"] = field(default="completions", metadata={"help": "OpenAI: which one"})
    prompt: Literal["tokens", "words"] = field(
        default="tokens", metadata={"help": "gRPC, OpenAI completions: token ids, or text"}
    )
    api_key: str = field(default="", metadata={"help": "key that requests show: the bearer token", "secret": True})
    priority_header: str = field(default="", metadata={"help": "OpenAI: header for the priority, if the server reads one"})
    tenant_header: str = field(default="", metadata={"help": "OpenAI: header for the tenant, if the server reads one"})
    tls: ClientTlsConfig = field(default_factory=ClientTlsConfig, metadata=flat())

    def validate(self) -> None:
        """Raise ValueError that names the field."""
        if self.vocab_size < 1000:
            raise ValueError("vocab_size: must be at least 1000")
        for name in ("timeout_s", "max_lateness_ms", "max_concurrency", "connections"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name}: must be more than 0")
        if self.temperature < 0 or self.resume_timeout_s < 0:
            raise ValueError(f"{'temperature' if self.temperature < 0 else 'resume_timeout_s'}: must not be negative")


def workload_of(when: When, what: What, agents: AgentFlags, max_context: int | None) -> tuple[Workload, Mapping[str, Objectives]]:
    """Return the workload, and the objectives of classes that have their own. Raises ValueError that names file and field."""
    classes, own = (what.classes(), {}) if not what.mix else loadtest_workload.read_mix(what.mix)
    workload = Workload(
        arrivals=when.of(),
        classes=classes,
        trace=when.rows(),
        trace_speed=when.trace_speed,
        length_rows=traces.read_trace(what.lengths_from) if what.lengths_from else (),
        prefix_tokens=what.prefix_tokens,
        num_prefixes=what.num_prefixes,
        turns=loadtest_arrivals.parse(what.turns),
        think_s=loadtest_arrivals.parse(what.think_s),
        agents=agents.of(),
        max_sessions=when.max_sessions,
        cancel_share=what.cancel_share,
        cancel_after_s=loadtest_arrivals.parse(what.cancel_after_s),
        limits=Limits(what.max_input_tokens, what.max_output_tokens, max_context),
    )
    return workload, own


def book_of(common: Objectives, own: Mapping[str, Objectives]) -> ObjectiveBook:
    """Return the objectives by class: a class inherits what its own leave open."""
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
    """Return the share by name, of `NAME:SHARE,…`; a name alone has a share of 1."""
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


# A window with fewer requests says nothing about a share of them.
_MIN_REQUESTS = 10
EXIT_OK, EXIT_MISSED, EXIT_USAGE, EXIT_UNAVAILABLE, EXIT_INVALID, EXIT_INTERRUPTED = 0, 1, 2, 3, 5, 130


@dataclass(frozen=True)
class Options:
    """Load a mesh or an OpenAI server: pdmesh loadtest 127.0.0.1:8100 --rate 5 --ttft-ms 500; then loadtest compare."""

    target: str = field(
        default=DEFAULT_ADDRESS,
        metadata={"help": "HOST:PORT of routers (gRPC), or http(s)://HOST:PORT/v1; also as a bare word", "positional": True},
    )
    when: When = field(default_factory=When, metadata=flat())
    what: What = field(default_factory=What, metadata=flat())
    agents: AgentFlags = field(default_factory=AgentFlags, metadata=flat())
    goals: Goals = field(default_factory=Goals, metadata=flat())
    how: How = field(default_factory=How, metadata=flat())
    find_capacity: bool = field(
        default=False, metadata={"help": "look for the highest rate that keeps the objectives, beginning with --rate"}
    )
    attainments: tuple[float, ...] = field(default=(0.99, 0.9), metadata={"help": "shares that --find-capacity looks for"})
    windows: int = field(default=3, metadata={"help": "windows of --duration-s at each rate; most of them decide"})
    tolerance: float = field(default=0.05, metadata={"help": "how close the next rate that fails must be, as a share"})
    max_rate: float = field(default=10_000.0, metadata={"help": "highest rate to try"})
    output: str = field(default="", metadata={"help": "write the result to this file, as JSON"})
    html: str = field(default="", metadata={"help": "write a report to this file: one page, nothing else is needed to see it"})
    json: bool = field(default=False, metadata={"help": "print JSON in place of tables"})
    progress: bool = field(default=True, metadata={"help": "show on standard error how it goes"})

    def validate(self) -> None:
        """Raise ValueError that names the field."""
        if not self.target:
            raise ValueError(f"target: is missing; give one such as {DEFAULT_ADDRESS} or http://127.0.0.1:8000/v1")
        for name in ("output", "html"):
            _writable(name, getattr(self, name))
        if self.windows < 1:
            raise ValueError("windows: must be at least 1")
        if not 0 < self.tolerance < 1:
            raise ValueError("tolerance: must be between 0 and 1")
        if self.max_rate < self.when.rate:
            raise ValueError("max_rate: must not be below --rate")
        if not self.attainments or not all(0 < share <= 1 for share in self.attainments):
            raise ValueError("attainments: give shares above 0 and at most 1")
        if self.find_capacity and (self.when.trace or self.when.arrivals == "ramp"):
            raise ValueError("find_capacity: sets the rate itself; a trace or a ramp has its own")
        if self.find_capacity and self.when.finish_sessions:
            raise ValueError("find_capacity: its windows end after --duration-s; leave out --finish-sessions")
        self._validate_sessions()

    def _validate_sessions(self) -> None:
        if self.when.trace and self.agents.are_used:
            raise ValueError("when.trace: has prompts of its own; leave out --system-tokens and --tool-share")
        if self.agents.tool_share and self.what.turns == "1":
            raise ValueError("agents.tool_share: is the share of later turns; give --turns, too")
        if self.what.prefix_tokens and self.agents.of().have_system_prompts:
            raise ValueError("agents.system_tokens: are in front of a prompt, --prefix-tokens a part of it; give one of them")
        sends_ids = self.speaks_http and self.how.endpoint == "completions" and self.how.prompt == "tokens"
        if self.how.return_token_ids and not sends_ids:
            raise ValueError("how.return_token_ids: is for completions of token ids over HTTP; leave it out")
        if sends_ids and self.what.turns != "1" and not self.how.return_token_ids:
            raise ValueError(
                "how.prompt: answers of this protocol have no token ids; for --turns give words, or --endpoint chat, "
                "or --return-token-ids if the server has it (vLLM)"
            )

    @property
    def speaks_http(self) -> bool:
        """Return whether the target is a URL."""
        return "://" in self.target


def run(options: Options) -> int:
    """Run the command; return 0: kept (or no objectives); 1: missed, or nothing was answered; 3: no such target; 5: too late
    itself; 130: interrupted."""
    try:
        return asyncio.run(_run(options))
    except TargetError as error:
        print(f"pdmesh loadtest: {options.target}: {error.message}", file=sys.stderr)
        return EXIT_UNAVAILABLE
    except (asyncio.CancelledError, KeyboardInterrupt):
        print("pdmesh loadtest: interrupted before anything was measured", file=sys.stderr)
        return EXIT_INTERRUPTED
    except (ValueError, OSError) as error:
        print(f"pdmesh loadtest: {error}", file=sys.stderr)
        return EXIT_USAGE


async def _run(options: Options) -> int:
    task = asyncio.current_task()
    assert task is not None
    # SIGTERM acts as Ctrl-C: the measurements so far are reported.
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    target = _open(options)
    try:
        info = await target.check()
        measurement = _measurement(options, info.model, info.max_context)
        if options.find_capacity:
            return await _find_capacity(target, measurement, options)
        measured = await measure(target, measurement, _watch(options))
    finally:
        await target.close()
    _report(measured, options)
    return _exit_code(measured)


async def _find_capacity(target: Target, measurement: Measurement, options: Options) -> int:
    if not measurement.book.any:
        raise ValueError("find_capacity: needs objectives; give --ttft-ms, --tpot-ms, --e2e-ms or --objectives")
    min_rate = _MIN_REQUESTS / options.when.duration_s
    searches = tuple(
        Search(share, options.when.rate, options.max_rate, min_rate, options.tolerance, options.windows)
        for share in options.attainments
    )
    found = await find_capacity(
        target, measurement, searches, _watch(options), lambda trial: _say(options, reports_text.trial_line(trial))
    )
    _report(replace(found.result, capacity=found.as_json()), options)
    if not options.json:
        show("", *reports_text.capacity_lines(found.capacities, found.stopped))
    return _exit_code_of_search(found)


def _open(options: Options) -> Target:
    how = options.how
    if options.speaks_http:
        # Only here: a client-only installation has no h11.
        from pdmesh.loadtest.targets.openai import OpenAiSettings, OpenAiTarget

        return OpenAiTarget(
            options.target,
            OpenAiSettings(
                model=how.model,
                endpoint=how.endpoint,
                prompt=how.prompt,
                vocab_size=how.vocab_size,
                temperature=how.temperature,
                ignore_eos=how.ignore_eos,
                api_key=how.api_key,
                priority_header=how.priority_header,
                tenant_header=how.tenant_header,
                return_token_ids=how.return_token_ids,
                tls=how.tls,
            ),
        )
    settings = GrpcSettings(
        model=how.model,
        vocab_size=how.vocab_size,
        temperature=how.temperature,
        ignore_eos=how.ignore_eos,
        connections=how.connections,
        resume_timeout_s=how.resume_timeout_s,
        send_objectives=how.send_objectives,
        tls=how.tls,
        api_key=how.api_key,
        prompt=how.prompt,
        send_sessions=how.send_sessions,
    )
    return GrpcTarget(options.target, settings)


def _measurement(options: Options, model: str, max_context: int | None) -> Measurement:
    workload, own = workload_of(options.when, options.what, options.agents, max_context)
    for name, rows in (("trace", workload.trace), ("lengths_from", workload.length_rows)):
        if cut := num_cut(rows, workload.limits):
            print(f"pdmesh loadtest: {name}: {cut} of {len(rows)} rows are longer than the limits and are cut", file=sys.stderr)
    seed = secrets.randbelow(2**31) if options.what.seed is None else options.what.seed
    return Measurement(
        workload=workload,
        book=book_of(options.goals.of(model), own),
        seed=seed,
        duration_s=options.when.duration_s,
        warmup_s=options.when.warmup_s,
        finish_sessions=options.when.finish_sessions,
        run=RunSettings(timeout_s=options.how.timeout_s, max_concurrency=options.how.max_concurrency),
        max_lateness_s=options.how.max_lateness_ms / 1e3,
        target=options.target,
        model=model,
        settings={**dump(options), "what.seed": seed},
    )


def _watch(options: Options) -> Watch:
    """Show the progress of a run, unless that is not wanted."""
    total_s = options.when.warmup_s + options.when.duration_s
    return lambda runner: Progress(sys.stderr, runner, total_s) if options.progress else nullcontext()


def _say(options: Options, text: str) -> None:
    if options.progress:
        print(text, file=sys.stderr, flush=True)


def _writable(name: str, path: str) -> None:
    """Check before the run: afterwards its result would be lost."""
    folder = Path(path).absolute().parent
    if path and (Path(path).is_dir() or not os.access(folder, os.W_OK)):
        raise ValueError(f"{name}: cannot write {path}; give a file in a folder that is there")


def _report(measured: Result, options: Options) -> None:
    if options.json:
        print(json.dumps(result.as_json(measured)))
    else:
        show(*reports_text.lines(measured))
    if options.output:
        result.write(measured, options.output)
    if options.html:
        Path(options.html).write_text(reports_html.page(measured), encoding="utf-8")


def _exit_code_of_search(found: Found) -> int:
    if found.interrupted:
        return EXIT_INTERRUPTED
    if all(capacity.rate is not None for capacity in found.capacities):
        return EXIT_OK
    return EXIT_INVALID if found.stopped else EXIT_MISSED


def _exit_code(measured: Result) -> int:
    if measured.interrupted:
        return EXIT_INTERRUPTED
    if not measured.valid:
        return EXIT_INVALID
    if not measured.summary.outcomes.get("ok") and set(measured.summary.outcomes) - {"cancelled"}:
        return EXIT_MISSED
    kept = [summary.attained for summary in (measured.summary, *measured.by_class.values())]
    return EXIT_MISSED if False in kept else EXIT_OK
