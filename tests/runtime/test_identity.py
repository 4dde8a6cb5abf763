"""Epochs differ; the host does not."""

from __future__ import annotations

from pdmesh.runtime.process import host_id, new_epoch


def test_epochs_are_non_zero_64_bit_numbers_that_differ() -> None:
    epochs = [new_epoch() for _ in range(100)]
    assert len(set(epochs)) == 100
    assert all(0 < epoch < 2**64 for epoch in epochs)


def test_the_host_is_the_same_each_time_and_short_enough_for_a_record() -> None:
    assert host_id() == host_id()
    assert 0 < len(host_id()) < 200
