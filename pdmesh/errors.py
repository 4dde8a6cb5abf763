"""Errors of the client library: the mesh's own (`pdmesh.runtime.errors`), under the names that a caller looks for.

    try:
        client.generate("…", temperature=-1)
    except errors.InvalidArgument as error:
        error.field                 # "sampling.temperature"
    except errors.Overloaded as error:
        error.retry_delay_s         # when to retry, in seconds

All are MeshError, with `.code` (grpc.StatusCode) and `.message`.
"""

from __future__ import annotations

from typing import cast

import grpc
import grpc.aio

from pdmesh.runtime import errors
from pdmesh.runtime.errors import (
    Aborted,
    Cancelled,
    DeadlineExceeded,
    FailedPrecondition,
    Internal,
    InvalidArgument,
    MeshError,
    NotFound,
    Unavailable,
    Unimplemented,
)
from pdmesh.runtime.errors import ResourceExhausted as Overloaded

__all__ = [
    "Aborted",
    "Cancelled",
    "DeadlineExceeded",
    "FailedPrecondition",
    "Internal",
    "InvalidArgument",
    "MeshError",
    "NotFound",
    "Overloaded",
    "Unavailable",
    "Unimplemented",
    "error_from_rpc",
]


def error_from_rpc(error: grpc.RpcError) -> MeshError:
    """Return the MeshError that ended a call, of either kind of channel (a sync call's error has an AioRpcError's accessors)."""
    return errors.error_from_rpc(cast(grpc.aio.AioRpcError, error))
