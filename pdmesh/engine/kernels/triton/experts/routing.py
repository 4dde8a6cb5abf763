# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"
"""Which experts each token takes, and in which order the products take the tokens. Nothing here waits for the device.

    x [T, hidden]  ─ router ─►  logits [T, E]  ─ route ─►  scores, chosen [T, K]  ─ sort ─►  order, starts

    chosen            token 0: 2 0   token 1: 0 3   token 2: (padding)          places 0 .. T K - 1, K of each token
    order             1 2 | | 0 | 3                                             places by expert, then as they are
    starts            0   2 2   3   4                                           where each expert's begin, and the end

The scores are those of pdmesh.engine.models.experts.route, of which only the order of sums and the last bits of exponentials
differ. Equal scores: the lower number is taken. Each token's numbers come from its own row alone, by the same operations whatever
the batch. A token of padding takes no expert. Where logits are not finite the choice is arbitrary, but there is one.

Limits: the router reads its weights (E * hidden * 4 bytes, of the L2 cache: 1 MB for 128 experts of 2048) once for 4 tokens; each
program of the sort reads all choices twice (4 T K bytes). Counted, not measured.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from pdmesh.engine.kernels.triton.launching import settle_keys
from pdmesh.engine.models.config import ExpertsConfig

_ROWS, _OUTPUTS, _COLUMNS = 4, 8, 128  # of a program of the router: 32 sums a thread
SORTED = 1024  # choices that a program of the sort reads at a time


@triton.jit(do_not_specialize=["num_rows"])
def router_kernel(
    x, router, bias, logits, num_rows, width, num_outputs, stride_x, HAS_BIAS: tl.constexpr, ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Program (ROWS tokens, OUTPUTS outputs): float32 products, each column's sum by itself to the end."""
    m = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    n = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    total = tl.zeros([ROWS, OUTPUTS, COLUMNS], tl.float32)
    for first in range(0, width, COLUMNS):
        k = first + tl.arange(0, COLUMNS)
        inside = (k < width)[None, :]
        here = tl.load(x + m.to(tl.int64)[:, None] * stride_x + k[None, :], mask=(m < num_rows)[:, None] & inside, other=0.0)
        weight = tl.load(router + n[:, None] * width + k[None, :], mask=(n < num_outputs)[:, None] & inside, other=0.0)
        total += here.to(tl.float32)[:, None, :] * weight[None, :, :]
    result = tl.sum(total, 2)
    if HAS_BIAS:
        result += tl.load(bias + n, mask=n < num_outputs, other=0.0)[None, :]
    place = m.to(tl.int64)[:, None] * num_outputs + n[None, :]
    tl.store(logits + place, result, mask=(m < num_rows)[:, None] & (n < num_outputs)[None, :])


@triton.jit
def _eligible(ranked, groups, members, GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr, RANK: tl.constexpr):
    """Return whether each group [GROUPS padded] is among the best (DeepSeek-V2, 2024, section 2.1)."""
    best = tl.max(ranked, 1)
    if RANK == "top2":
        first = tl.min(tl.where(ranked == best[:, None], members, 1 << 20), 1)
        best += tl.max(tl.where(members == first[:, None], float("-inf"), ranked), 1)
    best = tl.where(groups < GROUPS, best, float("-inf"))
    eligible = groups < 0
    for _ in tl.static_range(TOP_GROUPS):
        pick = tl.min(tl.where(best == tl.max(best, 0), groups, GROUPS - 1), 0)
        eligible |= groups == pick
        best = tl.where(groups == pick, float("-inf"), best)
    return eligible


@triton.jit
def _share_of_best(logits, ranked, there, distance):
    """Return the best's share of the softmax over those of `ranked` that are near it (Liu et al., GRIN, 2024)."""
    best = tl.max(ranked)
    logits = tl.where(there, logits, best)
    is_far = tl.div_rn(best - logits, tl.maximum(tl.abs(logits), best)) > distance
    return tl.div_rn(1.0, tl.sum(tl.where(there & (is_far == 0), tl.exp(ranked - best), 0.0)))


