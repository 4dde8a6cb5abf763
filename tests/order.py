"""The order in which files are handed to processes that test beside each other: the longest first, then by number of tests.

A long file that comes last runs alone while the other processes have ended. xdist's own order has files of many tests first, of
which most take milliseconds. A file that is missing in the list costs time and nothing else.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import pytest

LONGEST = (
    # tests/mesh, in a run of its own
    "tests/mesh/test_equality.py",
    "tests/mesh/test_tensor_parallel.py",
    "tests/mesh/test_tools_faults.py",
    "tests/mesh/test_faults.py",
    "tests/mesh/test_resilience.py",
    "tests/mesh/test_paused_writer.py",
    "tests/mesh/test_numbers.py",
    "tests/mesh/test_layouts.py",
    "tests/mesh/test_adapters.py",
    "tests/mesh/test_wheel.py",
    # the other tests
    "tests/engine/kernels/triton/test_families.py",
    "tests/engine/test_tails.py",
    "tests/engine/kernels/triton/test_parallel.py",
    "tests/engine/kernels/triton/test_compiles.py",
    "tests/engine/kernels/cpu/test_engine_bits.py",
    "tests/engine/kernels/cpu/test_model_bits.py",
    "tests/engine/kernels/cpu/test_model_tiers.py",
    "tests/engine/test_pooling.py",
    "tests/engine/test_engine_stateful.py",
    "tests/structure/test_structure.py",
    "tests/engine/kernels/triton/test_pieces.py",
    "tests/engine/kernels/triton/test_fp8_kv.py",
    "tests/engine/kernels/triton/test_handoff.py",
    "tests/engine/kernels/triton/test_model.py",
    "tests/engine/kernels/triton/test_attention_bits.py",
    "tests/engine/speculation/test_asking.py",
    "tests/engine/parallel/test_ranks_staging.py",
    "tests/worker/test_tensor_parallel.py",
    "tests/benchmarks/test_gpu_bench.py",
    "tests/benchmarks/test_spec_bench.py",
    "tests/autoscaler/test_policy_properties.py",
    "tests/simulator/test_compiled.py",
    "tests/simulator/test_autoscaling.py",
    "tests/router/test_processes.py",
    "tests/worker/test_process.py",
)


def sort(items: list[pytest.Item]) -> None:
    """Sort files; tests of one stay in their order."""
    files = [item.nodeid.partition("::")[0] for item in items]
    place = places(files)
    items[:] = [item for _, item in sorted(zip(files, items, strict=True), key=lambda each: place[each[0]])]


def places(files: Sequence[str]) -> dict[str, tuple[int, int, str]]:
    """Where the file of each test stands."""
    known = {file: place for place, file in enumerate(LONGEST)}
    return {file: (known.get(file, len(known)), -count, file) for file, count in Counter(files).items()}
