"""All transports, best first. A new one is a module beside this and a line here."""

from kvtransfer.transports.base import SocketTransport, Transport
from kvtransfer.transports.grpc import GrpcTransport
from kvtransfer.transports.shm import ShmTransport
from kvtransfer.transports.tcp import TcpTransport
from runtime.tls import Tls

GRPC = GrpcTransport()  # listens on no socket of its own
SOCKET_TRANSPORTS: dict[str, SocketTransport] = {transport.name: transport for transport in (ShmTransport(), TcpTransport())}
TRANSPORTS: dict[str, Transport] = {**SOCKET_TRANSPORTS, GRPC.name: GRPC}


def socket_transports(tls: Tls | None) -> dict[str, SocketTransport]:
    """Those that listen on a socket, those between hosts encrypted if `tls` is given. shm stays as it is: the kernel vouches for
    its peer."""
    return SOCKET_TRANSPORTS if tls is None else {**SOCKET_TRANSPORTS, "tcp": TcpTransport(tls)}


def transports_with(tls: Tls | None) -> dict[str, Transport]:
    """All transports."""
    return TRANSPORTS if tls is None else {**socket_transports(tls), GRPC.name: GrpcTransport(tls)}