@triton.jit
def route_kernel(
    logits, correction, slots, scores, chosen, stride, factor, distance,
    EXPERTS: tl.constexpr, TOP_K: tl.constexpr, TOP_PAD: tl.constexpr, GROUPS: tl.constexpr, GROUPS_PAD: tl.constexpr,
    MEMBERS_PAD: tl.constexpr, TOP_GROUPS: tl.constexpr, RANK: tl.constexpr, SCORING: tl.constexpr, NORMALIZES: tl.constexpr,
    HAS_CORRECTION: tl.constexpr,
):  # fmt: skip
    """Program: a token. Its experts lie in a table of groups and their members. `distance` of logits, in shares of the larger,
    up to which experts compete in sparsemixer."""
    token = tl.program_id(0).to(tl.int64)
    groups, members = tl.arange(0, GROUPS_PAD), tl.arange(0, MEMBERS_PAD)[None, :]
    there = (groups < GROUPS)[:, None] & (members < EXPERTS // GROUPS)
    number = tl.where(there, groups[:, None] * (EXPERTS // GROUPS) + members, EXPERTS)
    value = tl.load(logits + token * stride + number, mask=there, other=float("-inf"))
    if SCORING == "sigmoid":
        value = tl.div_rn(1.0, 1.0 + tl.exp(-value))
    elif SCORING == "softmax":
        value = tl.exp(value - tl.max(value))
        value = tl.div_rn(value, tl.sum(value))
    ranked = value
    if HAS_CORRECTION:
        ranked += tl.load(correction + number, mask=there, other=0.0)
    ranked = tl.where(there, ranked, float("-inf"))
    if GROUPS > 1:
        ranked = tl.where(_eligible(ranked, groups, members, GROUPS, TOP_GROUPS, RANK)[:, None], ranked, float("-inf"))
    rank = tl.arange(0, TOP_PAD)
    own, picks = tl.zeros([TOP_PAD], tl.float32), tl.zeros([TOP_PAD], tl.int32)
    for index in tl.static_range(TOP_K):
        pick = tl.minimum(tl.min(tl.where(ranked == tl.max(ranked), number, EXPERTS)), EXPERTS - 1)
        if SCORING == "sparsemixer":
            score = _share_of_best(value, ranked, there, distance)
        else:
            score = tl.sum(tl.where(number == pick, value, 0.0))
        own = tl.where(rank == index, score, own)
        picks = tl.where(rank == index, pick, picks)
        ranked = tl.where(number == pick, float("-inf"), ranked)
    if SCORING == "softmax_topk":
        own = tl.where(rank < TOP_K, own, float("-inf"))
        own = tl.exp(own - tl.max(own, 0))
        own = tl.div_rn(own, tl.sum(own, 0))
    elif NORMALIZES:
        own = tl.div_rn(own, tl.sum(own, 0) + (1e-20 if SCORING == "sigmoid" else 0.0))
    place = token * TOP_K + rank
    tl.store(scores + place, own * factor, mask=rank < TOP_K)
    tl.store(chosen + place, tl.where(tl.load(slots + token) >= 0, picks, EXPERTS), mask=rank < TOP_K)


@triton.jit(do_not_specialize=["num_choices"])
def sort_kernel(chosen, order, starts, counts, num_choices, EXPERTS: tl.constexpr, BLOCK: tl.constexpr):
    """Program: an expert, or the end behind the last one. It finds its own choices, and counts those of experts before it."""
    expert = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    before, own = tl.zeros([BLOCK], tl.int32), tl.zeros([BLOCK], tl.int32)
    for first in range(0, num_choices, BLOCK):
        choice = tl.load(chosen + first + at, mask=first + at < num_choices, other=EXPERTS)
        before += (choice < expert).to(tl.int32)
        own += (choice == expert).to(tl.int32)
    start = tl.sum(before, 0)
    tl.store(starts + expert, start)
    if expert < EXPERTS:
        tl.store(counts + expert, tl.load(counts + expert) + tl.sum(own, 0))
        for first in range(0, num_choices, BLOCK):
            choice = tl.load(chosen + first + at, mask=first + at < num_choices, other=EXPERTS)
            is_own = (choice == expert).to(tl.int32)
            tl.store(order + start + tl.cumsum(is_own, 0) - is_own, first + at, mask=is_own > 0)
            start += tl.sum(is_own, 0)


settle_keys(globals())


@dataclass(frozen=True)
class Routed:
    """Hold which experts the tokens of a step take; see above. M = T * top_k places."""

    logits: Tensor  # [T, E] float32, and one more of a shared expert's gate
    scores: Tensor  # [T, top_k] float32
    chosen: Tensor  # [T, top_k] int32; num_experts for padding
    order: Tensor  # [M] int32; behind the last start not defined
    starts: Tensor  # [num_experts + 1] int32


def routed(
    config: ExpertsConfig,
    x: Tensor,
    slots: Tensor,
    router: Tensor,
    bias: Tensor | None,
    correction: Tensor | None,
    counts: Tensor,
) -> Routed:
    """Route x [T, hidden] by router [E, hidden] (or a row more), bias as many, correction [E], float32. `counts` [E] int64: the
    number of choices is added. slots [T] int32: negative for padding."""
    num_tokens, num_choices = len(x), len(x) * config.top_k
    logits = x.new_empty((num_tokens, len(router)), dtype=torch.float32)
    scores = x.new_empty((num_tokens, config.top_k), dtype=torch.float32)
    chosen = x.new_empty((num_tokens, config.top_k), dtype=torch.int32)
    order = x.new_empty(num_choices, dtype=torch.int32)
    starts = x.new_empty(config.num_experts + 1, dtype=torch.int32)
    if num_tokens:
        _score(x, router, bias, logits)
        _choose(config, logits, correction, slots, scores, chosen)
    sort_kernel[(config.num_experts + 1,)](
        chosen, order, starts, counts, num_choices, EXPERTS=config.num_experts, BLOCK=SORTED, num_warps=4
    )  # fmt: skip
    return Routed(logits, scores, chosen, order, starts)


def _score(x: Tensor, router: Tensor, bias: Tensor | None, logits: Tensor) -> None:
    router_kernel[(triton.cdiv(len(x), _ROWS), triton.cdiv(len(router), _OUTPUTS))](
        x, router, router if bias is None else bias, logits, len(x), x.shape[1], len(router), x.stride(0),
        HAS_BIAS=bias is not None, ROWS=_ROWS, OUTPUTS=_OUTPUTS, COLUMNS=_COLUMNS, num_warps=4,
    )  # fmt: skip


def _choose(
    config: ExpertsConfig, logits: Tensor, correction: Tensor | None, slots: Tensor, scores: Tensor, chosen: Tensor
) -> None:
    groups = config.num_groups
    route_kernel[(len(logits),)](
        logits, logits if correction is None else correction, slots, scores, chosen, logits.stride(0), config.scale,
        2.0 * config.router_jitter,
        EXPERTS=config.num_experts, TOP_K=config.top_k, TOP_PAD=triton.next_power_of_2(config.top_k), GROUPS=groups,
        GROUPS_PAD=triton.next_power_of_2(groups), MEMBERS_PAD=triton.next_power_of_2(config.num_experts // groups),
        TOP_GROUPS=config.top_groups, RANK=config.group_rank, SCORING=config.scoring, NORMALIZES=config.normalize,
        HAS_CORRECTION=correction is not None, num_warps=1,
    )  # fmt: skip
