"""From measured medians to figures with their goals (issue "CPU: decode and prefill at the machine's limit")."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from benchmarks.cpu.contest import (
    BF16,
    INT8,
    READ,
    SHORT_CONTEXT,
    UNITS,
    MachineLimits,
    ModelSizes,
    Plan,
    context_case,
    decode_case,
    prefill_case,
    start_case,
)
from benchmarks.harness import Figure
from benchmarks.peers.environments import Contestant

INT8_NAME, BF16_NAME, INT4_NAME, VLLM_NAME = "pdmesh int8", "pdmesh bf16", "pdmesh int4", "vLLM bf16"
# Times the fastest peer.
DECODE_GOALS = {1: 2.0, 4: 3.0, 16: 3.0, 32: 2.5}
PREFILL_GOAL = 1.5
START_GOAL = 0.2
# Shares of the machine's limit.
DECODE_SHARE_GOALS = {INT8_NAME: 0.65, BF16_NAME: 0.75}
PREFILL_SHARE_GOAL, KV_SHARE_GOAL = 0.7, 0.6
# Times our own bf16 at batch 1.
QUANTIZED_GOALS = {INT8_NAME: 1.7, INT4_NAME: 2.2}


@dataclass(frozen=True)
class Results:
    """All that figures are made of. `about`: what each child said of itself."""

    plan: Plan
    sizes: ModelSizes
    contestants: Sequence[Contestant]
    medians: Mapping[str, float]
    about: Mapping[str, Mapping[str, object]]
    limits: MachineLimits | None

    def bytes_per_weight(self, contestant: Contestant) -> float:
        """As the engine counts what it reads, else as the format says."""
        counted = self.about.get(contestant.name, {}).get("weight_bytes")
        return counted / self.sizes.num_weights if isinstance(counted, int) else contestant.bytes_per_weight

    def fastest_peer(self, case_of: Mapping[str, str]) -> tuple[str, float] | None:
        """Name and speed; `case_of` maps contestants to their cases."""
        speeds = [
            (contestant.name, self.medians[case_of[contestant.name]])
            for contestant in self.contestants
            if not contestant.is_ours and case_of[contestant.name] in self.medians
        ]
        return max(speeds, key=lambda named: named[1], default=None)


def all_figures(results: Results) -> list[Figure]:
    parts = (machine, speeds, against_peers, starts, shares, long_context, formats)
    return [figure for part in parts for figure in part(results)]


def machine(results: Results) -> Iterator[Figure]:
    for name in (READ, INT8, BF16):
        if name in results.medians:
            yield Figure(name, results.medians[name], UNITS[name], "higher")


def speeds(results: Results) -> Iterator[Figure]:
    """Everybody's tokens a second beside what the machine allows for their weights."""
    for contestant in results.contestants:
        for case, limit in _limits(results, contestant).items():
            if case in results.medians:
                yield Figure(case, results.medians[case], "tokens/s", "higher", limit=limit)


def _limits(results: Results, contestant: Contestant) -> dict[str, float | None]:
    """Of each case; None where the machine could not be measured."""
    name, plan, limits = contestant.name, results.plan, results.limits
    if limits is None:
        cases = [decode_case(name, batch) for batch in plan.batches]
        return dict.fromkeys([*cases, prefill_case(name, plan.prefill_tokens)])
    sizes, width = results.sizes, results.bytes_per_weight(contestant)
    decodes = {decode_case(name, batch): limits.decode_speed(sizes, width, batch, plan.mean_context) for batch in plan.batches}
    return {**decodes, prefill_case(name, plan.prefill_tokens): limits.prefill_speed(sizes, width, plan.prefill_tokens)}


def against_peers(results: Results) -> Iterator[Figure]:
    """int8, our default, over the fastest peer at each size."""
    names = [contestant.name for contestant in results.contestants]
    length = results.plan.prefill_tokens
    cases = [
        (f"decode, batch {batch}", {name: decode_case(name, batch) for name in names}, DECODE_GOALS.get(batch))
        for batch in results.plan.batches
    ]
    cases.append((f"prefill, {length} tokens", {name: prefill_case(name, length) for name in names}, PREFILL_GOAL))
    for label, case_of, goal in cases:
        fastest = results.fastest_peer(case_of)
        ours = results.medians.get(case_of.get(INT8_NAME, ""))
        if fastest and ours:
            name, speed = fastest
            peer = f"{name}, {speed:.0f} tokens/s"
            yield Figure(f"int8 over the fastest peer: {label}", ours / speed, "times", "higher", goal=goal, peer=peer)


