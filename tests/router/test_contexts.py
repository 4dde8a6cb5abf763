"""The largest context of a model, whoever comes and goes."""

from hypothesis import given
from hypothesis import strategies as st

from router.fleet.registry import ContextLimits

moves = st.tuples(st.sampled_from("abcd"), st.sampled_from(["m", "n"]), st.none() | st.sampled_from([1024, 2048, 8192]))


@given(st.lists(moves, max_size=30))
def test_the_largest_of_those_that_are_known(changes: list[tuple[str, str, int | None]]) -> None:
    contexts, known = ContextLimits(), dict[str, tuple[str, int]]()
    for address, model, max_context in changes:
        if max_context is None:
            contexts.drop(address)
            known.pop(address, None)
        else:
            contexts.put(address, model, max_context)
            known[address] = (model, max_context)
        for asked in ("m", "n"):
            expected = max((size for name, size in known.values() if name == asked), default=None)
            assert contexts.largest(asked) == expected
