"""The mesh secret: what tells the processes of a mesh from everybody else on the network, where there is no TLS.

    secret = open_secret(config.mesh_secret)                # None: whoever reaches a port is served
    server = GrpcServer(host, port, secret=secret)          # takes calls with a proof only
    channel = connect(address, secret=secret)               # proves every call

A file holds the secret in hexadecimal, one line for each: the first signs, all verify, so that a secret can be replaced while the
mesh runs. The secret itself is never sent. Each use has a key of its own, derived from it:

- a call carries an HMAC over its method, the time, a nonce and, where the request is one message, the message's SHA-256. Whoever
  listens learns nothing to sign with; a proof is good for this call, for MAX_SKEW_S, and once at each server.
- a KV connection begins with a challenge to both ends (`kvtransfer.secret_stream`).
- a record in Redis is sealed with its key, its epoch and the time, and is good for MAX_SKEW_S.

It encrypts nothing and does not identify servers to callers: docs/security.md says what a listener can still do. Pure but for the
file, which is read again when it changes. Needs the standard library and grpcio only.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
import secrets
import stat
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import grpc

from pdmesh.runtime.config import ConfigError
from pdmesh.runtime.errors import MeshError

MIN_SECRET_BYTES = 32
MAX_FILE_BYTES = 64 * 1024
MAX_SKEW_S = 30.0
"""How far two clocks may differ, and how long a proof or a sealed record is good."""
MAX_NONCES = 1 << 20  # of a generation: some 100 MB; beyond, the oldest are forgotten early
FLAG, VARIABLE = "--mesh-secret-file", "PDMESH_MESH_SECRET_FILE"
REASON = "mesh_secret"
"""The `reason` of an error because of a missing or different secret, or of clocks that differ."""

_RECHECK_S = 1.0
_PROOF = struct.Struct(">BQ16s32s32s")  # version, milliseconds since 1970, nonce, SHA-256 of the request, HMAC
_VERSION = 1
_SIGNED = struct.Struct(">Q16s32s")
NO_BODY = bytes(32)
"""In place of the hash where requests are a stream."""
_SEAL = struct.Struct(">4sQ32s")  # mark, milliseconds, HMAC
_SEAL_MARK = b"PDMH"
NONCE_BYTES = MAC_BYTES = 32

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class MeshSecretConfig:
    """Configure the secret that the processes of a mesh share."""

    mesh_secret_file: str = field(
        default="",
        metadata={
            "help": "file with the secret of the mesh, as `pdmesh secret` writes it; empty: ports serve all who reach them"
        },
    )

    @property
    def is_set(self) -> bool:
        """Return whether there is a secret."""
        return bool(self.mesh_secret_file)

    def validate(self) -> None:
        """Raise ConfigError that names the setting, also for mistakes inside the file."""
        if self.is_set:
            read_secrets(self.mesh_secret_file)


def new_secret() -> str:
    """Return a secret as a line of a file."""
    return secrets.token_hex(MIN_SECRET_BYTES) + "\n"


def write_secret(path: Path) -> MeshSecretConfig:
    """Write a new secret into a new file that this user alone can read. Raises OSError; an existing file stays."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w", encoding="ascii") as file:
        file.write(new_secret())
    return MeshSecretConfig(str(path))


def read_secrets(path: str) -> tuple[bytes, ...]:
    """Return the file's secrets. Raises ConfigError, which shows nothing of its content."""
    try:
        with Path(path).open("rb") as file:
            content = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise _wrong(f"cannot read {path}: {error.strerror}", "give a file that this user can read") from None
    if len(content) > MAX_FILE_BYTES:
        raise _wrong(f"{path} is larger than {MAX_FILE_BYTES} bytes", "give a file with one secret a line")
    lines = [(number, line.strip()) for number, line in enumerate(content.splitlines(), 1) if line.strip()]
    if not lines:
        raise _wrong(f"{path} is empty", "make one with: pdmesh secret FILE")
    return tuple(_parsed(path, number, line) for number, line in lines)


def _parsed(path: str, number: int, line: bytes) -> bytes:
    try:
        secret = bytes.fromhex(line.decode("ascii"))
    except (UnicodeDecodeError, ValueError):
        raise _wrong(f"line {number} of {path} is not hexadecimal", "make one with: pdmesh secret FILE") from None
    if len(secret) < MIN_SECRET_BYTES:
        problem = f"line {number} of {path} holds {len(secret)} bytes, fewer than {MIN_SECRET_BYTES}"
        raise _wrong(problem, "make one with: pdmesh secret FILE")
    return secret


