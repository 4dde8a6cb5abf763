"""What a worker counts and measures: the catalogue."""

from pdmesh.runtime.telemetry.metrics import counter, gauge, histogram

_STEP_S = (0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 2.5)
_BATCH = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0)
_TRANSFER_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)

STEP_TIME = histogram("pdmesh.engine.step", "A step, by what it computed: prefill, decode, mixed", _STEP_S, ("kind",), unit="s")
BATCH_SEQUENCES = histogram("pdmesh.engine.batch.sequences", "Sequences that decode in a step with any", _BATCH)
BATCH_TOKENS = histogram("pdmesh.engine.batch.tokens", "Tokens that a step computes", _BATCH)
OPERATIONS = counter("pdmesh.engine.operations", "Operations of the model; a multiplication and an addition are two")
BYTES_MOVED = counter("pdmesh.engine.moved", "Weights and KV that steps read and wrote, by the model's shape", unit="By")
BUSY = counter("pdmesh.engine.busy", "Time in steps", unit="s")
PEAK_OPERATIONS = gauge("pdmesh.engine.peak.operations", "Operations a second that this machine was measured to reach")
PEAK_BANDWIDTH = gauge("pdmesh.engine.peak.bandwidth", "Bytes a second that this machine was measured to read")

HANDOFF_TIME = histogram("pdmesh.kv.push", "From the beginning of a push to its commit", _TRANSFER_S, ("transport",), unit="s")
HANDOFF_EXPOSED = histogram(
    "pdmesh.kv.exposed", "From the first token's draw to the commit", _TRANSFER_S, ("transport",), unit="s"
)
HANDOFF_BYTES = counter("pdmesh.kv.sent", "KV that was pushed and committed", ("transport",), unit="By")
HANDOFF_EXPOSED_BYTES = counter("pdmesh.kv.sent.exposed", "Of it, what was sent after prefill had ended", ("transport",), "By")
HANDOFFS = counter("pdmesh.kv.handoffs", "Hand-offs that were committed, at the sender", ("transport",))
HANDOFF_FAILURES = counter("pdmesh.kv.handoff.failures", "Hand-offs that failed, at this end")
CORRUPT = counter("pdmesh.kv.corrupt.parts", "Parts whose checksum was wrong, at the receiver", ("transport",))
LEASES_EXPIRED = counter("pdmesh.leases.expired", "Reservations that ended without progress")

SEQUENCES = gauge("pdmesh.engine.sequences", "Sequences by state: running, waiting, reserved, held", ("state",))
MAX_SEQUENCES = gauge("pdmesh.engine.max_sequences", "Sequences that there may be")
WAITING_TOKENS = gauge("pdmesh.engine.waiting.tokens", "Prompt tokens that are still to be computed")
BLOCKS = gauge("pdmesh.kv.blocks", "Blocks by state: free, of which some are cached, and used", ("state",))
BLOCKS_TOTAL = gauge("pdmesh.kv.blocks.capacity", "Blocks of the pool")
STEPS = counter("pdmesh.engine.steps", "Steps")
TOKENS = counter(
    "pdmesh.engine.tokens", "Tokens: prefilled, cached (of prompts, found in the prefix cache), generated", ("kind",)
)
PREEMPTIONS = counter("pdmesh.engine.preemptions", "Sequences that gave their blocks up")
DRAFTED = counter("pdmesh.speculation.drafted", "Drafted tokens that were verified, by depth", ("proposer", "position"))
ACCEPTED = counter("pdmesh.speculation.accepted", "Of them, those that came true", ("proposer", "position"))
SPECULATION_ROWS = counter("pdmesh.speculation.rows", "Sequences' parts of steps while somebody could guess")
SPECULATION_TOKENS = counter("pdmesh.speculation.tokens", "Tokens that these gave")
DRAFTING = counter("pdmesh.speculation.drafting", "Time in which drafts were made", unit="s")
VERIFYING = counter("pdmesh.speculation.verifying", "Drafted tokens' part of the steps that computed them", unit="s")
FAILED_PROPOSER = gauge("pdmesh.speculation.failed", "1: this proposer broke and is not asked any more", ("proposer",))
MODEL_ERROR = gauge("pdmesh.engine.latency.error", "Median error of the latency model, by kind of step", ("kind",), unit="1")
ROLES = gauge("pdmesh.worker.role", "1: it takes work of this role", ("role",))
DRAINING = gauge("pdmesh.worker.draining", "1: it takes no new work")

PER_STEP = (STEP_TIME, BATCH_SEQUENCES, BATCH_TOKENS, OPERATIONS, BYTES_MOVED, BUSY)
PER_HANDOFF = (HANDOFF_TIME, HANDOFF_EXPOSED, HANDOFF_BYTES, HANDOFF_EXPOSED_BYTES, HANDOFFS)
AT_SCRAPE = (
    PEAK_OPERATIONS, PEAK_BANDWIDTH, HANDOFF_FAILURES, CORRUPT, LEASES_EXPIRED, SEQUENCES, MAX_SEQUENCES, WAITING_TOKENS, BLOCKS,
    BLOCKS_TOTAL, STEPS, TOKENS, PREEMPTIONS, MODEL_ERROR, ROLES, DRAINING,
)  # fmt: skip
SPECULATION = (DRAFTED, ACCEPTED, SPECULATION_ROWS, SPECULATION_TOKENS, DRAFTING, VERIFYING, FAILED_PROPOSER)
ALL = (*PER_STEP, *PER_HANDOFF, *AT_SCRAPE, *SPECULATION)
