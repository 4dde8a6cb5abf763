"""How large the parts of a push are."""

from kvtransfer.manifest import MAX_PULLED_BYTES, TARGET_PART_BYTES
from kvtransfer.memory import KVMemory
from kvtransfer.staging import StagedMemory
from kvtransfer.transports.cuda_ipc import CudaIpcTransport
from kvtransfer.transports.nixl.device import ROOM_BYTES
from kvtransfer.transports.nixl.transport import NixlTransport
from kvtransfer.transports.summed import shown_by

_MOST_SHOWN = {CudaIpcTransport.name: MAX_PULLED_BYTES, NixlTransport.name: ROOM_BYTES}


def part_bytes_over(transport: str, memory: KVMemory, wanted: int | None) -> int:
    """The most of a part out of `memory`; wanted: None for what suits the transport. Of a staged pool parts are fetched by
    pieces, unless the receiver reads it: its device, or NIXL into a room there."""
    shown, most = shown_by(memory), _MOST_SHOWN.get(transport)
    if shown is not None and most is not None:
        return min(shown.part_bytes if wanted is None else wanted, most)
    wanted = TARGET_PART_BYTES if wanted is None else wanted
    return min(wanted, memory.part_bytes) if isinstance(memory, StagedMemory) else wanted
