"""What the router reads of a worker's registration."""

from kvtransfer.layout import EVERYWHERE, Reach, Scope, Transports
from pdmesh.adapter_id import AdapterId
from pdmesh.v1 import common_pb2, worker_pb2
from router.api.validation import MAX_FINGERPRINT_CHARS
from router.routing.filters import compatible
from router.routing.worker_reports import Counted, describe, fingerprint_for, snapshot_of
from router.routing.worker_snapshot import WorkerSnapshot


def info(*reach: worker_pb2.TransportReach, name: str = "w", host: str = "here") -> worker_pb2.WorkerInfo:
    layout = common_pb2.KVLayout(block_size=16, kv_dtype="float32", tensor_parallel_size=1, arrangement="plain")
    return worker_pb2.WorkerInfo(
        worker_id=name,
        address=name,
        epoch=len(name),
        layout=layout,
        transports=["near", "far"],
        transport_reach=reach,
        host_id=host,
    )


NEAR = worker_pb2.TransportReach(transport="near", scope=worker_pb2.REACH_SCOPE_HOST)
FAR = worker_pb2.TransportReach(transport="far", scope=worker_pb2.REACH_SCOPE_EVERYWHERE)


def snapshot(told: worker_pb2.WorkerInfo) -> WorkerSnapshot:
    return snapshot_of(describe(told), worker_pb2.LoadReport(), decode=True)


def test_reach_is_what_the_worker_says() -> None:
    assert describe(info(NEAR, FAR)).transports == Transports.of({"near": Reach(Scope.HOST), "far": EVERYWHERE})


def test_equal_offers_are_one_object() -> None:
    assert describe(info(NEAR, FAR)).transports is describe(info(NEAR, FAR, name="v")).transports


def test_a_worker_of_an_older_version_pairs() -> None:
    """It registers names alone: what the other end says of them counts, and nothing is ruled out where neither says anything."""
    old, other = snapshot(info(name="old", host="there")), snapshot(info(name="other"))
    assert old.transports == Transports.of({"near": None, "far": None})
    assert compatible(old, other)
    assert compatible(old, snapshot(info(NEAR, FAR, name="new"))) and compatible(snapshot(info(NEAR, FAR, name="new")), old)
    narrow = info(NEAR, name="narrow")
    narrow.transports[:] = ["near"]
    assert not compatible(old, snapshot(narrow))


def test_what_an_engine_lacks_is_read_and_later_versions_may_name_more() -> None:
    told = info(NEAR)
    told.engine = "other"
    told.lacks.extend([worker_pb2.ENGINE_LACK_PACES, worker_pb2.ENGINE_LACK_REPRODUCIBLE, 99])  # type: ignore[list-item]
    seen = snapshot_of(describe(told), worker_pb2.LoadReport(pace_s=0.02), decode=True)
    assert (seen.engine, seen.hands_over_choices, seen.keeps_pace, seen.is_reproducible) == ("other", True, False, False)
    assert seen.pace_s == 0.0  # whatever it reports
    whole = snapshot_of(describe(info(NEAR)), worker_pb2.LoadReport(pace_s=0.02), decode=True)
    assert (whole.hands_over_choices, whole.keeps_pace, whole.is_reproducible, whole.pace_s) == (True, True, True, 0.02)


def test_a_scope_of_a_later_version_is_not_used() -> None:
    later = worker_pb2.TransportReach(transport="near", scope=9)  # type: ignore[arg-type]
    assert describe(info(later, FAR)).transports == Transports.of({"far": EVERYWHERE})


def test_implausible_times_to_fetch_or_restore_are_taken_for_none() -> None:
    for said, known in ((1e-5, 1e-5), (0.0, 0.0), (-1.0, 0.0), (1.5, 0.0), (float("nan"), 0.0), (float("inf"), 0.0)):
        told = info(NEAR)
        told.fetch_token_s = told.restore_token_s = said
        assert (snapshot(told).fetch_token_s, snapshot(told).restore_token_s) == (known, known)


def test_what_a_worker_has_measured_of_its_tiers_counts_not_what_it_assumed() -> None:
    told = info(NEAR)
    told.restore_token_s = 1e-5
    for measured, known in ((None, 1e-5), (3e-5, 3e-5), (0.0, 0.0), (-1.0, 0.0), (1.5, 0.0), (float("nan"), 0.0)):
        load = worker_pb2.LoadReport(restore_token_s=measured)
        assert snapshot_of(describe(told), load, decode=True).restore_token_s == known


def test_what_names_a_kind_to_clients_follows_weights_formats_and_adapter() -> None:
    told = info(NEAR)
    assert fingerprint_for(describe(told), AdapterId("a", "1" * 64)) == "", "whose weights nobody knows"
    told.identity.weights_hash = "first"
    first = fingerprint_for(describe(told), None)
    again = info(FAR, name="another", host="there")
    again.identity.weights_hash = "first"
    assert fingerprint_for(describe(again), None) == first
    told.identity.weights_hash = "second"
    again.layout.kv_dtype = "int8"
    adapters = [fingerprint_for(describe(told), AdapterId("a", digit * 64)) for digit in "12"]
    assert len({first, fingerprint_for(describe(told), None), fingerprint_for(describe(again), None), *adapters}) == 5
    assert max(map(len, adapters)) <= MAX_FINGERPRINT_CHARS


def test_what_has_ended_makes_no_report_less_than_empty() -> None:
    """One of the two that ended is in the report still, the other is not."""
    load = worker_pb2.LoadReport(num_running=1, num_free_blocks=95, num_total_blocks=100)
    seen = snapshot_of(describe(info(NEAR)), load, decode=True, sent=Counted(seqs=-2, blocks=-10))
    assert (seen.num_seqs, seen.dispatched_seqs) == (1, -1)
    assert (seen.num_free_blocks, seen.dispatched_blocks) == (95, -5)
