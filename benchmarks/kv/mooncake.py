"""Mooncake's trace of conversations through a mesh, with and without fetched KV and tiers.

    python -m benchmarks.kv.mooncake TRACE --requests 1000 --rate 0.1x

Prints one JSON object: for each variant the latencies, and where the KV of the prompts came from. Here it is simulated. A block
of the trace (512 tokens) becomes one of `--block-tokens`, and all lengths shrink alike: with the default of 48 they are a tenth
of the trace's, short enough for a small model on a CPU, and what requests share stays the same share. `prompt_of` gives the
tokens of such a request, for a run on a real mesh.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import islice
from random import Random

from pdmesh.planning.latency_model import LatencyModel
from pdmesh.simulator.arrivals import BLOCK_TOKENS, Arrival, TraceError, at_rate, read_mooncake
from pdmesh.simulator.mesh import Mesh
from pdmesh.simulator.results import Results
from pdmesh.simulator.settings import Fetching, MeshSettings, Tiers
from pdmesh.simulator.workers.spec import KNOWN_STEPS, SpecError, WorkerSpec, read_spec

TENTH = 48
"""Tokens of a block whose lengths are a tenth: three blocks of 16, so that workers find what requests share."""
FIRST_ID, NUM_IDS = 1000, 40_000
"""Token ids that every vocabulary in use has, none of which is special."""
LAPTOP = WorkerSpec(
    LatencyModel(5e-3, 9e-4, 2e-7, 6e-4, 1e-6, num_steps=KNOWN_STEPS),
    max_num_batched_tokens=512,
    num_blocks=2000,
    max_context=16384,
    kv_bytes_per_token=23040,
)
"""SmolLM2-135M in int8, KV in bfloat16, on a core; its pool holds some 28 prompts, as a GPU's holds of the whole lengths."""
VARIANTS: Mapping[str, tuple[bool, bool]] = {
    "neither": (False, False), "fetching": (True, False), "tiers": (False, True), "both": (True, True),
}  # fmt: skip


@dataclass(frozen=True)
class Figures:
    """What a run of the trace brought. Times in seconds; tokens of the prompts of completed requests, by where their KV came
    from; `computed_share` of all prompt tokens."""

    num_completed: int
    ttft_p50_s: float
    ttft_p90_s: float
    tpot_p50_s: float
    num_prompt_tokens: int
    num_computed_tokens: int
    num_reused_tokens: int
    num_fetched_tokens: int
    num_restored_tokens: int
    computed_share: float


@dataclass(frozen=True)
class Shape:
    """The mesh: workers of each kind, and how fast KV moves. Bandwidths in bytes a second, `tier_bytes` for each worker."""

    prefill: int = 2
    decode: int = 2
    both: int = 0
    fetch_bytes_per_s: float = 1e9
    tier_bytes: float = 10e9
    tier_bytes_per_s: float = 1e9

    def settings(self, *, fetches: bool, has_tiers: bool) -> MeshSettings:
        """Return the simulator's settings of one variant. Every request is admitted: all variants serve the same ones."""
        return MeshSettings(
            admission=None,
            fetching=Fetching(self.fetch_bytes_per_s) if fetches else None,
            tiers=Tiers(self.tier_bytes, self.tier_bytes_per_s) if has_tiers else None,
        )


def scaled(arrivals: Iterator[Arrival], block_tokens: int, speedup: float = 1.0) -> Iterator[Arrival]:
    """Yield requests whose blocks have `block_tokens` instead of 512, all lengths in proportion, `speedup` times as fast."""
    for arrival in at_rate(arrivals, speedup):
        num_input, num_output = (
            max(1, round(length * block_tokens / BLOCK_TOKENS)) for length in (arrival.num_input, arrival.num_output)
        )
        yield arrival._replace(num_input=num_input, num_output=num_output)


def load(path: str, num_requests: int | None, block_tokens: int, speedup: float) -> list[Arrival]:
    """Return the first requests of a trace, scaled. Raises TraceError."""
    return list(islice(scaled(read_mooncake(path), block_tokens, speedup), num_requests))


