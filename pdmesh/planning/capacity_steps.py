"""What batches take on one worker: the arithmetic below `planning/capacity.py`. Pure; seconds and tokens."""

from pdmesh.planning.capacity_load import Goals, Lengths, Worker
from pdmesh.planning.latency_model import LatencyModel


def step_s(model: LatencyModel, batch: float, context: float) -> float:
    """A step in which `batch` sequences of `context` tokens get one more."""
    return model.fixed_s + batch * (model.per_sequence_s + model.per_context_token_s * context)


def roomy_batch(worker: Worker, lengths: Lengths) -> int:
    """Sequences that a worker has room for: its limit of sequences, its KV."""
    by_kv = int(worker.limits.kv_tokens / lengths.running_context)
    return max(1, min(worker.limits.max_num_seqs, by_kv))


def largest_batch(worker: Worker, lengths: Lengths, goals: Goals, share: float = 1.0) -> int:
    """Sequences that a worker can decode at once so that each gets its tokens within `share` of the TPOT objective.

    Where not even one can, the objective is one that nobody can keep, and the batch is what there is room for."""
    room = roomy_batch(worker, lengths)
    if goals.tpot_s is None:
        return room
    row_s = worker.model.per_sequence_s + worker.model.per_context_token_s * lengths.running_context
    left_s = goals.tpot_s * share - worker.model.fixed_s
    if left_s < row_s or row_s <= 0:
        return room
    return min(room, int(left_s / row_s + 1e-9))


def keeps_tpot(worker: Worker, lengths: Lengths, goals: Goals) -> bool:
    """Can a sequence alone on a worker get its tokens within the objective?"""
    return goals.tpot_s is None or step_s(worker.model, 1, lengths.running_context) <= goals.tpot_s


def decode_tokens_per_s(worker: Worker, lengths: Lengths, goals: Goals) -> float:
    """Of a worker that decodes the largest batch that keeps the TPOT objective."""
    batch = largest_batch(worker, lengths, goals)
    return batch / step_s(worker.model, batch, lengths.running_context)
