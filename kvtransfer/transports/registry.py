"""All transports, best first. A new one is a module beside this and a line in `TRANSPORTS`: workers offer it, register what it
reaches and send over it, and `pdmesh doctor` measures it; no other place knows its name."""

from collections.abc import Callable

from kvtransfer.transports.base import SocketTransport, Transport
from kvtransfer.transports.cuda_ipc import CudaIpcTransport
from kvtransfer.transports.grpc import GrpcTransport
from kvtransfer.transports.nixl.agent import is_installed
from kvtransfer.transports.nixl.transport import NixlTransport
from kvtransfer.transports.shm import ShmTransport
from kvtransfer.transports.tcp import TcpTransport
from pdmesh.runtime.rpc.tls import Tls

GRPC = GrpcTransport()  # listens on no socket of its own

# From the mesh's certificates, if it has any. cuda_ipc and shm need none: the kernel vouches for the peer. nixl comes before tcp,
# as it is offered only where it is named.
TRANSPORTS: dict[str, Callable[[Tls | None], Transport]] = {
    CudaIpcTransport.name: lambda tls: CudaIpcTransport(),
    ShmTransport.name: lambda tls: ShmTransport(),
    NixlTransport.name: NixlTransport,
    TcpTransport.name: TcpTransport,
    GrpcTransport.name: GrpcTransport,
}


def transports_with(tls: Tls | None) -> dict[str, Transport]:
    """Return all transports, for one owner that closes them; those that encrypt do if `tls` is given."""
    return {name: make(tls) for name, make in TRANSPORTS.items()}


def socket_transports(tls: Tls | None) -> dict[str, SocketTransport]:
    """Return those that listen on a socket, likewise."""
    return {name: each for name, each in transports_with(tls).items() if isinstance(each, SocketTransport)}


def defaults() -> tuple[str, ...]:
    """Return the names of those that workers offer unless they are told which to offer."""
    return tuple(name for name, transport in transports_with(None).items() if transport.is_default)


def installed() -> tuple[str, ...]:
    """Return the names of those that move KV in memory of the host and whose packages are there, best first."""
    on_host = (name for name in TRANSPORTS if name != CudaIpcTransport.name)
    return tuple(name for name in on_host if name != NixlTransport.name or is_installed())
