"""`pdmesh doctor`: checks what this machine has and lacks, what that costs, and what to do."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from rich.console import RenderableType
from rich.text import Text

from pdmesh.doctor import machine, software, transfer
from pdmesh.doctor.machine import Check, State, examine
from pdmesh.launcher.plan import EMBEDDED_REDIS
from pdmesh.models.catalogue import DEFAULT_MODEL
from pdmesh.terminal import show


@dataclass(frozen=True)
class Options:
    """Check what this machine has and lacks for a mesh: pdmesh doctor. Exits with 1 only if no mesh can run here."""

    json: bool = field(default=False, metadata={"help": "write JSON"})
    port: int = field(default=8100, metadata={"help": "port for the router"})
    http_port: int = field(default=8000, metadata={"help": "port for its HTTP API"})
    console_port: int = field(default=8200, metadata={"help": "port for the console's page"})
    redis: str = field(default=EMBEDDED_REDIS, metadata={"help": "embedded, or the URL of a Redis to check", "secret": True})
    model: str = field(default=DEFAULT_MODEL, metadata={"help": "model to be served"})

    def validate(self) -> None:
        """Raise ValueError that names the field."""
        for name in ("port", "http_port", "console_port"):
            if not 0 <= getattr(self, name) <= 65535:
                raise ValueError(f"{name}: must be between 0 and 65535")


def run(options: Options) -> int:
    """Run the command; return 1 if something is missing that a mesh cannot run without, else 0."""
    findings = examine(_checks(options))
    can_run = not any(finding.blocks for finding in findings)
    if options.json:
        print(json.dumps({"can_run": can_run, "checks": [_as_json(finding) for finding in findings]}, indent=2))
    else:
        show(*report(findings))
    return 0 if can_run else 1


def _checks(options: Options) -> list[tuple[str, Callable[[], Check]]]:
    services = "routers and workers cannot start"
    engine = "workers cannot compute"
    package = software.package
    return [
        ("python", software.python),
        ("grpcio", partial(package, "grpcio", "services", services, module="grpc")),
        ("grpcio-health-checking", partial(package, "grpcio-health-checking", "services", services, module="grpc_health")),
        ("tokenizers", partial(package, "tokenizers", "services", services)),
        ("starlette", partial(package, "starlette", "services", services)),
        ("uvicorn", partial(package, "uvicorn", "services", services)),
        ("torch", partial(package, "torch", "worker", engine)),
        ("safetensors", partial(package, "safetensors", "worker", engine)),
        ("crc32c", partial(package, "crc32c", "worker", engine)),
        ("cryptography", partial(package, "cryptography", "services", "`pdmesh up` and `pdmesh tls init` cannot start")),
        ("transformers", partial(package, "transformers", "local", "GGUF files cannot be converted", required=False)),
        ("engines", software.engines),
        ("redis", partial(software.redis, options.redis)),
        ("model", partial(software.model_files, options.model)),
        ("disk", partial(software.disk, options.model)),
        ("cores", machine.cores),
        ("cpu features", machine.cpu_features),
        ("cpu kernels", software.cpu_kernels),
        ("memory", machine.memory),
        ("gpu", machine.gpu),
        ("shared memory", machine.shared_memory),
        ("loopback", machine.loopback),
        (transfer.NAME, transfer.transports),
        (f"port {options.port}", partial(machine.port, options.port)),
        (f"port {options.http_port}", partial(machine.port, options.http_port, "--http-port")),
        (f"port {options.console_port}", partial(machine.port, options.console_port, "--console-port")),
        ("open files", machine.open_files),
        ("compiler", machine.compiler),
        *machine.capabilities(),
    ]


def report(findings: list[Check]) -> list[RenderableType]:
    """Return a line for each finding; under what is not OK, its cost and its remedy. The verdict comes last."""
    width = max(len(finding.name) for finding in findings)
    blocking = [finding.name for finding in findings if finding.blocks]
    verdict = Text(f"a mesh cannot run here: {', '.join(blocking)}", "bad") if blocking else Text("a mesh can run here", "good")
    return [*(line for finding in findings for line in _lines(finding, width)), "", verdict]


def _lines(finding: Check, width: int) -> list[RenderableType]:
    style = "bad" if finding.blocks else "good" if finding.state is State.OK else "warning"
    state = (finding.state.value.ljust(7), style)
    lines: list[RenderableType] = [Text.assemble(state, f"  {finding.name.ljust(width)}  {finding.found}")]
    if finding.state is not State.OK:
        margin = " " * (width + 11)
        lines += [f"{margin}costs: {finding.cost}", f"{margin}do:    {finding.remedy}"]
    return lines


def _as_json(finding: Check) -> dict[str, object]:
    return {
        "name": finding.name,
        "state": finding.state.value,
        "found": finding.found,
        "cost": finding.cost,
        "remedy": finding.remedy,
        "required": finding.required,
    }
