"""CRC-32C (Castagnoli, RFC 3720 section 12.1) over memory, alone or while it is copied; natively where that is ready.

Without a compiler the `crc32c` package and NumPy do the same. All of them release the GIL for large pieces.
"""

from collections.abc import Iterable, Sequence

import crc32c
import numpy as np

from kvtransfer.native.library import Runs, address_of, native, pieces_of

NATIVE_BYTES = 4096  # below, the call costs more than the sum
STREAM_BYTES = 1 << 20  # copied past the caches from here on
COPY_BYTES = 256 << 10  # in NumPy: copied, then summed while still in the processor's cache


def extend(value: int, piece: bytes | memoryview) -> int:
    """The checksum of the bytes behind `value` followed by `piece`; 0 is the checksum of nothing."""
    library = native()
    if library is not None and len(piece) >= NATIVE_BYTES:
        return library.sum(value, pieces_of([piece]))
    result: int = crc32c.crc32c(piece, value)
    return result


def checksum(pieces: Iterable[bytes | memoryview]) -> int:
    """The checksum of all pieces in order, as if they were one."""
    library, pieces = native(), list(pieces)
    if library is not None and sum(map(len, pieces)) >= NATIVE_BYTES:
        return library.sum(0, pieces_of(pieces))
    value = 0
    for piece in pieces:
        value = extend(value, piece)
    return value


def extend_over(value: int, pieces: Sequence[memoryview], num_bytes: int) -> int:
    """The checksum of the bytes behind `value` followed by the first `num_bytes` of `pieces`."""
    for piece in pieces:
        with piece[:num_bytes] as beginning:
            value = extend(value, beginning)
        num_bytes -= min(num_bytes, piece.nbytes)
        if num_bytes == 0:
            break
    return value


def copy_runs(value: int, target: memoryview, source: memoryview, runs: Runs) -> int:
    """Copy `runs` (offsets in `target` and `source`, bytes) and return the checksum of the bytes behind `value` followed by the
    copies. Natively each byte is summed as it is stored: `source` may change meanwhile."""
    library = native()
    if library is None:
        return _copy_with_numpy(value, target, source, runs.tolist())
    addresses = runs + np.array([address_of(target), address_of(source), 0])
    return library.copy(value, addresses, streams=int(runs[:, 2].sum()) >= STREAM_BYTES)


def _copy_with_numpy(value: int, target: memoryview, source: memoryview, runs: Sequence[tuple[int, int, int]]) -> int:
    for to, origin, num_bytes in runs:
        for start in range(0, num_bytes, COPY_BYTES):
            size = min(COPY_BYTES, num_bytes - start)
            with target[to + start : to + start + size] as piece, source[origin + start : origin + start + size] as original:
                np.copyto(np.frombuffer(piece, np.uint8), np.frombuffer(original, np.uint8))
                value = extend(value, piece)
    return value
