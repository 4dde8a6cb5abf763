"""`pdmesh loadtest TARGET`: load that does not wait, and what became of it."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import signal
import sys
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path

from pdmesh.client.channel import DEFAULT_ADDRESS
from pdmesh.commands.loadtest_options import Goals, How, What, When, book_of, workload_of
from pdmesh.commands.options import flat
from pdmesh.loadtest import result
from pdmesh.loadtest.capacity import Search
from pdmesh.loadtest.measure import Found, Measurement, Watch, find_capacity, measure
from pdmesh.loadtest.progress import Progress
from pdmesh.loadtest.reports import html as report_html
from pdmesh.loadtest.reports import text as report_text
from pdmesh.loadtest.result import Result
from pdmesh.loadtest.runner import RunSettings
from pdmesh.loadtest.targets.grpc import GrpcSettings, GrpcTarget
from pdmesh.loadtest.targets.target import Target, TargetError
from pdmesh.loadtest.workload import num_cut
from pdmesh.runtime.config import dump
from pdmesh.terminal import palette

# A window with fewer requests says nothing of a share of them.
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
        """Raises ValueError that names the field."""
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
        if self.speaks_http and self.how.endpoint == "completions" and self.how.prompt == "tokens" and self.what.turns != "1":
            raise ValueError("how.prompt: answers of this protocol have no token ids; for --turns give words, or --endpoint chat")

    @property
    def speaks_http(self) -> bool:
        """Whether the target is a URL."""
        return "://" in self.target


def run(options: Options) -> int:
    """0: kept (or no objectives); 1: missed, or nothing was answered; 3: no such target; 5: too late itself; 130: interrupted."""
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
    # As Ctrl-C does: what was measured until then is reported.
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
        target, measurement, searches, _watch(options), lambda trial: _say(options, report_text.trial_line(trial))
    )
    _report(replace(found.result, capacity=found.as_json()), options)
    if not options.json:
        print("\n".join(["", *report_text.capacity_lines(found.capacities, palette(sys.stdout), found.stopped)]))
    return _exit_code_of_search(found)


def _open(options: Options) -> Target:
    how = options.how
    if options.speaks_http:
        # Only here: the client alone has no h11.
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
    )
    return GrpcTarget(options.target, settings)


def _measurement(options: Options, model: str, max_context: int | None) -> Measurement:
    workload, own = workload_of(options.when, options.what, max_context)
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
        run=RunSettings(timeout_s=options.how.timeout_s, max_concurrency=options.how.max_concurrency),
        max_lateness_s=options.how.max_lateness_ms / 1e3,
        target=options.target,
        model=model,
        settings={**dump(options), "what.seed": seed},
    )


def _watch(options: Options) -> Watch:
    """Shows how a run goes, unless that is not wanted."""
    total_s = options.when.warmup_s + options.when.duration_s
    return lambda runner: Progress(sys.stderr, runner, total_s) if options.progress else nullcontext()


def _say(options: Options, text: str) -> None:
    if options.progress:
        print(text, file=sys.stderr, flush=True)


def _writable(name: str, path: str) -> None:
    """Before the run: afterwards its result would be lost."""
    folder = Path(path).absolute().parent
    if path and (Path(path).is_dir() or not os.access(folder, os.W_OK)):
        raise ValueError(f"{name}: cannot write {path}; give a file in a folder that is there")


def _report(measured: Result, options: Options) -> None:
    if options.json:
        print(json.dumps(result.as_json(measured)))
    else:
        print("\n".join(report_text.lines(measured, palette(sys.stdout))))
    if options.output:
        result.write(measured, options.output)
    if options.html:
        Path(options.html).write_text(report_html.page(measured), encoding="utf-8")


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
