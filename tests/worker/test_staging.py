"""Which way a worker's KV takes to the transports."""

from __future__ import annotations

import pytest

from kvtransfer.transports.cuda_ipc import CudaIpcTransport
from kvtransfer.transports.nixl.transport import NixlTransport
from pdmesh.engine.kv_cache.staging import StagingSizes
from pdmesh.engine.kv_cache.streams import InOrder
from pdmesh.worker.kv_memory import stage, staged_memory
from tests.support.host_sharing import HostSharing
from tests.support.worker_mesh import Model


def test_a_pool_in_memory_of_the_host_is_shown_as_it_is(model: Model) -> None:
    engine = model.engine()
    assert staged_memory(engine) is None
    assert engine.exports.signal.marks is None
    engine.close()


def test_no_peer_writes_to_a_staged_pool_and_steps_mark_how_far_they_are(model: Model) -> None:
    engine = model.engine()
    staged = stage(engine, InOrder(), StagingSizes(2, 1 << 20), StagingSizes(2, 1 << 20))
    assert staged.shown is None and not CudaIpcTransport().receives(staged) and not CudaIpcTransport().sends(engine.kv)
    assert not NixlTransport().receives(staged) and not NixlTransport().sends(staged)
    assert engine.exports.signal.marks is staged.marks
    for show in (staged.memory, lambda: staged.block_view(0, 0, 0)):
        with pytest.raises(ValueError, match="staged"):
            show()
    staged.close()
    engine.close()


def test_a_pool_that_cannot_be_shown_is_staged_all_the_same_and_it_is_said_why(
    model: Model, caplog: pytest.LogCaptureFixture
) -> None:
    engine = model.engine()
    for sharing, is_shown in ((HostSharing(engine.kv.fd), True), (HostSharing(None), False)):
        staged = stage(engine, InOrder(), StagingSizes(2, 1 << 20), StagingSizes(2, 1 << 20), sharing)
        assert (staged.shown is not None) == CudaIpcTransport().receives(staged) == is_shown
        staged.close()
    assert [line for line in caplog.messages if "cuda_ipc is not used: handle: private memory has none" in line]
    engine.close()


def test_a_piece_holds_a_block_of_a_layer_at_least(model: Model) -> None:
    engine = model.engine()
    with pytest.raises(ValueError, match="piece_bytes"):
        stage(engine, InOrder(), StagingSizes(1, engine.kv.bytes_per_layer_block))
    engine.close()