def _wrong(problem: str, remedy: str) -> ConfigError:
    return ConfigError("mesh_secret_file", problem, remedy)


@dataclass(frozen=True)
class _Keys:
    """Hold the keys of one secret, one for each use (HKDF-Expand of RFC 5869, one block: the secret is random already)."""

    call: bytes
    kv: bytes
    record: bytes

    @classmethod
    def of(cls, secret: bytes) -> _Keys:
        return cls(*(hmac.digest(secret, b"pdmesh " + use + b" v1\x01", "sha256") for use in (b"call", b"kv", b"record")))


class MeshSecret:
    """Sign and verify with the secrets of a file. Thread-safe."""

    def __init__(self, config: MeshSecretConfig, *, clock: Callable[[], float] = time.time) -> None:
        """Read the file. `clock` gives the seconds since 1970. Raises ConfigError."""
        self._path = config.mesh_secret_file
        self._clock = clock
        self._lock = threading.Lock()
        self._nonces = _Nonces()
        self._keys = tuple(map(_Keys.of, read_secrets(self._path)))
        self._stamp = _stamp(self._path)
        self._checked_at = time.monotonic()
        _warn_if_public(self._path)

    def prove(self, method: str, body_digest: bytes = NO_BODY) -> bytes:
        """Return the proof of a call. `method`: "/package.Service/Method"."""
        now_ms, nonce = round(self._clock() * 1000), secrets.token_bytes(16)
        mac = _call_mac(self._current()[0], method, now_ms, nonce, body_digest)
        return _PROOF.pack(_VERSION, now_ms, nonce, body_digest, mac)

    def check(self, method: str, proof: bytes | None) -> bytes:
        """Return the hash of the request that the proof is for. Raises MeshError (UNAUTHENTICATED) that says what to do."""
        if proof is None:
            raise refused(
                f"this port takes calls of its mesh only, and the call carries no proof of its secret; give the caller {FLAG}"
            )
        if len(proof) != _PROOF.size or proof[0] != _VERSION:
            raise refused(
                "the call's proof of the mesh secret is not of a version that this process knows; update the older process"
            )
        _, made_ms, nonce, digest, mac = _PROOF.unpack(proof)
        if not any(hmac.compare_digest(mac, _call_mac(keys, method, made_ms, nonce, digest)) for keys in self._current()):
            raise refused(f"caller and this process have different mesh secrets; give both the same file with {FLAG}")
        self._check_time(made_ms, "the caller's clock", refused)
        with self._lock:
            if not self._nonces.add(nonce, time.monotonic()):
                raise refused("the call's proof of the mesh secret was used before: somebody repeats a call of the mesh")
        return bytes(digest)

    def kv_proof(self, role: bytes, nonces: bytes) -> bytes:
        """Return the proof that an end of a KV connection (`role`: b"sender" or b"receiver") has the secret."""
        return hmac.digest(self._current()[0].kv, role + b"\0" + nonces, "sha256")

    def kv_proves(self, proof: bytes, role: bytes, nonces: bytes) -> bool:
        """Return whether the peer in `role` has made `proof`, with any of the secrets."""
        message = role + b"\0" + nonces
        return any(hmac.compare_digest(proof, hmac.digest(keys.kv, message, "sha256")) for keys in self._current())

    def seal(self, key: str, epoch: int, payload: bytes) -> bytes:
        """Return `payload` of the record at `key` with a seal before it."""
        now_ms = round(self._clock() * 1000)
        return _SEAL.pack(_SEAL_MARK, now_ms, _seal_mac(self._current()[0], key, epoch, now_ms, payload)) + payload

    def unseal(self, key: str, epoch: int, sealed: bytes, *, ages: bool = True) -> bytes:
        """Return the payload. Raises ValueError for one of an outsider or, where records age, of the past."""
        if not is_sealed(sealed):
            raise ValueError(f"it is not signed: its writer has no mesh secret; if it is of this mesh, give it {FLAG}")
        _, made_ms, mac = _SEAL.unpack_from(sealed)
        payload = sealed[_SEAL.size :]
        if not any(hmac.compare_digest(mac, _seal_mac(keys, key, epoch, made_ms, payload)) for keys in self._current()):
            raise ValueError(f"it is signed with another mesh secret, or was changed; give all processes the same {FLAG}")
        if ages:
            self._check_time(made_ms, "its writer's clock (or it is an old record)", ValueError)
        return payload

    def is_newest_seal(self, key: str, epoch: int, sealed: bytes) -> bool:
        """Return whether the secret that signs now has made the seal: in a rotation, lasting records have to be sealed again."""
        _, made_ms, mac = _SEAL.unpack_from(sealed)
        return hmac.compare_digest(mac, _seal_mac(self._current()[0], key, epoch, made_ms, sealed[_SEAL.size :]))

    def _check_time(self, made_ms: int, whose: str, error: Callable[[str], Exception]) -> None:
        apart_s = abs(self._clock() - made_ms / 1000)
        if apart_s > MAX_SKEW_S:
            problem = f"{whose} differs by {apart_s:.0f} s from this machine's, more than {MAX_SKEW_S:.0f}; set the clocks (NTP)"
            raise error(problem)

    def _current(self) -> tuple[_Keys, ...]:
        """Return the keys of the file as it is, at most _RECHECK_S old; the former ones while it is being replaced."""
        if time.monotonic() - self._checked_at < _RECHECK_S:
            return self._keys
        with self._lock:
            self._checked_at = time.monotonic()
            try:
                if (stamp := _stamp(self._path)) != self._stamp:
                    self._keys, self._stamp = tuple(map(_Keys.of, read_secrets(self._path))), stamp
                    logger.info("read the changed mesh secret again: it holds %d", len(self._keys))
            except (ConfigError, OSError) as error:
                logger.warning("the former mesh secret stays in use, the changed one is not good: %s", error)
            return self._keys


