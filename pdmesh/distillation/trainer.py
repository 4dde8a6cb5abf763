"""Training of a student on outputs, and how far it follows the teacher on those that it has not seen."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pdmesh.distillation.outputs import Output

_IGNORED = -100  # a label that has no part in the loss: prompts and padding


@dataclass(frozen=True)
class Course:
    """Say how a student learns: `batch_tokens` of outputs a step, `rate` at the start, falling to nothing along a half cosine."""

    batch_tokens: int = 1024
    rate: float = 5e-4
    max_steps: int = 10**9
    seed: int = 0


class Trainer:
    """Minimize the cross entropy of the teacher's tokens."""

    def __init__(self, student: Any, outputs: Sequence[Output], course: Course) -> None:
        self._student, self._course = student, course
        self._batches = batches(outputs, course)
        self._optimizer = torch.optim.AdamW(student.parameters(), lr=course.rate, weight_decay=0.01, betas=(0.9, 0.95))
        student.train()

    def step(self, progress: float) -> float:
        """Learn one batch; `progress`, from 0 to 1, sets the rate. Return the loss."""
        token_ids, labels = next(self._batches)
        for group in self._optimizer.param_groups:
            group["lr"] = self._course.rate * 0.5 * (1 + torch.cos(torch.tensor(progress * torch.pi)).item())
        loss = loss_of(self._student, token_ids, labels)
        self._optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self._student.parameters(), 1.0)
        self._optimizer.step()
        return float(loss.detach())


def loss_of(student: Any, token_ids: Tensor, labels: Tensor) -> Tensor:
    """Return the mean cross entropy of the labels, each of which follows its token."""
    logits: Tensor = student(token_ids).logits[:, :-1]
    return F.cross_entropy(logits.flatten(0, 1).float(), labels[:, 1:].flatten(), ignore_index=_IGNORED)


def batches(outputs: Sequence[Output], course: Course) -> Iterator[tuple[Tensor, Tensor]]:
    """Give (tokens, labels) [sequences, longest] without end, in an order drawn anew in each pass; sequences of about one length
    lie together, so that little is padding."""
    if not outputs:
        raise ValueError("outputs: none were generated; give more minutes")
    source = random.Random(course.seed)
    ordered = sorted(outputs, key=lambda output: len(output.prompt) + len(output.tokens))
    groups, group, longest = list[list[Output]](), list[Output](), 0
    for output in ordered:
        longest = len(output.prompt) + len(output.tokens)
        if group and longest * (len(group) + 1) > course.batch_tokens:
            groups.append(group)
            group = []
        group.append(output)
    groups.append(group)
    while True:
        source.shuffle(groups)
        yield from map(_batch, groups)


def _batch(outputs: Sequence[Output]) -> tuple[Tensor, Tensor]:
    longest = max(len(output.prompt) + len(output.tokens) for output in outputs)
    token_ids = torch.zeros((len(outputs), longest), dtype=torch.int64)
    labels = torch.full_like(token_ids, _IGNORED)
    for row, output in enumerate(outputs):
        end = len(output.prompt) + len(output.tokens)
        token_ids[row, :end] = torch.tensor([*output.prompt, *output.tokens])
        labels[row, len(output.prompt) : end] = torch.tensor(output.tokens)
    return token_ids, labels


@dataclass(frozen=True)
class Followed:
    """Hold how far greedy outputs follow the student: `share` of their tokens are its likeliest; a draft of `depth` tokens keeps
    `tokens_per_draft` of them on average."""

    num_tokens: int
    share: float
    depth: int
    tokens_per_draft: float


@torch.inference_mode()
def follow(student: Any, outputs: Sequence[Output], depth: int = 4) -> Followed:
    """Return how far the greedy outputs among `outputs` follow the student."""
    student.eval()
    hits = [_hits(student, output) for output in outputs if output.is_greedy and len(output.tokens) > depth]
    if not hits:
        raise ValueError("outputs: no greedy one was held out; give more minutes")
    total = sum(len(own) for own in hits)
    kept = [_kept(own, at, depth) for own in hits for at in range(len(own) - depth)]
    return Followed(total, sum(map(sum, hits)) / total, depth, sum(kept) / max(1, len(kept)))


def _hits(student: Any, output: Output) -> list[bool]:
    token_ids = torch.tensor([[*output.prompt, *output.tokens]])
    guesses = student(token_ids).logits[0].argmax(-1).tolist()
    first = len(output.prompt)
    return [guesses[first + index - 1] == token for index, token in enumerate(output.tokens)]


def _kept(hits: Sequence[bool], at: int, depth: int) -> int:
    """Return how many tokens of a draft are kept that begins at this place."""
    for count in range(depth):
        if not hits[at + count]:
            return count
    return depth
