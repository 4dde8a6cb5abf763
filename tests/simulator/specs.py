"""Workers for the simulator's tests: small, and with prices at which no two events fall together by chance."""

from pdmesh.planning.latency_model import LatencyModel
from pdmesh.simulator.workers.spec import WorkerSpec

SPEED = LatencyModel(
    fixed_s=4.0123e-3,
    per_prefill_token_s=1.0417e-4,
    per_prefill_context_s=2.03e-8,
    per_sequence_s=2.0711e-4,
    per_context_token_s=1.0519e-6,
    num_steps=1000,
)
SMALL = WorkerSpec(
    SPEED, max_num_batched_tokens=96, max_num_seqs=12, num_blocks=400, block_size=8, max_context=2048, prefix_tokens=0
)
LARGE = WorkerSpec(SPEED, max_num_batched_tokens=512, max_num_seqs=64, num_blocks=8192, block_size=16, max_context=8192)