def starts(results: Results) -> Iterator[Figure]:
    """Seconds from starting a process to its first token, files in the page cache."""
    medians = {c.name: results.medians[start_case(c.name)] for c in results.contestants if start_case(c.name) in results.medians}
    for name, seconds in medians.items():
        yield Figure(start_case(name), seconds, "s", "lower")
    if INT8_NAME in medians and VLLM_NAME in medians:
        share = medians[INT8_NAME] / medians[VLLM_NAME]
        peer = f"{VLLM_NAME}, {medians[VLLM_NAME]:.1f} s, compile cache warm"
        yield Figure("process start to first token, of vLLM's", share, "times", "lower", goal=START_GOAL, peer=peer)


def shares(results: Results) -> Iterator[Figure]:
    """Of read bandwidth at batch 1, of the product peak in prefill. Of what is read only weights count: the KV comes on top."""
    if results.limits is None:
        return
    for contestant in results.contestants:
        name = contestant.name
        speed, goal = results.medians.get(decode_case(name, 1)), DECODE_SHARE_GOALS.get(name)
        if contestant.is_ours and speed:
            num_bytes = results.bytes_per_weight(contestant) * results.sizes.num_weights
            label = f"{name}: batch 1, share of read bandwidth ({num_bytes / 1e6:.0f} MB of weights a token)"
            yield Figure(label, speed * num_bytes / results.limits.bytes_s, "share", "higher", goal=goal, limit=1.0)
    yield from _prefill_shares(results, results.limits)


def _prefill_shares(results: Results, limits: MachineLimits) -> Iterator[Figure]:
    length = results.plan.prefill_tokens
    for contestant in results.contestants:
        speed = results.medians.get(prefill_case(contestant.name, length))
        if not contestant.is_ours or not speed:
            continue
        width, goal = results.bytes_per_weight(contestant), PREFILL_SHARE_GOAL if contestant.name == INT8_NAME else None
        limit = limits.prefill_speed(results.sizes, width, length)
        label = f"{contestant.name}: prefill of {length} tokens, share of product peak"
        yield Figure(f"{label} (with attention's at bf16's)", speed / limit, "share", "higher", goal=goal, limit=1.0)
        rate = speed / length * results.sizes.prefill_weight_operations(length)
        yield Figure(f"{label} (weights' alone)", rate / limits.peak(width), "share", "higher", limit=1.0)


def long_context(results: Results) -> Iterator[Figure]:
    """The bytes of KV that a token at a long context reads more, over the time that it takes longer."""
    length = results.plan.long_context
    long, short = (results.medians.get(context_case(INT8_NAME, tokens)) for tokens in (length, SHORT_CONTEXT))
    kv_bytes = results.about.get(INT8_NAME, {}).get("kv_bytes_per_token")
    if not long or not short or not isinstance(kv_bytes, float) or long <= short or results.limits is None:
        return
    num_bytes = (length - SHORT_CONTEXT) * kv_bytes
    label = f"{INT8_NAME}: KV read at {length} tokens, share of read bandwidth ({kv_bytes:.0f} bytes a token)"
    share = num_bytes / (long - short) / results.limits.bytes_s
    yield Figure(label, share, "share", "higher", goal=KV_SHARE_GOAL, limit=1.0)
    yield Figure(f"{INT8_NAME}: decode, batch 1, context {length}", 1 / long, "tokens/s", "higher")


def formats(results: Results) -> Iterator[Figure]:
    base = results.medians.get(decode_case(BF16_NAME, 1))
    for name, goal in QUANTIZED_GOALS.items():
        speed = results.medians.get(decode_case(name, 1))
        if base and speed:
            yield Figure(f"{name} over {BF16_NAME}: decode, batch 1", speed / base, "times", "higher", goal=goal, peer=BF16_NAME)
