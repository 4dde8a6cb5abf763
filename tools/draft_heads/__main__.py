"""Trains draft heads for a model, from outputs that it generates itself.

    python -m tools.draft_heads [--model MODEL] [--out FILE] [--minutes 30]

Two fifths of the time go to generating, the rest to learning. The file is what an engine loads beside the model; how far the
model follows it on held-out prompts is printed, as one line of JSON for each way of drawing.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.harness import say
from pdmesh.engine.config import EngineConfig
from pdmesh.engine.loader.builder import open_checkpoint
from pdmesh.engine.loader.loader import LoadedModel, load_model
from pdmesh.engine.speculation.draft_heads.reference import TorchHeads, begin_states
from pdmesh.engine.speculation.draft_heads.weights import FILE, KINDS, DraftHeads, save_heads
from pdmesh.models.registry import DEFAULT_MODEL, ModelError, ensure_model
from tools.draft_heads.data import Outputs, Plan, generate
from tools.draft_heads.evaluate import follow
from tools.draft_heads.net import Course, Net, Shape, Target, Trainer

_GENERATING, _HELD_OUT = 0.4, 0.05  # shares of the time
_UNLIMITED = 10**9


@dataclass(frozen=True)
class Sizes:
    """What `--small` makes small."""

    parallel: int = 64
    max_tokens: int = 256
    most_tokens: int = _UNLIMITED
    most_held_out: int = 20_000
    max_steps: int = _UNLIMITED
    batch_tokens: int = 1024


SMALL = Sizes(parallel=8, max_tokens=24, most_tokens=600, most_held_out=200, max_steps=12, batch_tokens=128)


@dataclass(frozen=True)
class Settings:
    """The flags."""

    model: str
    out: Path | None
    minutes: float
    kind: str
    vocabulary: int
    depth: int
    width: int
    rate: float
    seed: int
    data: Path | None
    threads: int
    sizes: Sizes = Sizes()


def main(argv: Sequence[str] | None = None) -> None:
    settings = parse(argv)
    try:
        train(settings)
    except (ValueError, OSError, ModelError) as error:
        sys.exit(f"train_heads: {error}")


def train(settings: Settings) -> DraftHeads:
    """Raises ModelError for a model that is not there, ValueError for one that cannot be loaded or an unwritable `out`."""
    torch.manual_seed(settings.seed)
    model = ensure_model(settings.model)
    out = settings.out or model / FILE
    check_writable(out)
    loaded, target = load_model(EngineConfig(str(model), num_threads=settings.threads)), target_of(model)
    with nullcontext(settings.data) if settings.data else tempfile.TemporaryDirectory(prefix="pdmesh-heads-") as folder:
        started = time.monotonic()
        source = _Source(loaded, target, model, settings, Path(folder))
        outputs, held_out = source.outputs(held_out=False), source.outputs(held_out=True)
        left_s = settings.minutes * 60 - (time.monotonic() - started)
        heads = learn(target, outputs, settings, loaded.weights_hash, left_s)
        save_heads(heads, out)
        say(f"wrote {out}")
        for line in report(heads, target, held_out, settings, outputs.num_tokens):
            print(json.dumps(line), flush=True)
    return heads


def check_writable(out: Path) -> None:
    """Raises ValueError unless a file can be put there: asked before half an hour is spent on what goes into it."""
    if out.is_dir():
        raise ValueError(f"--out: {out} is a folder; give the file to write, such as {out / FILE}")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=out.parent):
            pass
    except OSError as error:
        raise ValueError(f"--out: {out.parent} cannot be written to ({error.strerror}); give a file elsewhere") from error


def target_of(model: Path) -> Target:
    """Raises ValueError as `open_checkpoint` does."""
    source, _ = open_checkpoint(model)
    embedding, config = source.get("model.embed_tokens.weight"), source.config
    head = embedding if config.tie_word_embeddings else source.get("lm_head.weight")
    return Target(embedding.float(), head.float(), source.get("model.norm.weight").float())


@dataclass(frozen=True)
class _Source:
    """Where outputs come from."""

    loaded: LoadedModel
    target: Target
    model: Path
    settings: Settings
    folder: Path

    def outputs(self, *, held_out: bool) -> Outputs:
        part, settings, sizes = self.folder / ("held_out" if held_out else "outputs"), self.settings, self.settings.sizes
        if Outputs.are_in(part):
            say(f"{part}: as generated before")
            return Outputs.load(part)
        plan = Plan(
            seed=settings.seed + held_out,
            minutes=settings.minutes * (_HELD_OUT if held_out else _GENERATING),
            most_tokens=sizes.most_held_out if held_out else sizes.most_tokens,
            parallel=sizes.parallel,
            max_tokens=sizes.max_tokens,
            held_out=held_out,
        )
        return generate(self.loaded, self.model, plan, part, lambda hidden: begin_states(hidden, self.target.norm), say)


def learn(target: Target, outputs: Outputs, settings: Settings, trained_for: str, seconds: float) -> DraftHeads:
    """Trains for so many seconds, or until the sizes' steps are done."""
    token_ids = most_used(outputs, settings.vocabulary, len(target.embedding))
    net = Net(Shape(settings.kind, settings.depth, settings.width), target, token_ids, outputs, settings.seed)
    course = Course(settings.sizes.max_steps, settings.sizes.batch_tokens, settings.rate, settings.seed)
    trainer = Trainer(net, course, outputs)
    started = said = time.monotonic()
    losses: list[float] = []
    while (progress := max((time.monotonic() - started) / max(seconds, 1e-9), len(losses) / course.max_steps)) < 1.0:
        losses.append(trainer.step(progress))
        if time.monotonic() - said > 30:
            said = time.monotonic()
            recent = losses[-50:]
            say(f"{progress:.0%}: step {len(losses)}, loss {sum(recent) / len(recent):.3f}")
    say(f"{len(losses)} steps in {time.monotonic() - started:.0f} s")
    return net.heads(trained_for)


