"""What one router knows of one worker: its latest report, and what was sent there since. As `router/worker.py`. Pure."""

from functools import lru_cache

from kvtransfer.layout import Layout
from pdmesh.simulator.workers.spec import WorkerSpec
from pdmesh.simulator.workers.stats import Figures
from router.fleet.worker import Dispatched, counted
from router.routing.worker_reports import NOTHING
from router.routing.worker_snapshot import WorkerKey, WorkerView

MODEL = "simulated"
IDENTITY: tuple[object, ...] = (MODEL,)
TRANSPORTS = frozenset({"tcp"})
EPOCH = 1


class Ledger:
    """One worker's. `figures` None: the router has not heard of it, or hears no more."""

    def __init__(self, name: str, spec: WorkerSpec) -> None:
        self.name, self.spec = name, spec
        self.key: WorkerKey = (name, EPOCH)
        self.figures: Figures | None = None
        self._layout = _layout(spec.block_size)
        self._dispatched: list[Dispatched] = []

    def dispatched(self, sent: Dispatched) -> None:
        """Count what was just sent, until the reports contain it or `done`."""
        self._dispatched.append(sent)

    def released(self, sent: Dispatched, now: float) -> None:
        """What was sent has come to its end: a report may still contain it."""
        self.dispatched(sent.ended(now))

    def done(self, sent: Dispatched) -> bool:
        """The worker has no more work with what was sent; False: that was known."""
        if sent not in self._dispatched:
            return False
        self._dispatched.remove(sent)
        return True

    def report(self, figures: Figures) -> None:
        """This has come."""
        self.figures = figures
        if self._dispatched:
            self._dispatched = [sent for sent in self._dispatched if not sent.is_contained(figures.taken_at)]

    @property
    def is_settled(self) -> bool:
        """Nothing was sent that the report does not contain."""
        return not self._dispatched

    def view(self) -> WorkerView | None:
        """What the policy sees; None while it takes no work."""
        figures, spec = self.figures, self.spec
        if figures is None or figures.draining:
            return None
        sent = counted(self._dispatched) if self._dispatched else NOTHING
        return WorkerView(
            worker_id=self.name,
            address=self.name,
            epoch=EPOCH,
            model=MODEL,
            prefill=figures.prefill,
            decode=figures.decode,
            identity=IDENTITY,
            layout=self._layout,
            transports=TRANSPORTS,
            host_id=spec.host or self.name,
            block_size=spec.block_size,
            max_context=spec.max_context,
            max_num_seqs=spec.max_num_seqs,
            num_total_blocks=figures.num_total_blocks,
            num_free_blocks=figures.num_free_blocks,
            num_seqs=figures.num_running + figures.num_waiting + figures.num_reserved + figures.num_held,
            num_waiting_tokens=figures.num_waiting_tokens,
            num_prefilling=figures.num_prefilling,
            num_decoding=figures.num_decoding,
            decode_context=figures.decode_context,
            num_starting=figures.num_reserved + figures.num_prefilling,
            max_num_batched_tokens=spec.max_num_batched_tokens,
            latency=spec.speed,
            figures_at=figures.taken_at,
            pace_s=figures.pace_s,
            slack_s=figures.slack_s,
            dispatched_seqs=sent.seqs,
            dispatched_blocks=sent.blocks,
            dispatched_tokens=sent.tokens,
            dispatched_decodes=sent.decodes,
            dispatched_context=sent.context,
        )


@lru_cache(maxsize=64)
def _layout(block_size: int) -> Layout:
    """Equal ones as one object: comparing them then takes no time."""
    return Layout(block_size, "float32")
