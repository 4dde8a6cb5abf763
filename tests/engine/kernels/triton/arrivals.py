"""How a compiled kernel hands on what its programs wrote to the one that arrives last, read from its PTX.

    st.global ...            each thread its share
    bar.sync                 all threads have stored
    atom....acq_rel          one of them says so, and learns who else has arrived
    bar.sync                 the others know
    ld.global.cg ...         of the last program: past its own first cache, which may hold what was there before

The interpreter runs one program after the other, so it misses none of these.
"""

from __future__ import annotations

import re

_STEP = re.compile(r"\b(st\.global|bar\.sync|ld\.global\.cg|ld\.volatile|atom\.\S+)")


def lacking(ptx: str) -> list[str]:
    """What its one arrival has not. Triton writes a kernel's instructions in the order in which they run."""
    steps = [found[1] for line in ptx.splitlines() if (found := _STEP.search(line))]
    arrivals = [at for at, step in enumerate(steps) if step.startswith("atom")]
    if len(arrivals) != 1:
        return [f"{len(arrivals)} arrivals"]
    before, (arrival, *behind) = steps[: arrivals[0]], steps[arrivals[0] :]
    own, others = behind[:1], [step for step in behind if step.startswith("ld")]
    wanted = {
        "acq_rel": ".acq_rel" in arrival,
        "of the whole GPU": ".gpu." in arrival,
        "stores before it": "st.global" in before,
        "a barrier behind the stores": before[-1:] == ["bar.sync"],
        "a barrier before the loads": own == ["bar.sync"],
        "loads past the first cache": bool(others),
    }
    return [name for name, is_there in wanted.items() if not is_there]
