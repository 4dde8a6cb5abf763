"""How far logits are from the reference's: perplexity, KL divergence, greedy agreement. Sums in float64."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

# Rows compared at once: their float64 distributions (3 MB each way at 49 152 tokens) stay in the cache, which is twice as fast.
ROWS = 8


@dataclass(frozen=True)
class TokenScores:
    """Per predicted token. [T] each."""

    nll: Tensor  # float64, nats: -log q(the text's next token)
    kl: Tensor  # float64, nats: KL(reference || ours)
    agrees: Tensor  # bool: both distributions have the same most likely token (the lowest id of equals)


@dataclass(frozen=True)
class Accuracy:
    """Over all tokens. `kl_p99` is interpolated between ranks."""

    perplexity: float
    kl_mean: float
    kl_p99: float
    agreement: float


def score(reference: Tensor, ours: Tensor, targets: Tensor) -> TokenScores:
    """Compares logits [T, V] float32 row by row; `targets` [T] int64 are the text's next tokens.

    Raises ValueError for logits that are NaN or a row that has no distribution: a figure made of them would say nothing.
    """
    if reference.shape != ours.shape or targets.shape != ours.shape[:1]:
        raise ValueError(f"logits {tuple(ours.shape)}, reference {tuple(reference.shape)}, targets {tuple(targets.shape)} differ")
    blocks = (slice(start, start + ROWS) for start in range(0, len(targets), ROWS))
    return join([_score_rows(reference[rows], ours[rows], targets[rows]) for rows in blocks])


def join(parts: Sequence[TokenScores]) -> TokenScores:
    """The scores of several pieces of the text one after the other."""
    return TokenScores(*(torch.cat([getattr(part, name) for part in parts]) for name in ("nll", "kl", "agrees")))


def summarize(scores: TokenScores) -> Accuracy:
    return Accuracy(
        perplexity=scores.nll.mean().exp().item(),
        kl_mean=scores.kl.mean().item(),
        kl_p99=scores.kl.quantile(0.99).item(),
        agreement=scores.agrees.double().mean().item(),
    )


def perplexity_ratio(ours: TokenScores, theirs: TokenScores) -> tuple[float, float]:
    """Perplexity of ours over theirs on the same tokens, and the ratio's standard error by the tokens' paired differences."""
    difference = ours.nll - theirs.nll
    ratio = difference.mean().exp()
    return ratio.item(), (ratio * difference.std() / len(difference) ** 0.5).item()


def common_prefix(left: Sequence[int], right: Sequence[int]) -> int:
    """Tokens until the two differ, or until the shorter ends."""
    pairs = enumerate(zip(left, right, strict=False))
    return next((index for index, (a, b) in pairs if a != b), min(len(left), len(right)))


def _score_rows(reference: Tensor, ours: Tensor, targets: Tensor) -> TokenScores:
    log_p, log_q = _log_probabilities(reference, "the reference"), _log_probabilities(ours, "the engine")
    p = log_p.exp()
    # A token that the reference rules out adds nothing, whatever ours says of it (0 * -inf would be NaN).
    terms = torch.where(p > 0, p * (log_p - log_q), 0.0)
    return TokenScores(
        nll=-log_q.gather(1, targets[:, None])[:, 0],
        kl=terms.sum(-1).clamp_min(0.0),  # never negative but for rounding
        agrees=reference.argmax(-1) == ours.argmax(-1),
    )


def _log_probabilities(logits: Tensor, whose: str) -> Tensor:
    log_p = torch.log_softmax(logits.double(), dim=-1)
    # One check finds NaN, +inf and rows that are -inf throughout: each makes the whole row NaN.
    bad = log_p[:, 0].isnan()
    if bad.any():
        raise ValueError(f"{whose}: {int(bad.sum())} of {len(bad)} rows of logits hold NaN or infinity")
    return log_p
