"""The accuracy half of `make bench-cpu`: what each variant of the engine costs in quality, against `transformers` in fp32.

    python -m benchmarks.accuracy [--windows N] [--variants bfloat16,int8]

Every window of a fixed text goes through the engine's own model in chunks of prefill. Part of some goes once more, through
decode steps with the text's tokens, alone and in a batch: in a batch-invariant backend these logits are the same bits. Last,
greedy text from the beginnings of windows. Windows begin without a special token.

Not covered: what was lost before the checkpoint. One that was made from a 4-bit GGUF file loses next to nothing by int4.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.accuracy_metrics import TokenScores, common_prefix, join, perplexity_ratio, score, summarize
from benchmarks.accuracy_reference import Reference, reference_of
from benchmarks.accuracy_text import cut_windows, fixed_text
from benchmarks.accuracy_variant import Variant
from benchmarks.harness import Figure, say
from pdmesh.models.registry import DEFAULT_MODEL, ensure_model
from pdmesh.text.tokenizer import Tokenizer

Overrides = Mapping[str, object]
Window = tuple[int, ...]

# The variant that others are measured against, and how much of its perplexity each kind of weights may come to.
BASE = "bfloat16"
GOALS = {"int8": 1.01, "int4": 1.05}
VARIANTS: dict[str, Overrides] = {
    "float32": {"dtype": "float32"},
    BASE: {"dtype": "bfloat16"},
    "bfloat16 + int8 KV": {"dtype": "bfloat16", "kv_dtype": "int8"},
    "int8": {"quantization": "int8", "kv_dtype": "bfloat16"},
    "int8 + int8 KV": {"quantization": "int8", "kv_dtype": "int8"},
    "int4": {"quantization": "int4", "kv_dtype": "bfloat16"},
    "int4 + int8 KV": {"quantization": "int4", "kv_dtype": "int8"},
}
PEER = "transformers, fp32"


@dataclass(frozen=True)
class Sizes:
    """How much is measured. Prompts are the beginnings of windows, decode takes the first windows: no more than there are."""

    num_windows: int = 16
    window_tokens: int = 512
    num_prompts: int = 16
    prompt_tokens: int = 64
    new_tokens: int = 64
    decode_batch: int = 4
    decode_steps: int = 64


@dataclass(frozen=True)
class Measured:
    """One variant. `decode_difference` in logits, `common_prefix` in tokens."""

    scores: TokenScores
    decode_difference: float
    common_prefix: float


def accuracy_figures(folder: Path, variants: Mapping[str, Overrides], sizes: Sizes | None = None) -> list[Figure]:
    """Measures each variant (name -> fields of EngineConfig) on the model in `folder`, a Hugging Face folder.

    Ratios and their goals need the variant BASE among `variants`. A variant with a field `model` of its own is measured against
    the reference of `folder`. Raises ValueError for what the engine refuses and for logits that are not finite.
    """
    sizes = sizes or Sizes()
    windows = cut_windows(Tokenizer.load(folder), fixed_text(), sizes.num_windows, sizes.window_tokens)
    prompts = [window[: sizes.prompt_tokens] for window in windows.token_ids[: sizes.num_prompts]]
    say(f"accuracy on {sizes.num_windows} windows of {sizes.window_tokens} tokens, SHA-256 {windows.digest}")
    measured: dict[str, Measured] = {}
    with reference_of(folder, windows.token_ids, prompts, sizes.new_tokens) as reference:
        for name, overrides in variants.items():
            measured[name] = _measure(name, folder, overrides, windows.token_ids, prompts, reference, sizes)
    figures = [
        Figure(f"text: {sizes.num_windows} windows of {sizes.window_tokens} tokens", windows.digest, "SHA-256", "higher"),
        Figure(f"perplexity: {PEER}", reference.accuracy.perplexity, "perplexity", "lower"),
    ]
    for name, overrides in variants.items():
        figures += _figures(name, measured[name], sizes)
        if name != BASE and BASE in measured:
            figures.append(_ratio(name, overrides, measured))
    return figures


def _measure(
    name: str,
    folder: Path,
    overrides: Overrides,
    windows: Sequence[Window],
    prompts: Sequence[Window],
    reference: Reference,
    sizes: Sizes,
) -> Measured:
    """Loads one variant, measures it and gives its memory back."""
    started = time.monotonic()
    num_slots = max(sizes.decode_batch, len(prompts))
    slot_tokens = max(sizes.window_tokens, sizes.prompt_tokens + sizes.new_tokens)
    with closing(Variant(folder, overrides, slot_tokens=slot_tokens, num_slots=num_slots)) as variant:
        measured = Measured(
            scores=prefill_scores(variant, windows, reference),
            decode_difference=decode_difference(variant, windows[: sizes.decode_batch], sizes.decode_steps),
            common_prefix=mean_common_prefix(variant.greedy(prompts, sizes.new_tokens), reference.continuations),
        )
        say(f"{name} ({variant.numeric_mode}): {time.monotonic() - started:.0f} s, {summarize(measured.scores)}")
    return measured


def prefill_scores(variant: Variant, windows: Sequence[Window], reference: Reference) -> TokenScores:
    """All windows, every token but a window's last, which the text gives no successor."""
    parts = []
    for index, window in enumerate(windows):
        ours, expected = variant.prefill(0, window), reference.logits.read(index)
        parts.append(score(expected[:-1], ours[:-1], torch.tensor(window[1:])))
    return join(parts)