class _Nonces:
    """Remember which proofs were used, for at least 2 * MAX_SKEW_S: after that the time refuses them. In two generations, so that
    nothing is searched for what is old."""

    def __init__(self) -> None:
        self._young: set[bytes] = set()
        self._old: set[bytes] = set()
        self._turned_at = 0.0

    def add(self, nonce: bytes, now: float) -> bool:
        """Return whether `nonce` is new, and remember it. `now`: monotonic seconds."""
        if now - self._turned_at > 2 * MAX_SKEW_S or len(self._young) >= MAX_NONCES:
            self._old, self._young, self._turned_at = self._young, set(), now
        if nonce in self._young or nonce in self._old:
            return False
        self._young.add(nonce)
        return True


def open_secret(config: MeshSecretConfig) -> MeshSecret | None:
    """Return the secret, None if none is configured. Raises ConfigError."""
    return MeshSecret(config) if config.is_set else None


def is_sealed(payload: bytes) -> bool:
    """Return whether a record's payload begins with a seal."""
    return payload.startswith(_SEAL_MARK) and len(payload) >= _SEAL.size


def digest_of(body: bytes) -> bytes:
    """Return what a proof says of a request of one message."""
    return hashlib.sha256(body).digest()


def is_loopback(host: str) -> bool:
    """Return whether only this machine reaches what listens on `host`."""
    return host in ("localhost", "::1", "[::1]") or host.startswith("127.")


def refused(problem: str) -> MeshError:
    """Return the error for a peer that does not prove that it has the secret."""
    return MeshError(problem, code=grpc.StatusCode.UNAUTHENTICATED, reason=REASON)


def _call_mac(keys: _Keys, method: str, made_ms: int, nonce: bytes, digest: bytes) -> bytes:
    return hmac.digest(keys.call, _SIGNED.pack(made_ms, nonce, digest) + method.encode(), "sha256")


def _seal_mac(keys: _Keys, key: str, epoch: int, made_ms: int, payload: bytes) -> bytes:
    head = f"{made_ms:x} {epoch:x} {len(key)} {key} "
    return hmac.digest(keys.record, head.encode() + payload, "sha256")


def _stamp(path: str) -> tuple[int, int, int]:
    found = Path(path).stat()
    return (found.st_ino, found.st_mtime_ns, found.st_size)


def _warn_if_public(path: str) -> None:
    if Path(path).stat().st_mode & stat.S_IRWXO:
        logger.warning("%s: %s can be read or changed by every user of this machine; chmod 600 it", FLAG, path)
