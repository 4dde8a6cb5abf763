"""`pdmesh profile`: shows where the time of an engine's step goes on this machine, and the least that each part would take."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rich.console import RenderableType
from rich.text import Text

from pdmesh.models import registry
from pdmesh.terminal import breakdown, duration, show

if TYPE_CHECKING:
    from pdmesh.doctor.step_profile import StepProfile


@dataclass(frozen=True)
class Options:
    """Show where the time of an engine's step goes: pdmesh profile. The engine runs in this process, on the CPU."""

    model: str = field(
        default=registry.DEFAULT_MODEL,
        metadata={"help": "known name, Hugging Face folder or .gguf file, also as a bare word", "positional": True},
    )
    batches: tuple[int, ...] = field(default=(1, 16), metadata={"help": "decode steps of so many sequences"})
    context: int = field(default=160, metadata={"help": "tokens of each sequence before it decodes"})
    prefill: tuple[int, ...] = field(default=(512,), metadata={"help": "prefill steps of so many tokens"})
    steps: int = field(default=64, metadata={"help": "steps of each kind (an eighth of them for prefill)"})
    threads: int = field(default=0, metadata={"help": "threads that compute; 0: one for each core"})
    dtype: str = field(default="auto", metadata={"help": "as a worker's --dtype"})
    quantization: str = field(default="auto", metadata={"help": "as a worker's --quantization"})
    kv_dtype: str = field(default="auto", metadata={"help": "as a worker's --kv-dtype"})
    json: bool = field(default=False, metadata={"help": "write JSON"})

    def validate(self) -> None:
        """Raise ValueError that names the field."""
        for name in ("batches", "prefill"):
            if any(number < 1 for number in getattr(self, name)):
                raise ValueError(f"{name}: give numbers of 1 or more, or nothing")
        if not self.batches and not self.prefill:
            raise ValueError("batches: give one at least, or a prefill")
        for name in ("context", "steps"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: must be 1 or more")


def run(options: Options) -> int:
    """Run the command; return 1 if the model cannot be loaded, or not by the CPU kernels, which alone know their stages."""
    from pdmesh.doctor.step_profile import Case, StepProfiler
    from pdmesh.engine.config import EngineConfig  # with the profiler: torch, which takes a second, and not for --help

    try:
        folder = registry.ensure_model(options.model)
        config = EngineConfig(
            model=str(folder),
            dtype=options.dtype,
            quantization=options.quantization,
            kv_dtype=options.kv_dtype,
            num_threads=options.threads,
        )
        cases = [Case(batch, options.context) for batch in options.batches] + [Case(0, tokens) for tokens in options.prefill]
        profiler = StepProfiler(config, cases, options.steps, _note)
    except (registry.ModelError, ValueError) as error:
        print(f"pdmesh profile: {error}", file=sys.stderr)
        return 1
    profiles = [profiler.run(case) for case in cases]
    if options.json:
        print(_as_json(profiler.numeric_mode, profiles))
    else:
        show(*_report(profiler.numeric_mode, profiles))
    return 0


def _report(numeric_mode: str, profiles: list[StepProfile]) -> list[RenderableType]:
    parts: list[RenderableType] = [f"numbers and kernels: {numeric_mode}"]
    for profile in profiles:
        title = f"{profile.case.name}: {duration(profile.wall_ns)} a step, {profile.tokens_per_s:,.0f} tokens/s"
        parts += ["", Text(title, "bold"), breakdown(profile.parts, profile.wall_ns, profile.limits)]
        parts.append(f"the named parts explain {100 * profile.accounted_share:.1f} % of a step without a clock inside")
    return parts


def _as_json(numeric_mode: str, profiles: list[StepProfile]) -> str:
    steps = [
        {
            "step": profile.case.name,
            "wall_ns": profile.wall_ns,
            "plain_ns": profile.plain_ns,
            "parts_ns": profile.parts,
            "limits_ns": profile.limits,
        }
        for profile in profiles
    ]
    return json.dumps({"numeric_mode": numeric_mode, "steps": steps}, indent=2)


def _note(text: str) -> None:
    print(f"pdmesh profile: {text}", file=sys.stderr, flush=True)
