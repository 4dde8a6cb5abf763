"""The policy's view of a worker: its last report, and what this router has sent there since. Pure values."""

import enum
import math
from dataclasses import dataclass

from kvtransfer.layout import Layout, Transports
from pdmesh.adapter_id import AdapterId
from pdmesh.planning.latency_model import LatencyModel

WorkerKey = tuple[str, int]
"""Address and epoch. They tell incarnations of a worker apart, as no epoch is used twice."""


class Mode(enum.Enum):
    """Name where the prompt is computed: LOCAL on the decode worker (aggregated), REMOTE on a prefill worker (disaggregated)."""

    LOCAL = "local"
    REMOTE = "remote"


@dataclass(slots=True)
class WorkerSnapshot:
    """Hold the state of one worker that is alive and takes work. `identity` is compared for equality only.

    It is never changed. It is not frozen, because thousands are made in a second and freezing takes three times as long.

    `figures_at`: monotonic seconds at which its numbers were true; `dispatched_*` is what this router sent there since.
    `num_decoding` sequences attend to `decode_context` tokens in every step; `num_starting` are prefilled or reserved and will
    decode. `latency` is None while the worker does not report its speed; `max_num_batched_tokens` 0: not reported.
    `num_oldest_tokens` are those that the oldest prompt lacks, `dispatched_longest` those of the longest prompt sent;
    `dispatched_since`: monotonic seconds at which the first prompt sent came there, infinite: not known; `dispatched_latest_at`:
    the latest one, of `dispatched_latest` tokens.
    `pace_s`: TPOT to which the worker limits its steps with prompts, for what was sent too, 0: none; `slack_s`: time that its
    sequences are ahead of that.
    `tokens_per_row`: tokens that a sequence gets from a step lately, `computed_per_row` those computed for it, drafted tokens
    included.
    `engine`: its name, for people. `hands_over_choices`: it may be one end of the hand-off of a request with several choices;
    `keeps_pace`: its steps hold prompts back so that running sequences keep their TPOT objectives; `is_reproducible`: a request
    that it computes again draws the same tokens; `shares_prompts`: a prompt much shorter than the oldest one shares its steps;
    `can_embed`: it computes embeddings. `fetch_token_s`: in which a token's KV comes from another worker, 0: it fetches none;
    `restore_token_s`: in which it comes from the worker's own tiers, 0: it has none; `private_tiers`: no other worker fetches
    from these. `revision` of the deployment that it belongs to: only workers of one pair.
    `penalty_s`: estimated seconds by which a placement there costs more than the numbers say.
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
    num_oldest_tokens: int = 0
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
    dispatched_longest: int = 0
    dispatched_since: float = math.inf
    dispatched_latest: int = 0
    dispatched_latest_at: float = -math.inf
    adapters: frozenset[AdapterId] = frozenset()
    engine: str = ""
    hands_over_choices: bool = True
    keeps_pace: bool = True
    is_reproducible: bool = True
    shares_prompts: bool = True
    can_embed: bool = True
    fetch_token_s: float = 0.0
    restore_token_s: float = 0.0
    private_tiers: bool = False
    revision: str = ""

    @property
    def key(self) -> WorkerKey:
        """Return the key of this incarnation of the worker."""
        return (self.address, self.epoch)

    @property
    def kind(self) -> tuple[object, ...]:
        """Return what a request's tokens depend on. A started request stays on workers of one kind."""
        return (self.identity, self.layout.kv_dtype)

    def idle_tpot_s(self, num_sequences: int, context: int) -> float | None:
        """Return the TPOT in seconds with `num_sequences` here and no others; None while the worker does not report its speed."""
        model = self.latency
        if model is None:
            return None
        drafted_s = model.per_sequence_s * num_sequences * (self.computed_per_row - 1)
        return (model.decode_s(num_sequences, context) + drafted_s) / self.tokens_per_row

    @property
    def tokens_ahead(self) -> int:
        """Return the prompt tokens that this worker has still to compute."""
        return self.num_waiting_tokens + self.dispatched_tokens
