"""`pdmesh distill-draft`: trains a small draft of a model on the model's own outputs."""

from __future__ import annotations

import json
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pdmesh.models import registry

if TYPE_CHECKING:
    from pdmesh.distillation.outputs import Output, Plan
    from pdmesh.distillation.trainer import Course

_GENERATING, _HELD_OUT = 0.4, 0.05  # shares of the time
_SAY_EVERY_S = 30.0
_SMALL_TOKENS, _SMALL_HELD_OUT, _SMALL_STEPS = 800, 300, 40


@dataclass(frozen=True)
class Options:
    """Train a draft model: pdmesh distill-draft MODEL --out FOLDER. It has a few of the model's layers and learns what the model
    itself generates; a worker's --draft-model FOLDER drafts with it. Two fifths of the time go to generating."""

    model: str = field(
        default=registry.DEFAULT_MODEL,
        metadata={"help": "known name or Hugging Face folder, also as a bare word", "positional": True},
    )
    out: str = field(default="", metadata={"help": "folder to write (needed)"})
    layers: int = field(default=4, metadata={"help": "layers of the draft, spread over the model's"})
    minutes: float = field(default=30.0, metadata={"help": "for all of it"})
    rate: float = field(default=5e-4, metadata={"help": "learning rate at the start"})
    threads: int = field(default=0, metadata={"help": "threads that compute; 0: one for each core"})
    seed: int = field(default=0, metadata={"help": "of the requests and of the order of learning"})
    small: bool = field(default=False, metadata={"help": "a few hundred tokens and steps, to see that all works"})

    def validate(self) -> None:
        """Raise ValueError that names the field."""
        if not self.out:
            raise ValueError("out: give the folder to write, such as --out my-draft")
        if self.layers < 1 or self.minutes <= 0 or self.rate <= 0 or self.threads < 0:
            raise ValueError("layers, minutes, rate: must be above 0, threads not below")


def run(options: Options) -> int:
    """Run the command; return 1 where the model cannot be loaded or the folder not be written."""
    from pdmesh.distillation.student import make_student, save_student  # torch and transformers, and not for --help

    try:
        folder, out = registry.ensure_model(options.model), Path(options.out)
        _check_writable(out)
        student = make_student(folder, options.layers)
        outputs, held_out, seconds = _outputs(options, folder)
        before = _report(student, held_out)
        _learn(student, outputs, options, seconds)
        after = _report(student, held_out)
        save_student(student, folder, out)
    except (registry.ModelError, ValueError, OSError) as error:
        print(f"pdmesh distill-draft: {error}", file=sys.stderr)
        return 1
    print(json.dumps({"folder": str(out), "layers": options.layers, "before": before, "after": after}))
    return 0


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _check_writable(out: Path) -> None:
    """Raise ValueError unless a model can be put there: asked before half an hour is spent on it."""
    if (out / "config.json").exists():
        raise ValueError(f"out: {out} holds a model already; give another folder, or remove it")
    try:
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=out):
            pass
    except OSError as error:
        raise ValueError(f"out: {out} cannot be written to ({error.strerror}); give a folder elsewhere") from error


def _outputs(options: Options, folder: Path) -> tuple[list[Output], list[Output], float]:
    """Return outputs to learn from, those that are held out, and the seconds that are left for learning."""
    from pdmesh.distillation.outputs import generate
    from pdmesh.engine.config import EngineConfig
    from pdmesh.engine.loader.loader import load_model

    started, all_s = time.monotonic(), options.minutes * 60
    loaded = load_model(EngineConfig(str(folder), num_threads=options.threads))
    plans = [_plan(options, all_s * share, held_out) for share, held_out in ((_GENERATING, False), (_HELD_OUT, True))]
    outputs, held_out = (generate(loaded, folder, plan, _say) for plan in plans)
    _say(f"{sum(len(output.tokens) for output in outputs)} tokens of {len(outputs)} outputs to learn from")
    return outputs, held_out, all_s - (time.monotonic() - started)


def _plan(options: Options, seconds: float, held_out: bool) -> Plan:
    from pdmesh.distillation.outputs import Plan

    plan = Plan(options.seed + held_out, seconds, held_out=held_out)
    if not options.small:
        return plan
    most = _SMALL_HELD_OUT if held_out else _SMALL_TOKENS
    return Plan(plan.seed, seconds, most_tokens=most, parallel=8, max_tokens=24, max_prompt=64, held_out=held_out)


def _course(options: Options) -> Course:
    from pdmesh.distillation.trainer import Course

    most = {"max_steps": _SMALL_STEPS, "batch_tokens": 256} if options.small else {}
    return Course(rate=options.rate, seed=options.seed, **most)


def _learn(student: Any, outputs: list[Output], options: Options, seconds: float) -> None:
    from pdmesh.distillation.trainer import Trainer

    course = _course(options)
    trainer = Trainer(student, outputs, course)
    started = said = time.monotonic()
    losses: list[float] = []
    while (progress := max((time.monotonic() - started) / max(seconds, 1e-9), len(losses) / course.max_steps)) < 1.0:
        losses.append(trainer.step(progress))
        if time.monotonic() - said > _SAY_EVERY_S:
            said = time.monotonic()
            recent = losses[-20:]
            _say(f"{progress:.0%}: step {len(losses)}, loss {sum(recent) / len(recent):.3f}")
    _say(f"{len(losses)} steps in {time.monotonic() - started:.0f} s")


def _report(student: Any, held_out: list[Output]) -> dict[str, float]:
    from pdmesh.distillation.trainer import follow

    followed = follow(student, held_out)
    return {
        "greedy_tokens": followed.num_tokens,
        "share_followed": round(followed.share, 4),
        "tokens_per_draft_of_4": round(followed.tokens_per_draft, 4),
    }
