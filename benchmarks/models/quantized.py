"""What each format of quantized checkpoints costs: perplexity of a real model, rounded to the nearest in that format.

Two figures a format, on the same text: perplexity by the format's own numbers in float32, of the plain model's; and as a worker
runs the folder by default on the CPU kernels, where weights are taken as they are or rounded a second time, of its own numbers'.

The model's weights come from a 4-bit file (scale and minimum for each 32), so formats with that grid cost nothing here, and
would with other weights. Formats that calibrate (GPTQ, AWQ) are rounded without: these figures are of the reading, not of them.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F

from benchmarks.accuracy import Variant, cut_windows, fixed_text
from benchmarks.harness import MODEL, Figure, say
from pdmesh.models.registry import ensure_model
from pdmesh.text.tokenizer import Tokenizer
from tests.support.quantized_checkpoints import FORMATS, write_quantized

CHOSEN = (
    "gptq 4 bits g32, asymmetric", "gptq 4 bits g32, act-order", "gptq 8 bits by output", "awq g32", "compressed w8a8",
    "compressed w4a16 g32", "compressed fp8 by output", "fp8 in blocks", "bitsandbytes nf4", "bitsandbytes int8",
)  # fmt: skip
QUICK = CHOSEN[-2:]
WINDOWS, WINDOW_TOKENS = 4, 512
FLOAT32: Mapping[str, object] = {"quantization": "none", "dtype": "float32"}
Windows = Sequence[Sequence[int]]


def measure(*, quick: bool) -> list[Figure]:
    """Return the figures of all formats."""
    folder = Path(ensure_model(MODEL, say))
    windows = cut_windows(Tokenizer.load(folder), fixed_text(), WINDOWS, WINDOW_TOKENS).token_ids
    plain, _ = perplexity(folder, windows, **FLOAT32)
    found = [Figure(f"perplexity of {MODEL}, plain in float32", round(plain, 4), "perplexity", "lower")]
    for name in QUICK if quick else CHOSEN:
        found += _of_format(name, folder, windows, plain)
    return found


def _of_format(name: str, folder: Path, windows: Windows, plain: float) -> list[Figure]:
    with tempfile.TemporaryDirectory(prefix="pdmesh-formats-") as place:
        quantized, dense = write_quantized(folder, Path(place), FORMATS[name])
        own, _ = perplexity(dense, windows, **FLOAT32)
        run, weights = perplexity(quantized, windows)
    say(f"{name}: perplexity times {own / plain:.4f}, run as {weights} times {run / own:.4f} of that")
    label = f"perplexity of {MODEL} as {name}"
    return [
        Figure(f"{label}, in float32", round(own / plain, 4), "of the plain one's", "lower"),
        Figure(f"{label}, run by default as {weights}", round(run / own, 4), "of float32's", "lower", limit=1.0),
    ]


@torch.inference_mode()
def perplexity(folder: Path, windows: Windows, **settings: object) -> tuple[float, str]:
    """Return that of all tokens but each window's first, on the CPU kernels, and the weights' format there."""
    variant = Variant(folder, {"backend": "native", **settings}, slot_tokens=WINDOW_TOKENS, num_slots=1)
    try:
        losses = [F.cross_entropy(variant.prefill(0, window)[:-1], torch.tensor(window[1:])) for window in windows]
    finally:
        variant.close()
    return torch.stack(losses).mean().exp().item(), variant.numeric_mode.partition("-")[0]