def prompt_of(number: int, arrival: Arrival, block_tokens: int) -> list[int]:
    """Return the token ids of request `number` of a load: equal blocks of the trace are equal tokens, and the rest is its own."""
    named = [_tokens(f"block {name}", block_tokens) for name in arrival.hashes]
    rest = _tokens(f"rest of {number}", arrival.num_input - len(named) * block_tokens)
    return [token for part in (*named, rest) for token in part]


def _tokens(name: str, num: int) -> list[int]:
    rng = Random(name)
    return [FIRST_ID + rng.randrange(NUM_IDS) for _ in range(num)]


def least_computed(arrivals: Sequence[Arrival], block_tokens: int) -> int:
    """Return the prompt tokens that are computed if no block ever is computed twice."""
    seen, total = set[int](), 0
    for arrival in arrivals:
        known = next((number for number, name in enumerate(arrival.hashes) if name not in seen), len(arrival.hashes))
        total += max(1, arrival.num_input - known * block_tokens)
        seen.update(arrival.hashes)
    return total


def simulated(arrivals: Sequence[Arrival], spec: WorkerSpec, shape: Shape, *, fetches: bool, has_tiers: bool) -> Figures:
    """Return the figures of one variant."""
    results = Results()
    mesh = Mesh(shape.settings(fetches=fetches, has_tiers=has_tiers), results, prefix_tokens=spec.prefix_tokens)
    for count, prefill, decode in ((shape.prefill, True, False), (shape.decode, False, True), (shape.both, True, True)):
        for _ in range(count):
            mesh.add_worker(spec, prefill=prefill, decode=decode)
    mesh.run(arrivals)
    sources = results.sources
    return Figures(
        num_completed=results.total.num_completed,
        ttft_p50_s=results.ttft.quantile(0.5),
        ttft_p90_s=results.ttft.quantile(0.9),
        tpot_p50_s=results.tpot.quantile(0.5),
        num_prompt_tokens=results.num_input_tokens,
        num_computed_tokens=sources["computed"],
        num_reused_tokens=sources["reused"],
        num_fetched_tokens=sources["fetched"],
        num_restored_tokens=sources["restored"],
        computed_share=sources["computed"] / max(1, results.num_input_tokens),
    )


def compare(arrivals: Sequence[Arrival], spec: WorkerSpec, shape: Shape) -> dict[str, object]:
    """Return the figures of all variants."""
    least = least_computed(arrivals, spec.prefix_tokens)
    runs = {
        name: asdict(simulated(arrivals, spec, shape, fetches=fetches, has_tiers=has_tiers))
        for name, (fetches, has_tiers) in VARIANTS.items()
    }
    return {"num_requests": len(arrivals), "least_computed_tokens": least, "mesh": asdict(shape), "simulated": runs}


def main(argv: Sequence[str] | None = None) -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.kv.mooncake", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("trace", help="Mooncake's trace, JSON lines")
    parser.add_argument("--requests", type=int, default=None, help="only the first so many")
    parser.add_argument("--rate", type=_speedup, default=0.1, help="so many times as fast as the trace: 0.1x")
    parser.add_argument("--block-tokens", type=int, default=TENTH, help="of a block of the trace; 512: as it is")
    parser.add_argument("--speed", default="", help="JSON file of a worker (pdmesh/simulator/workers/spec.py); else a small one")
    for name, default in asdict(Shape()).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(default), default=default)
    given = parser.parse_args(argv)
    try:
        spec = replace(read_spec(given.speed) if given.speed else LAPTOP, prefix_tokens=given.block_tokens)
        shape = Shape(**{name: getattr(given, name) for name in asdict(Shape())})
        shape.settings(fetches=True, has_tiers=True)
        arrivals = load(given.trace, given.requests, given.block_tokens, given.rate)
    except (SpecError, TraceError, ValueError) as error:
        parser.error(str(error))
    print(json.dumps(compare(arrivals, spec, shape)))


def _speedup(text: str) -> float:
    value = float(text.removesuffix("x"))
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a factor such as 0.1x")
    return value


if __name__ == "__main__":
    main()
