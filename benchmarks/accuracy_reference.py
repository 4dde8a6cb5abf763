"""The reference for accuracy: `transformers` in fp32, computed once for all variants.

Logits of a window (512 tokens x 49 152 x 4 bytes = 100 MB) go to a temporary file. Computing them again for each variant would
take as long as the slowest of these; float16 on disk would add an error as large as those that are measured.
"""

import math
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import Tensor

from benchmarks.accuracy_metrics import Accuracy, join, score, summarize


class LogitsFile:
    """Logits [length, vocab] float32 of one window after the other in a file."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._shapes: list[tuple[int, ...]] = []
        self._starts = [0]

    def append(self, logits: Tensor) -> None:
        """Raises OSError when the disk is full; TMPDIR chooses another."""
        self._file.seek(self._starts[-1])
        logits.contiguous().numpy().tofile(self._file)
        self._shapes.append(tuple(logits.shape))
        self._starts.append(self._file.tell())

    def read(self, index: int) -> Tensor:
        shape = self._shapes[index]
        self._file.seek(self._starts[index])
        return torch.from_numpy(np.fromfile(self._file, dtype=np.float32, count=math.prod(shape))).view(shape)


@dataclass(frozen=True)
class Reference:
    """What transformers says. `logits` by window; `continuations` of the prompts, greedy."""

    logits: LogitsFile
    accuracy: Accuracy
    continuations: list[list[int]]


@contextmanager
def reference_of(
    folder: Path, windows: Sequence[Sequence[int]], prompts: Sequence[Sequence[int]], new_tokens: int
) -> Iterator[Reference]:
    """Computes the reference on all windows and prompts, which are equally long. The logits go when the context ends."""
    from transformers import AutoModelForCausalLM

    # The file has no name: it goes with its descriptor, however we end.
    with tempfile.TemporaryFile(prefix="pdmesh-accuracy-") as file:
        logits = LogitsFile(file)
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        accuracy = _run_windows(model, windows, logits)
        continuations = _continue(model, prompts, new_tokens)
        del model  # the variants need the memory
        yield Reference(logits, accuracy, continuations)


@torch.inference_mode()
def _run_windows(model: Any, windows: Sequence[Sequence[int]], file: LogitsFile) -> Accuracy:
    parts = []
    for window in windows:
        ids = torch.tensor([list(window)])
        logits = model(ids).logits[0].float()
        file.append(logits)
        parts.append(score(logits[:-1], logits[:-1], ids[0, 1:]))
    return summarize(join(parts))


@torch.inference_mode()
def _continue(model: Any, prompts: Sequence[Sequence[int]], new_tokens: int) -> list[list[int]]:
    """Greedy tokens past any end of sequence. One batch of equal lengths needs no padding, and no mask that shifts positions."""
    ids = torch.tensor([list(prompt) for prompt in prompts])
    settings = {"max_new_tokens": new_tokens, "do_sample": False, "eos_token_id": None}
    output = model.generate(ids, attention_mask=torch.ones_like(ids), **settings)
    continuations: list[list[int]] = output[:, ids.shape[1] :].tolist()
    return continuations
