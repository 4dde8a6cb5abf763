"""The parts of `make bench-cpu` that have peers: which take part, how much is measured, and what is asked for."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from benchmarks.cpu.cases import VOCABULARY, Measured, Plan, Prompts, RandomPrompts, TextPrompts
from benchmarks.cpu.contest import Contest
from benchmarks.cpu.figures import BF16_NAME, INT4_NAME, INT8_NAME, Goals, Results, Versus, all_figures
from benchmarks.cpu.limits import MachineLimits, ModelSizes
from benchmarks.harness import Figure, Kept, Options, aligned, say
from benchmarks.peers.environments import OURS, OURS_LARGE, PEERS, PEERS_LARGE, Contestant
from benchmarks.peers.shapes import EXPERTS_1B, LLAMA_1B, LLAMA_3B
from benchmarks.peers.weights import Subject, random
from pdmesh.models.catalogue import SMOLLM2, TINYLLAMA
from pdmesh.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class Part:
    """A model on which we and the peers are measured."""

    label: str
    subject: Subject
    plan: Plan
    goals: Goals
    ours: Sequence[Contestant] = OURS_LARGE
    peers: Sequence[Contestant] = PEERS_LARGE
    stays: bool = False


# 75 s: a prompt of 1000 tokens that takes longer is at a third of what the slowest machine's fastest peer reaches at 3 B.
_LARGE = Plan(batches=(1, 8), prompt_tokens=16, new_tokens=32, prefills=(1000,), answer_s=75.0)
_LARGE_GOALS = Goals(
    versus={
        INT8_NAME: Versus(decode={1: 1.5, 8: 3.0}, prefill={1000: 2.0}, share=0.9, either=True),
        INT4_NAME: Versus(decode={1: 2.3, 8: 3.0}, prefill={1000: 2.0}, share=0.85),
    },
    prefill_share={INT8_NAME: 0.7},
    over={(INT4_NAME, INT8_NAME): 1.6},
)
# vLLM compiles for ten minutes where it has no bfloat16 of the processor's own, and is then slower than half of the fastest by
# far (TinyLlama, SmolLM2): the largest models do not wait for that.
_LARGER_READY_S = 240.0
# At 3 B and with experts nothing is asked of 4 bits over 8 alone.
_LARGER_GOALS = replace(_LARGE_GOALS, over={})
_EXPERTS = Versus(decode={1: 1.5, 8: 2.0})
_SMALL_GOALS = Goals(
    versus={
        INT8_NAME: Versus(decode={1: 2.5, 4: 3.0, 16: 3.0, 32: 2.5}, prefill={1000: 1.6, 8000: 1.6}, share=0.65),
        BF16_NAME: Versus(decode={}, share=0.75),
    },
    prefill_share={INT8_NAME: 0.7},
    over={(INT8_NAME, BF16_NAME): 1.7, (INT4_NAME, BF16_NAME): 2.2},
    by_bits=False,
)
PARTS: Mapping[str, Part] = {
    "smollm2": Part("SmolLM2-135M", Subject(SMOLLM2.name), Plan(), _SMALL_GOALS, OURS, PEERS, stays=True),
    "tinyllama": Part("TinyLlama-1.1B", Subject(TINYLLAMA.name), replace(_LARGE, limit_s=240.0), _LARGE_GOALS),
    "llama1b": Part("1B shape", random(LLAMA_1B), replace(_LARGE, limit_s=210.0), _LARGE_GOALS),
    "llama3b": Part("3B shape", random(LLAMA_3B), replace(_LARGE, limit_s=300.0, ready_s=_LARGER_READY_S), _LARGER_GOALS),
    "experts": Part(
        "64 experts, 1B",
        random(EXPERTS_1B),
        replace(_LARGE, limit_s=180.0, ready_s=_LARGER_READY_S),
        Goals(versus={INT8_NAME: _EXPERTS, INT4_NAME: _EXPERTS}),
    ),
}


@dataclass(frozen=True)
class Found:
    """A part's figures; why some contestants or cases have none; what the contestants say of themselves."""

    figures: list[Figure]
    not_measured: Mapping[str, str]
    notes: Mapping[str, Mapping[str, object]]


def run(part: Part, name: str, options: Options, rounds: int | None, peers: Sequence[str] | None) -> Found:
    """Measure a part. `rounds`: so many, however long they last; None: those of its plan. `peers`: parts of their names; None:
    all. A part that was cut off goes on where it was."""
    plan = part.plan if rounds is None else replace(part.plan, rounds=rounds, limit_s=math.inf)
    plan = _quick(plan) if options.quick else plan
    kept = Kept(options.folder / name)
    measured = Measured.resumed(kept)
    if measured.samples:
        count = sum(map(len, measured.samples.values()))
        say(f"{name}: going on with {count} samples of a run that was cut off (--fresh: without)")
    contestants = [*part.ours, *(peer for peer in part.peers if _is_chosen(peer, peers))]
    folder = part.subject.folder(say)
    with Contest(part.subject, plan, _prompts(part), part.stays) as contest:
        contest.admit(contestants)
        contest.measure(measured)
    results = Results(
        part.label, plan, part.goals, ModelSizes.read(folder), contestants, measured.medians, measured.notes,
        MachineLimits.of(measured.medians),
    )  # fmt: skip
    say(side_by_side(results))
    kept.forget()
    rounds_of = {case: len(values) for case, values in measured.samples.items()}
    notes = {seat: {**about, "rounds": _rounds(seat, rounds_of)} for seat, about in measured.notes.items()}
    return Found(all_figures(results), contest.absent | measured.failures, notes)


def _rounds(seat: str, rounds_of: Mapping[str, int]) -> dict[str, int]:
    return {case.partition(": ")[2]: count for case, count in rounds_of.items() if case.startswith(f"{seat}: ")}


def _is_chosen(peer: Contestant, wanted: Sequence[str] | None) -> bool:
    return wanted is None or any(part in peer.name.lower() for part in wanted)


def _prompts(part: Part) -> Prompts:
    return TextPrompts(Tokenizer.load(part.subject.folder(say))) if part.stays else RandomPrompts(VOCABULARY)


def _quick(plan: Plan) -> Plan:
    return replace(plan, rounds=1, batches=plan.batches[:2], prompt_tokens=16, new_tokens=8, prefills=(200,))


def side_by_side(results: Results) -> str:
    """Return tokens a second, a line for each contestant."""
    names = [contestant.name for contestant in results.contestants]
    columns = [[results.label, *names]]
    for size in [*results.plan.batches, *results.plan.prefills]:
        is_batch = len(columns) <= len(results.plan.batches)
        cases = [f"{name}: decode, batch {size}" if is_batch else f"{name}: prefill, {size} tokens" for name in names]
        head = f"batch {size}" if is_batch else f"prefill {size}"
        columns.append([head, *(f"{results.medians[case]:.4g}" if case in results.medians else "-" for case in cases)])
    return "\n".join(aligned(list(zip(*columns, strict=True))))
