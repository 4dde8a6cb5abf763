"""Draft heads while they learn: distillation of the model's own distributions, over the reduced vocabulary.

At each token of an output the heads begin with the state that it was drawn from, and guess the next `depth` tokens, given those
before. What they are to say is not the token that was drawn but how the model's own head sees the state that it was drawn from
(Zhou et al., DistillSpec, 2024): that says more than one token does, and fits greedy and sampled outputs alike.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pdmesh.engine.speculation.draft_heads.reference import apply_block, unit
from pdmesh.engine.speculation.draft_heads.weights import Block, DraftHeads
from tools.draft_heads.data import Outputs

_FADE = 0.5  # weight of a place to the one before it, and the share that is computed of it: about as often it is reached
_CLIP = 1.0
_FIRST_TOKENS = 65536  # that the first maps are fitted to
_RIDGE = 1e-2


@dataclass(frozen=True)
class Shape:
    """What is trained."""

    kind: str
    depth: int
    width: int


@dataclass(frozen=True)
class Target:
    """What heads need of their model: `embedding`, `head` [vocab, H], `norm` [H] before its head."""

    embedding: Tensor
    head: Tensor
    norm: Tensor


class Net(nn.Module):
    """Float32 weights of draft heads. `teacher` [V', H]: the model's own head."""

    def __init__(self, shape: Shape, target: Target, token_ids: Tensor, outputs: Outputs, seed: int) -> None:
        """Blocks begin as the linear maps that come closest to the model's states (`first_maps`)."""
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        hidden, num_blocks = target.head.shape[1], 1 if shape.kind == "recurrent" else shape.depth
        maps, spread = first_maps(outputs, target.embedding, num_blocks)
        self.shape, self.token_ids, self.norm = shape, token_ids, target.norm
        self.teacher, self.embedding = target.head[token_ids].float().clone(), target.embedding
        self.head = nn.Parameter(self.teacher.clone())
        self.blocks = nn.ModuleList()
        for mix in maps:
            gate, up = (
                torch.randn(shape.width, 2 * hidden, generator=generator) / spread / (2 * hidden) ** 0.5 for _ in range(2)
            )
            tensors = {"mix": mix, "gate": gate, "up": up, "down": torch.zeros(hidden, shape.width)}
            self.blocks.append(nn.ParameterDict({name: nn.Parameter(tensor) for name, tensor in tensors.items()}))

    def block(self, number: int) -> Block:
        return Block(**{name: self.blocks[number][name] for name in ("mix", "gate", "up", "down")})  # type: ignore[index]

    def guess(self, place: int, state: Tensor, begin: Tensor, root: Tensor, last: Tensor) -> Tensor:
        """The states [n, H] at a place: of those before and the tokens drawn from them [n], or of the beginning and its token."""
        if self.shape.kind == "recurrent":
            return apply_block(self.block(0), state, unit(self.embedding[last].float()))
        return apply_block(self.block(place), begin, unit(self.embedding[root].float()))

    def heads(self, trained_for: str) -> DraftHeads:
        blocks = tuple(self.block(number) for number in range(len(self.blocks)))
        kept = tuple(Block(*(tensor.detach().clone() for tensor in vars(block).values())) for block in blocks)
        hidden, head = self.head.shape[1], self.head.detach().clone()
        return DraftHeads(self.shape.kind, hidden, self.shape.depth, trained_for, self.token_ids, self.norm, head, kept)


def first_maps(outputs: Outputs, embedding: Tensor, count: int) -> tuple[list[Tensor], Tensor]:
    """Of each place: the map [H, 2H] from the inputs of a block (state and unit embedding) to the state there, by ridge
    regression over some of the outputs. And how far the inputs vary [2H]."""
    used = min(outputs.num_tokens, _FIRST_TOKENS)
    states, tokens = outputs.states[:used].float(), outputs.tokens[:used]
    inputs = torch.cat((states, unit(embedding[tokens].float())), dim=1)
    ends = torch.zeros(used + 1, dtype=torch.bool)
    ends[outputs.starts[outputs.starts <= used]] = True
    apart = ends.cumsum(0)[:used]  # which output a token is of
    spread = inputs.std(0).clamp_min(inputs.std(0).mean() * 1e-2)
    maps = []
    for place in range(1, count + 1):
        is_one = apart[place:] == apart[:-place]
        x, y = inputs[:-place][is_one] / spread, states[place:][is_one]
        ridge = torch.eye(x.shape[1]) * len(x) * _RIDGE
        maps.append(torch.linalg.solve(x.T @ x + ridge, x.T @ y).T / spread)
    return maps, spread


def loss_of(net: Net, begin: Tensor, tokens: Tensor, is_last: Tensor, share: float = 1.0) -> Tensor:
    """begin [N, H], tokens [N]: whole outputs, one after the other; `is_last` [N]: it ends there. The cross-entropy to the
    model's distribution, a mean over the places, each weighted as seldom as it is reached.

    With `share` below 1 each place is computed for that share of those before it only, drawn at random.
    """
    with torch.no_grad():
        wanted = F.linear(begin, net.teacher).float().softmax(-1)
    rows = (~is_last).nonzero().flatten()
    state, total, weight = begin[rows], begin.new_zeros(()), 0.0
    for place in range(net.shape.depth):
        if not len(rows):
            break
        state = net.guess(place, state, begin[rows], tokens[rows], tokens[rows + place])
        logits, target = F.linear(state, net.head).float(), wanted[rows + place + 1]
        total = total + _FADE**place * (logits.logsumexp(-1) - (logits * target).sum(-1)).mean()
        weight += _FADE**place
        goes_on = ~is_last[rows + place + 1]
        if share < 1.0:
            goes_on &= torch.rand(len(rows)) < share
        rows, state = rows[goes_on], state[goes_on]
    return total / weight


def batches(outputs: Outputs, num_tokens: int, generator: torch.Generator) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Whole outputs in random order, about `num_tokens` at a time, again and again: states, tokens, whether an output ends."""
    while True:
        picked: list[int] = []
        size = 0
        for index in torch.randperm(len(outputs), generator=generator).tolist():
            picked.append(index)
            size += int(outputs.starts[index + 1] - outputs.starts[index])
            if size >= num_tokens:
                yield _batch(outputs, picked)
                picked, size = [], 0
        if picked:
            yield _batch(outputs, picked)


def _batch(outputs: Outputs, picked: list[int]) -> tuple[Tensor, Tensor, Tensor]:
    parts = [slice(int(outputs.starts[index]), int(outputs.starts[index + 1])) for index in picked]
    tokens = torch.cat([outputs.tokens[part] for part in parts])
    is_last = torch.zeros(len(tokens), dtype=torch.bool)
    is_last[torch.tensor([part.stop - part.start for part in parts]).cumsum(0) - 1] = True
    return torch.cat([outputs.states[part] for part in parts]).float(), tokens, is_last


@dataclass(frozen=True)
class Course:
    """How long and how fast to learn."""

    max_steps: int
    batch_tokens: int
    rate: float
    seed: int


class Trainer:
    """AdamW; the rate rises for the first hundredth and falls to nothing at the end."""

    def __init__(self, net: Net, course: Course, outputs: Outputs) -> None:
        self.net, self.course = net, course
        self._batches = batches(outputs, course.batch_tokens, torch.Generator().manual_seed(course.seed))
        maps, head = [p for name, p in net.named_parameters() if name != "head"], [net.head]
        groups = [{"params": maps, "rate": course.rate}, {"params": head, "rate": course.rate * 0.2}]
        self._optimizer = torch.optim.AdamW(groups, lr=course.rate, betas=(0.9, 0.95), weight_decay=0.01)

    def step(self, progress: float) -> float:
        """`progress`: the share of the course that is over. Returns the loss."""
        for group in self._optimizer.param_groups:
            group["lr"] = group["rate"] * min(1.0, (progress + 1e-3) * 50) * max(0.0, 1.0 - progress)
        begin, tokens, is_last = next(self._batches)
        with torch.autocast("cpu", torch.bfloat16, enabled=torch.ops.mkldnn._is_mkldnn_bf16_supported()):
            loss = loss_of(self.net, begin, tokens, is_last, _FADE)
        self._optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(self.net.parameters(), _CLIP)
        self._optimizer.step()
        return loss.item()
