"""Group sizes that are kept up to date against those that are counted."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from kvtransfer.layouts import Layout
from router.health import Role
from router.kinds import Kinds
from router.views import WorkerView
from tests.router.fleets import worker

VIEWS = st.builds(
    lambda roles, identity, kv_dtype, epoch: replace(
        worker("w"), prefill="p" in roles, decode="d" in roles, identity=(identity,), layout=Layout(16, kv_dtype), epoch=epoch
    ),
    st.sampled_from(["p", "d", "pd", ""]),
    st.sampled_from(["one", "two"]),
    st.sampled_from(["float32", "bfloat16"]),
    st.integers(1, 2),
)


def has(view: WorkerView, role: Role) -> bool:
    return view.decode if role is Role.DECODE else view.prefill


@given(st.lists(st.tuples(st.sampled_from("abcd"), st.none() | VIEWS), max_size=30))
def test_sizes_are_what_counting_says(puts: list[tuple[str, WorkerView | None]]) -> None:
    kinds, truth = Kinds(), dict[str, WorkerView]()
    for address, view in puts:
        kinds.put(address, view)
        truth.pop(address, None)
        if view is not None:
            truth[address] = view
        for role in Role:
            for each, known in truth.items():
                size = sum(has(other, role) and other.kind == known.kind for other in truth.values())
                assert kinds.peers((each, known.epoch), role) == ((known.kind, size) if has(known, role) else None)
                assert kinds.peers((each, known.epoch + 9), role) is None
    assert kinds.peers(("nobody", 1), Role.DECODE) is None
