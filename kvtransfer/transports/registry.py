"""All transports, best first. A new one is a module beside this one and a line in `TRANSPORTS`: workers offer it, register its
reach and send over it, and `pdmesh doctor` measures it; no other module names it."""

from collections.abc import Callable

from kvtransfer.transports.base import SocketTransport, Transport
from kvtransfer.transports.cuda_ipc import CudaIpcTransport
from kvtransfer.transports.grpc import GrpcTransport
from kvtransfer.transports.nixl.agent import is_installed
from kvtransfer.transports.nixl.transport import NixlTransport
from kvtransfer.transports.shm import ShmTransport
from kvtransfer.transports.tcp import TcpTransport
from pdmesh.runtime.rpc.mesh_secret import MeshSecret
from pdmesh.runtime.rpc.tls import Tls

GRPC = GrpcTransport()  # listens on no socket of its own

# Each function makes a transport from the mesh's certificates and its secret, if it has any. cuda_ipc and shm need none: the
# kernel identifies the peer. nixl comes before tcp, because workers offer nixl only where the configuration names it.
TRANSPORTS: dict[str, Callable[[Tls | None, MeshSecret | None], Transport]] = {
    CudaIpcTransport.name: lambda tls, secret: CudaIpcTransport(),
    ShmTransport.name: lambda tls, secret: ShmTransport(),
    NixlTransport.name: NixlTransport,
    TcpTransport.name: TcpTransport,
    GrpcTransport.name: GrpcTransport,
}


def transports_with(tls: Tls | None, secret: MeshSecret | None = None) -> dict[str, Transport]:
    """Return all transports, for one owner that closes them; with `tls`, those that can encrypt do so; with `secret`, peers on
    other hosts prove that they are of the mesh."""
    return {name: make(tls, secret) for name, make in TRANSPORTS.items()}


def socket_transports(tls: Tls | None, secret: MeshSecret | None = None) -> dict[str, SocketTransport]:
    """Return the transports that listen on a socket, as `transports_with` does."""
    return {name: each for name, each in transports_with(tls, secret).items() if isinstance(each, SocketTransport)}


def defaults() -> tuple[str, ...]:
    """Return the names of the transports that workers offer by default."""
    return tuple(name for name, transport in transports_with(None).items() if transport.is_default)


def installed() -> tuple[str, ...]:
    """Return the names of the transports for KV in host memory whose packages are installed, best first."""
    on_host = (name for name in TRANSPORTS if name != CudaIpcTransport.name)
    return tuple(name for name in on_host if name != NixlTransport.name or is_installed())
