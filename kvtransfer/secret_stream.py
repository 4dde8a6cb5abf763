"""A stream whose ends prove to each other, before the first frame, that they have the secret of the mesh. Nothing is encrypted.

    sender                                       receiver
    "PDMS", version, nonce of the sender    →
                                            ←    nonce of the receiver, HMAC("receiver", both nonces)
    HMAC("sender", both nonces), frames …   →    refused: a frame with the reason, then the end

Both nonces are in both proofs, and each proof names its maker, so that neither can be repeated on another connection nor sent
back to its maker. The sender's frames follow its proof at once, as the receiver's came before: it costs one round trip.
"""

import asyncio
import secrets
import socket
import struct
from concurrent.futures import Executor
from contextlib import suppress
from typing import NoReturn

import grpc

from kvtransfer import framing
from kvtransfer.errors import PeerClosed, code_number
from kvtransfer.stream import SocketStream
from pdmesh.runtime.rpc.mesh_secret import FLAG, MAC_BYTES, NONCE_BYTES, MeshSecret
from pdmesh.v1 import transfer_pb2

MAGIC = b"PDMS"
VERSION = 1
HANDSHAKE_TIMEOUT_S = 2.0
REFUSAL_LINGER_S = 0.5
SENDER, RECEIVER = b"sender", b"receiver"
_OPENING = struct.Struct(f">4sB{NONCE_BYTES}s")


class SecretStream(SocketStream):
    """Implement a stream over `sock` between two processes that have `secret`. open() does the handshake; nothing else may come
    before it."""

    def __init__(
        self, sock: socket.socket, executor: Executor, idle_timeout_s: float, secret: MeshSecret, *, server_side: bool
    ) -> None:
        super().__init__(sock, executor, idle_timeout_s)
        self._secret = secret
        self._is_server = server_side
        self._is_open = False

    async def open(self) -> None:
        """Do the handshake. Raises PeerClosed with the reason of a failure, and TimeoutError."""
        if self._is_open:
            return
        async with asyncio.timeout(HANDSHAKE_TIMEOUT_S):
            await (self._receive_proof() if self._is_server else self._send_proof())
        self._is_open = True

    async def _send_proof(self) -> None:
        nonce = secrets.token_bytes(NONCE_BYTES)
        await self.write_bytes(_OPENING.pack(MAGIC, VERSION, nonce))
        try:
            answer = await self._read_exactly(NONCE_BYTES + MAC_BYTES)
        except (PeerClosed, ConnectionError) as error:
            problem = f"the receiver closed the connection at the handshake: it has no room, or no mesh secret (give it {FLAG})"
            raise PeerClosed(problem) from error
        nonces = nonce + answer[:NONCE_BYTES]
        if not self._secret.kv_proves(answer[NONCE_BYTES:], RECEIVER, nonces):
            raise PeerClosed(f"the receiver has another mesh secret than this process; give both the same file with {FLAG}")
        await self.write_bytes(self._secret.kv_proof(SENDER, nonces))

    async def _receive_proof(self) -> None:
        opening = await self._read_exactly(_OPENING.size)
        magic, version, nonce = _OPENING.unpack(opening)
        if magic != MAGIC:
            await self._refuse(f"this port takes KV of its mesh only, and the sender has no mesh secret; give it {FLAG}")
        if version != VERSION:
            await self._refuse(
                f"the handshake has version {version}, and this receiver knows {VERSION}; update the older process"
            )
        nonces = nonce + secrets.token_bytes(NONCE_BYTES)
        await self.write_bytes(nonces[NONCE_BYTES:] + self._secret.kv_proof(RECEIVER, nonces))
        if not self._secret.kv_proves(await self._read_exactly(MAC_BYTES), SENDER, nonces):
            await self._refuse(f"the sender has another mesh secret than this receiver; give both the same file with {FLAG}")

    async def _refuse(self, problem: str) -> NoReturn:
        """Answer in a way that a sender without a secret can read, too, and end. Raises PeerClosed."""
        reply = transfer_pb2.TransferReply(code=code_number(grpc.StatusCode.UNAUTHENTICATED), message=problem)
        with suppress(OSError, TimeoutError):
            await self.write_bytes(framing.encode(transfer_pb2.TransferMessage(hello_reply=reply)))
            await self.linger(REFUSAL_LINGER_S)
        raise PeerClosed(problem)