def most_used(outputs: Outputs, count: int, vocab_size: int) -> torch.Tensor:
    """The `count` tokens that the outputs use most, ascending; where they use fewer, the lowest others: a tokenizer's lowest
    tokens are its commonest."""
    counts = torch.bincount(outputs.tokens, minlength=vocab_size)
    return counts.sort(descending=True, stable=True).indices[: min(count, vocab_size)].sort().values


def report(heads: DraftHeads, target: Target, held_out: Outputs, settings: Settings, num_tokens: int) -> list[dict[str, object]]:
    """How far the model follows, greedy and sampled."""
    maths = TorchHeads(heads, target.embedding)
    known = torch.isin(held_out.tokens, heads.token_ids).float().mean()
    about = {"kind": heads.kind, "vocabulary": len(heads.token_ids), "width": settings.width, "trained_on_tokens": num_tokens}
    lines = []
    for greedy in (True, False):
        followed = follow(maths, held_out, greedy=greedy)
        lines.append(
            {
                **about,
                "drawn": "greedy" if greedy else "temperature 0.8",
                "drafts": followed.num_drafts,
                "accepted": [round(share, 4) for share in followed.accepted],
                "tokens_per_draft": round(followed.tokens_per_draft, 4),
                "known_tokens": round(float(known), 4),
            }
        )
    return lines


def parse(argv: Sequence[str] | None) -> Settings:
    parser = argparse.ArgumentParser(prog="python -m tools.draft_heads", description=__doc__.split("\n")[0])
    parser.add_argument("--model", default=DEFAULT_MODEL, help="a known model, a model folder or a .gguf file")
    parser.add_argument(
        "--out", type=Path, help=f"file to write (default: {FILE} in the model's folder; for a .gguf file, in the cache)"
    )
    parser.add_argument("--minutes", type=float, default=30.0, help="for all of it")
    parser.add_argument("--kind", choices=KINDS, default="recurrent")
    parser.add_argument("--vocabulary", type=int, default=8192, help="tokens that can be drafted: those the outputs use most")
    parser.add_argument("--depth", type=int, default=4, help="tokens that are guessed at most")
    parser.add_argument("--width", type=int, default=1152, help="inner width of a block")
    parser.add_argument("--rate", type=float, default=1e-3, help="learning rate")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=0, help="threads that compute; 0: one for each core")
    parser.add_argument("--data", type=Path, metavar="FOLDER", help="keep the outputs there, or learn from those that are there")
    parser.add_argument("--small", action="store_true", help="a few seconds, for tests: too little to learn anything")
    flags = vars(parser.parse_args(argv))
    sizes = SMALL if flags.pop("small") else Sizes()
    for name in ("minutes", "vocabulary", "depth", "width", "rate"):
        if not flags[name] > 0:
            parser.error(f"--{name}: {flags[name]} is not more than 0")
    if flags["threads"] < 0:
        parser.error(f"--threads: {flags['threads']} is less than 0")
    return Settings(**flags, sizes=sizes)


if __name__ == "__main__":
    main()
