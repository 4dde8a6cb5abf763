"""From a worker's own messages to the value that the policy looks at."""

from kvtransfer.layouts import Layout
from protos.v1 import common_pb2, worker_pb2
from router.policy import WorkerView


def identity_of(identity: common_pb2.Identity) -> tuple[object, ...]:
    """All fields in order: what must be equal for a pair."""
    return tuple(getattr(identity, field.name) for field in identity.DESCRIPTOR.fields)


def kind_of(info: worker_pb2.WorkerInfo) -> tuple[object, ...]:
    """`WorkerView.kind` of a decode worker."""
    return (identity_of(info.identity), info.layout.kv_dtype)


def view_of(info: worker_pb2.WorkerInfo, load: worker_pb2.LoadReport, *, decode: bool) -> WorkerView:
    """The view without anything dispatched. `decode`: its Attach stream is open, so it may own requests, if it has the role."""
    return WorkerView(
        worker_id=info.worker_id,
        address=info.address,
        epoch=info.epoch,
        model=info.identity.model,
        prefill=worker_pb2.ROLE_PREFILL in load.roles,
        decode=decode and worker_pb2.ROLE_DECODE in load.roles,
        identity=identity_of(info.identity),
        layout=Layout.of(info.layout),
        transports=frozenset(info.transports),
        host_id=info.host_id,
        block_size=info.layout.block_size,
        max_context=info.max_context,
        max_num_seqs=load.max_num_seqs or info.max_num_seqs,
        num_total_blocks=load.num_total_blocks or info.num_blocks,
        num_free_blocks=load.num_free_blocks,
        num_seqs=load.num_running + load.num_waiting + load.num_reserved + load.num_held,
        num_waiting_tokens=load.num_waiting_tokens,
    )


def problem_of(info: worker_pb2.WorkerInfo) -> str | None:
    """Why a worker that says this of itself cannot be used; None when it can."""
    for name in ("worker_id", "epoch", "max_context", "max_num_seqs", "num_blocks"):
        if not getattr(info, name):
            return f"{name} is not set"
    if not info.identity.model:
        return "identity.model is not set"
    problem = Layout.of(info.layout).problem(info.identity.num_kv_heads, info.identity.head_dim)
    return None if problem is None else f"layout.{problem[0]}: {problem[1]}"
