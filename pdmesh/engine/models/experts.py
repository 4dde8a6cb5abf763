"""A mixture of experts: a router chooses a few MLPs for each token (Shazeer et al., 2017), and their outputs are added up.

A token's result does not depend on the others: each row of a product is by itself, and contributions are added in the order of
the experts' numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy

import torch
from torch import Tensor

from pdmesh.engine.models.config import ExpertsConfig
from pdmesh.engine.models.layers import MLP, Linear, pad_rows

_ALPHA = 1.702  # GPT-OSS: of the sigmoid in its activation


class ClampedMLP:
    """Compute down((up(x) + 1) * gate(x) * sigmoid(1.702 gate(x))) with both clamped (GPT-OSS, 2025)."""

    def __init__(self, gate_up: Linear, down: Linear, limit: float) -> None:
        self.gate_up, self.down, self._limit = gate_up, down, limit

    def __call__(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).float().chunk(2, dim=-1)
        gate, up = gate.clamp(max=self._limit), up.clamp(-self._limit, self._limit)
        share = 1.0 / (1.0 + (-_ALPHA * gate).exp())
        return self.down(((up + 1.0) * (gate * share)).to(x.dtype))


class Experts:
    """Hold the router, the experts and the shared one. `counts` [num_experts] int64 adds up how many tokens each expert got."""

    def __init__(
        self,
        config: ExpertsConfig,
        *,
        router: Tensor,
        router_bias: Tensor | None,
        correction: Tensor | None,
        experts: Sequence[MLP | None],
        shared: MLP | None,
        shared_gate: Tensor | None,
    ) -> None:
        """`router` [num_experts, hidden_size], `shared_gate` [1, hidden_size]: float32, like what else is about scores.
        `experts`: None for one that another rank computes."""
        self.config, self.experts, self.shared = config, experts, shared
        self._router, self._bias, self._correction, self._shared_gate = router, router_bias, correction, shared_gate
        self.counts = torch.zeros(config.num_experts, dtype=torch.int64)
        self._over_ranks: Callable[[Tensor], Tensor] | None = None

    def summed(self, over_ranks: Callable[[Tensor], Tensor]) -> Experts:
        """Return these experts as one rank's part, of each expert or of their number: `over_ranks` sums the results."""
        part = copy(self)
        part._over_ranks = over_ranks
        return part

    def __call__(self, x: Tensor, num_tokens: int | None = None) -> Tensor:
        """See MLP. Rows from `num_tokens` on are padding: no expert gets them."""
        result = self._computed(x, num_tokens)
        return result if self._over_ranks is None else self._over_ranks(result)

    def _computed(self, x: Tensor, num_tokens: int | None) -> Tensor:
        logits = x.float() @ self._router.t()
        scores, chosen = route(self.config, logits if self._bias is None else logits + self._bias, self._correction)
        scores, chosen = scores[:num_tokens], chosen[:num_tokens]
        result = torch.zeros_like(x)
        numbers = chosen.cpu()
        for expert in sorted(set(numbers.flatten().tolist())):
            mlp = self.experts[expert]
            if mlp is None:
                continue
            rows, places = torch.where(chosen == expert)
            result.index_add_(0, rows, self._weighed(mlp, x[rows], scores[rows, places, None]))
        self.counts += torch.bincount(numbers.flatten(), minlength=self.config.num_experts)
        if self.shared is None:
            return result
        shared = self.shared(x)
        if self._shared_gate is not None:
            shared = (1.0 / (1.0 + (-(x.float() @ self._shared_gate.t())).exp())).to(x.dtype) * shared
        return result + shared

    def _weighed(self, mlp: MLP, x: Tensor, scores: Tensor) -> Tensor:
        """Return one expert's contributions to its tokens [M, hidden_size], by their scores [M, 1]."""
        if self.config.scales_input:
            return mlp(pad_rows((x * scores).to(x.dtype)))[: len(x)]
        return (mlp(pad_rows(x))[: len(x)] * scores).to(x.dtype)


def route(config: ExpertsConfig, logits: Tensor, correction: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return the chosen experts' scores, and their numbers: logits [M, num_experts] float32 -> two [M, top_k]."""
    if config.scoring == "softmax_topk":
        best, chosen = logits.topk(config.top_k, dim=-1)
        return best.softmax(-1) * config.scale, chosen
    if config.scoring == "sigmoid_topk":
        best, chosen = logits.topk(config.top_k, dim=-1)
        return best.sigmoid() * config.scale, chosen
    if config.scoring == "sparsemixer":
        return _sparsemixer(logits, config.router_jitter)
    scores = logits.sigmoid() if config.scoring == "sigmoid" else logits.softmax(-1)
    ranked = scores if correction is None else scores + correction
    if config.num_groups > 1:
        ranked = ranked.masked_fill(~_eligible(config, ranked), float("-inf"))
    chosen = ranked.topk(config.top_k, dim=-1)[1]
    own = scores.gather(1, chosen)
    if config.normalize:
        own = own / (own.sum(-1, keepdim=True) + (1e-20 if config.scoring == "sigmoid" else 0.0))
    return own * config.scale, chosen


def _eligible(config: ExpertsConfig, ranked: Tensor) -> Tensor:
    """Return a mask of the experts in the best groups (DeepSeek-V2, 2024, section 2.1)."""
    groups = ranked.view(len(ranked), config.num_groups, -1)
    ranks = groups.amax(-1) if config.group_rank == "max" else groups.topk(2, dim=-1)[0].sum(-1)
    best = torch.zeros_like(ranks, dtype=torch.bool).scatter_(1, ranks.topk(config.top_groups, dim=-1)[1], True)
    return best.unsqueeze(-1).expand_as(groups).reshape(ranked.shape)


def _sparsemixer(logits: Tensor, jitter: float) -> tuple[Tensor, Tensor]:
    """Choose two experts one after the other, each weighed against those near it (Liu et al., GRIN, 2024)."""
    scores, chosen, left = [], [], logits
    for _ in range(2):
        best, number = left.max(-1, keepdim=True)
        far = (best - logits) / logits.abs().clamp(min=best) > 2 * jitter
        scores.append(left.masked_fill(far, float("-inf")).softmax(-1).gather(1, number))
        chosen.append(number)
        left = left.scatter(1, number, float("-inf"))
    return torch.cat(scores, 1), torch.cat(chosen, 1)
