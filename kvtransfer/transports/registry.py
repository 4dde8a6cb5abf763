"""All transports, best first. A new transport is a module in this folder and a line here."""

from kvtransfer.transports.base import SocketTransport, Transport
from kvtransfer.transports.cuda_ipc import CudaIpcTransport
from kvtransfer.transports.grpc import GrpcTransport
from kvtransfer.transports.nixl.agent import is_installed
from kvtransfer.transports.nixl.transport import NixlTransport
from kvtransfer.transports.shm import ShmTransport
from kvtransfer.transports.tcp import TcpTransport
from pdmesh.runtime.rpc.tls import Tls

GRPC = GrpcTransport()  # listens on no socket of its own


def socket_transports(tls: Tls | None) -> dict[str, SocketTransport]:
    """Return the transports that listen on a socket, for one owner that closes them; tcp is encrypted if `tls` is given. cuda_ipc
    and shm do not change: the kernel vouches for the peer. nixl comes before tcp: it is offered only where it was configured by
    name."""
    transports: tuple[SocketTransport, ...] = (
        CudaIpcTransport(),
        ShmTransport(),
        NixlTransport(tls),
        TcpTransport(tls),
    )
    return {transport.name: transport for transport in transports}


def transports_with(tls: Tls | None) -> dict[str, Transport]:
    """Return all transports, for one owner that closes them."""
    return {**socket_transports(tls), GRPC.name: GrpcTransport(tls)}


TRANSPORTS: tuple[str, ...] = tuple(transports_with(None))


def installed() -> tuple[str, ...]:
    """Return names of the transports that move KV in host memory and whose packages are installed, best first."""
    on_host = (name for name in TRANSPORTS if name != CudaIpcTransport.name)
    return tuple(name for name in on_host if name != NixlTransport.name or is_installed())