def decode_difference(variant: Variant, windows: Sequence[Window], steps: int) -> float:
    """Largest absolute difference of a logit between decode steps, alone and in a batch, and prefill. 0: the same bits."""
    starts = decode_starts(len(windows[0]), len(windows), steps)
    pairs = zip(windows, starts, strict=True)
    expected = torch.stack([variant.prefill(0, window)[start : start + steps] for window, start in pairs])
    alone = variant.decode(windows[-1:], starts[-1:], steps)
    together = variant.decode(windows, starts, steps)
    return max((alone - expected[-1:]).abs().max().item(), (together - expected).abs().max().item())


def decode_starts(length: int, count: int, steps: int) -> list[int]:
    """Where each of `count` sequences begins to decode: spread over a window, the last as late as `steps` allow, and each at
    another place in its block."""
    return [max(1, (length - steps) * (number + 1) // count - number) for number in range(count)]


def mean_common_prefix(outputs: Sequence[Sequence[int]], expected: Sequence[Sequence[int]]) -> float:
    return statistics.fmean(common_prefix(ours, theirs) for ours, theirs in zip(outputs, expected, strict=True))


def _figures(name: str, measured: Measured, sizes: Sizes) -> list[Figure]:
    accuracy = summarize(measured.scores)
    decode = f"decode (batch 1 and {min(sizes.decode_batch, sizes.num_windows)}) against prefill"
    return [
        Figure(f"perplexity: {name}", accuracy.perplexity, "perplexity", "lower", peer=PEER),
        Figure(f"KL divergence, mean: {name}", accuracy.kl_mean, "nats/token", "lower", limit=0.0, peer=PEER),
        Figure(f"KL divergence, 99th percentile: {name}", accuracy.kl_p99, "nats/token", "lower", limit=0.0, peer=PEER),
        Figure(f"greedy agreement: {name}", accuracy.agreement, "share of tokens", "higher", limit=1.0, peer=PEER),
        Figure(
            f"greedy text, mean common beginning: {name}",
            measured.common_prefix,
            f"of {sizes.new_tokens} tokens",
            "higher",
            limit=float(sizes.new_tokens),
            peer=PEER,
        ),
        Figure(f"largest difference, {decode}: {name}", measured.decode_difference, "logits", "lower", goal=0.0),
    ]


def _ratio(name: str, overrides: Overrides, measured: Mapping[str, Measured]) -> Figure:
    """How far the perplexity is from BASE's. The text is a sample: a ratio nearer to its goal than its error decides nothing."""
    ratio, error = perplexity_ratio(measured[name].scores, measured[BASE].scores)
    goal = GOALS.get(str(overrides.get("quantization")))
    unit = f"ratio (standard error {error:.4f})"
    return Figure(f"perplexity, of {BASE}'s: {name}", ratio, unit, "lower", goal=goal, peer=f"this engine, {BASE}")


def missed(figure: Figure) -> bool:
    """Whether a figure with a numeric goal falls short of it."""
    if not isinstance(figure.goal, int | float) or not isinstance(figure.value, int | float):
        return False
    return figure.value > figure.goal if figure.better == "lower" else figure.value < figure.goal


def table(figures: Sequence[Figure]) -> str:
    """One line per figure: name, value, unit and, where there is one, the goal."""
    width = max(len(figure.name) for figure in figures)
    return "\n".join(f"{figure.name:<{width}}  {_shown(figure)}" for figure in figures)


def _shown(figure: Figure) -> str:
    value = figure.value if isinstance(figure.value, str) else f"{figure.value:.6g}"
    goal = "" if figure.goal is None else f"   goal {figure.goal}: {'MISSED' if missed(figure) else 'met'}"
    return f"{value} {figure.unit}{goal}"


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """`variants` comes back as the chosen entries of VARIANTS."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.accuracy", description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default=DEFAULT_MODEL, help="known name or Hugging Face folder (default: %(default)s)")
    parser.add_argument("--windows", type=int, default=Sizes.num_windows, help="windows of text (default: %(default)s)")
    parser.add_argument("--variants", default=",".join(VARIANTS), help=f"of: {','.join(VARIANTS)} (default: all)")
    args = parser.parse_args(argv)
    if args.windows < 1:
        parser.error(f"--windows: {args.windows} is less than 1; give at least 1")
    names = [name.strip() for name in args.variants.split(",")]
    if unknown := [name for name in names if name not in VARIANTS]:
        parser.error(f"--variants: {', '.join(unknown)} not known; give some of {', '.join(VARIANTS)}")
    args.variants = {name: VARIANTS[name] for name in names}
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """0, or 1 when a goal is missed."""
    args = parse_args(argv)
    figures = accuracy_figures(ensure_model(args.model, say), args.variants, Sizes(num_windows=args.windows))
    print(table(figures))
    return 1 if any(missed(figure) for figure in figures) else 0


if __name__ == "__main__":
    sys.exit(main())
