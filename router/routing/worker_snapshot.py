"""What the policy sees of a worker: its last report, and what this router has sent there since. Pure values."""

import enum
from dataclasses import dataclass

from kvtransfer.layout import Layout, Transports
from pdmesh.adapter_id import AdapterId
from pdmesh.planning.latency_model import LatencyModel

WorkerKey = tuple[str, int]
"""Address and epoch: what tells incarnations apart, as an epoch never comes again."""


class Mode(enum.Enum):
    """Where the prompt is computed: on the decode worker itself, or on a prefill worker."""

    LOCAL = "local"
    REMOTE = "remote"


@dataclass(slots=True)
class WorkerSnapshot:
    """One worker that lives and takes work. `identity` is compared for equality only.

    It is never changed. It is not frozen because thousands are made in a second, and freezing takes three times as long.

    `figures_at`: monotonic seconds at which its numbers were true; `dispatched_*` is what this router sent there since.
    `num_decoding` sequences attend to `decode_context` tokens in every step; `num_starting` are prefilled or reserved and will
    decode. `latency` is None while it does not say how fast it is; `max_num_batched_tokens` 0: it does not say that.
    `pace_s`: the worker sizes its steps so that its sequences get tokens this often, 0: it does not; `slack_s`: they are ahead.
    `tokens_per_row`: what a sequence's part of a step gives lately, `computed_per_row` what is computed for it, tokens that were
    guessed included.
    `penalty_s`: seconds by which everything placed there is thought to cost more than its numbers say.
    """

    worker_id: str
    address: str
    epoch: int
    model: str
    prefill: bool
    decode: bool
    identity: tuple[object, ...]
    layout: Layout
    transports: Transports
    host_id: str
    block_size: int
    max_context: int
    max_num_seqs: int
    num_total_blocks: int
    num_free_blocks: int
    num_seqs: int
    num_waiting_tokens: int
    num_prefilling: int = 0
    num_decoding: int = 0
    decode_context: int = 0
    num_starting: int = 0
    max_num_batched_tokens: int = 0
    latency: LatencyModel | None = None
    figures_at: float = 0.0
    penalty_s: float = 0.0
    pace_s: float = 0.0
    slack_s: float = 0.0
    tokens_per_row: float = 1.0
    computed_per_row: float = 1.0
    dispatched_seqs: int = 0
    dispatched_blocks: int = 0
    dispatched_tokens: int = 0
    dispatched_decodes: int = 0
    dispatched_context: int = 0
    adapters: frozenset[AdapterId] = frozenset()

    @property
    def key(self) -> WorkerKey:
        """What tells incarnations apart."""
        return (self.address, self.epoch)

    @property
    def kind(self) -> tuple[object, ...]:
        """What decides a request's tokens: it stays with one kind."""
        return (self.identity, self.layout.kv_dtype)

    def idle_tpot_s(self, num_sequences: int, context: int) -> float | None:
        """Return the seconds of a token with so many sequences here and no others. None while it does not say how fast it is."""
        model = self.latency
        if model is None:
            return None
        guessed_s = model.per_sequence_s * num_sequences * (self.computed_per_row - 1)
        return (model.decode_s(num_sequences, context) + guessed_s) / self.tokens_per_row

    @property
    def tokens_ahead(self) -> int:
        """Prompt tokens that this worker has still to compute."""
        return self.num_waiting_tokens + self.dispatched_tokens
