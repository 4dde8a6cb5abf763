"""`make bench-sparsity`: is it worth skipping rows of an MLP whose activation is small (contextual sparsity)?

A gated MLP is down(silu(gate(x)) · up(x)). Once gate(x) is known, rows of `up` and columns of `down` where silu(gate) is small
could be left in memory (Liu et al., Deja Vu, 2023; Liu et al., TEAL, 2024). Decode reads every weight once a step, so the
most that can be won is bytes: with a share s of rows skipped, and u the share of all weights in `up` and `down`,

    gain <= 1 / (1 - s · u)

Three ways to choose rows are measured, each by the perplexity that it costs:

    rows     the smallest |silu(gate)| of a token: what a kernel can know before it reads `up`
    panels   16 neighbours at once, by their largest: what the kernels' layout (pdmesh/engine/loader/pack.py) could skip
    oracle   the smallest |silu(gate) · up|: what a perfect predictor would know
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.accuracy import cut_windows, fixed_text
from benchmarks.harness import MODEL, Figure, parser_of, say, show, write
from pdmesh.models.registry import ensure_model
from pdmesh.text.tokenizer import Tokenizer

SHARES = (0.1, 0.2, 0.3, 0.4, 0.5)
MOST_COST = 1.01
GOAL = 1.2
PANEL = 16
Choice = Callable[[Tensor, Tensor, float], Tensor]


def rows(gate: Tensor, up: Tensor, share: float) -> Tensor:
    """Return a mask of the rows that are kept: all but the share with the smallest activation."""
    return _above(gate.abs(), share)


def panels(gate: Tensor, up: Tensor, share: float) -> Tensor:
    """Return the mask that keeps whole panels, each by its largest activation."""
    most = gate.abs().view(*gate.shape[:-1], -1, PANEL).amax(-1)
    return _above(most, share).repeat_interleave(PANEL, -1)


def oracle(gate: Tensor, up: Tensor, share: float) -> Tensor:
    """Return the mask by what the rows contribute."""
    return _above((gate * up).abs(), share)


def _above(sizes: Tensor, share: float) -> Tensor:
    count = int(sizes.shape[-1] * share)
    return sizes > sizes.kthvalue(count, dim=-1, keepdim=True).values if count else torch.ones_like(sizes, dtype=torch.bool)


CHOICES: dict[str, Choice] = {"rows": rows, "panels": panels, "oracle": oracle}


class Skipping:
    """Replace the MLPs of a transformers model by ones that skip what `choice` says."""

    def __init__(self, model: Any) -> None:
        self.choice: Choice | None = None
        self.share = 0.0
        for layer in model.model.layers:
            layer.mlp.forward = self._forward_of(layer.mlp)

    def _forward_of(self, mlp: Any) -> Callable[[Tensor], Tensor]:
        def forward(x: Tensor) -> Tensor:
            gate, up = F.silu(mlp.gate_proj(x)), mlp.up_proj(x)
            kept = gate if self.choice is None else gate * self.choice(gate, up, self.share)
            result: Tensor = mlp.down_proj(kept * up)
            return result

        return forward


@torch.inference_mode()
def perplexity(model: Any, windows: Sequence[Sequence[int]]) -> float:
    """Return that of all tokens but each window's first."""
    total = count = 0.0
    for window in windows:
        token_ids = torch.tensor([window])
        logits = model(token_ids).logits[0, :-1]
        total += F.cross_entropy(logits, token_ids[0, 1:], reduction="sum").item()
        count += len(window) - 1
    return math.exp(total / count)


def skippable(model: Any) -> float:
    """Return the share of the weights read in a decode step that lies in `up` and `down`; the embedding is not read."""
    layers = model.model.layers
    inside = sum(mlp.up_proj.weight.numel() + mlp.down_proj.weight.numel() for mlp in (layer.mlp for layer in layers))
    read = sum(p.numel() for p in layers.parameters()) + model.lm_head.weight.numel()
    return float(inside / read)


def figures(model: Any, windows: Sequence[Sequence[int]], shares: Sequence[float]) -> list[Figure]:
    """Measure every way and share; of each way the largest share that costs little, and the gain that it bounds."""
    skipping, inside = Skipping(model), skippable(model)
    plain = perplexity(model, windows)
    found = [Figure("weights of a decode step that lie in up and down", round(inside, 4), "share", "higher")]
    for name, choice in CHOICES.items():
        skipping.choice, cheap = choice, 0.0
        for share in shares:
            skipping.share = share
            cost = perplexity(model, windows) / plain
            say(f"{name}, {share:.0%} skipped: perplexity times {cost:.4f}")
            found.append(Figure(f"{name}: perplexity with {share:.0%} skipped", round(cost, 4), "of the plain one's", "lower"))
            cheap = share if cost <= MOST_COST else cheap
        bound = 1 / (1 - cheap * inside)
        found.append(Figure(f"{name}: most gain at 1 % of perplexity", round(bound, 3), "times", "higher", goal=GOAL))
    return found


def main(argv: Sequence[str] | None = None) -> int:
    from transformers import AutoModelForCausalLM

    parser = parser_of("benchmarks.sparsity", __doc__)
    parser.add_argument("--model", default=MODEL, help="known name or Hugging Face folder (default: %(default)s)")
    parser.add_argument("--windows", type=int, default=4, help="windows of 512 tokens (default: %(default)s)")
    args = parser.parse_args(argv)
    folder = Path(ensure_model(args.model, say))
    windows = cut_windows(Tokenizer.load(folder), fixed_text(), args.windows, 512).token_ids
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    found = figures(model, windows, SHARES)
    show(found)
    write("sparsity", found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
