"""The contestants of `make bench-cpu` as running processes: installed, started, asked in turn, and left out with a reason."""

from __future__ import annotations

import json
import math
import os
import re
import statistics
import sys
import sysconfig
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

from benchmarks.harness import PLAIN, interleave, say
from benchmarks.peers.environments import Contestant, PeerError, ensure_environment, ensure_weights, peers_folder
from benchmarks.peers.servers import Child
from pdmesh.engine.kernels.cpu import library
from pdmesh.models.catalogue import ModelError
from pdmesh.text.tokenizer import Tokenizer

MAX_SEQS, _SANITY_TOKENS = 32, 8
# A pool for 32 sequences, every prompt computed in full, and each step for one token of a sequence, as with the others.
MEASURED: Mapping[str, object] = {"kv_memory_mb": 1024, "prefix_caching": False, **PLAIN}


@dataclass
class Seat:
    """A contestant with its process. `answer` is what it said to a plain question."""

    contestant: Contestant
    start: Callable[[bool], Child]
    child: Child
    answer: str = ""


@dataclass
class Contest:
    """Everybody who could be started, each paused until its turn; `absent` says why the others are not here."""

    model: str
    max_context: int
    prompts: Prompts
    seats: list[Seat] = field(default_factory=list)
    absent: dict[str, str] = field(default_factory=dict)

    def __enter__(self) -> Contest:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        for seat in self.seats:
            seat.child.close()

    def admit(self, contestants: Sequence[Contestant]) -> None:
        """Installs and starts each in turn."""
        for contestant in contestants:
            try:
                self._admit(contestant)
            except (PeerError, ModelError, OSError) as error:
                self.absent[contestant.name] = str(error)
                say(f"{contestant.name}: absent: {error}")

    def _admit(self, contestant: Contestant) -> None:
        python = ensure_environment(contestant.environment, say) if contestant.environment else None
        weights = ensure_weights(self.model, contestant.weights, say)

        def start(as_measured: bool) -> Child:
            return start_child(contestant, python, weights, self.max_context, as_measured=as_measured)

        say(f"{contestant.name}: starting")
        seat = Seat(contestant, start, start(True))
        try:
            seat.child.wait_ready()
            with seat.child.turn():
                seat.answer = self._ask(seat.child)
        except BaseException:
            seat.child.close()
            raise
        self.seats.append(seat)
        say(f"{contestant.name}: {seat.child.about.get('version', '')} says {seat.answer!r}")

    def _ask(self, child: Child) -> str:
        """A peer that does not know the answer has misread the weights: its speed means nothing."""
        answer = self.prompts.text(child.generate([self.prompts.question], _SANITY_TOKENS).token_ids[0])
        if ANSWER not in answer:
            raise PeerError(f"gives no sensible text: {answer!r}")
        return answer


def start_child(contestant: Contestant, python: Path | None, weights: Path, max_context: int, *, as_measured: bool) -> Child:
    """A process that loads the model. Not `as_measured`: our engine with all its defaults."""
    cores = sorted(os.sched_getaffinity(0))
    settings = {**contestant.settings, **(MEASURED if as_measured else {})} if contestant.is_ours else {}
    options: dict[str, object] = {"model": str(weights), "threads": len(cores), "max_seqs": MAX_SEQS, "max_context": max_context}
    variables = {
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
        "VLLM_CACHE_ROOT": str(peers_folder() / "vllm-cache"),
        **contestant.variables,
    }
    folder = peers_folder() / "logs"
    folder.mkdir(parents=True, exist_ok=True)
    log = folder / (re.sub(r"\W+", "-", contestant.name) + ".log")
    options |= {"library": contestant.library, "settings": settings}
    return Child(python or Path(sys.executable), "benchmarks.peers.children", options, log, variables)


def first_token_seconds(seat: Seat, question: Sequence[int]) -> float:
    """Wall time from starting a fresh process to its first token for a short prompt. PeerError: there was none."""
    child = seat.start(False)
    try:
        child.wait_ready()
        child.generate([question], 1)
        return time.monotonic() - child.started
    finally:
        child.close()


# Prompts of any length that share no beginning: consecutive pieces of the Python standard library's sources.


_NUM_CHARACTERS = 2_000_000
QUESTION = "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
ANSWER = "Paris"


class Prompts:
    """Deals out token ids. Whoever asks with the same key gets the same prompts, so that all contestants do."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._ids = tokenizer.encode(_standard_library(_NUM_CHARACTERS))
        self._place = 0
        self._dealt: dict[Hashable, list[list[int]]] = {}
        self.question = list(tokenizer.encode(QUESTION))

    def deal(self, key: Hashable, count: int, length: int) -> list[list[int]]:
        """`count` prompts of exactly `length` tokens; other keys get other text."""
        if key not in self._dealt:
            self._dealt[key] = [self._next(length) for _ in range(count)]
        return self._dealt[key]

    def text(self, token_ids: Sequence[int]) -> str:
        return self._tokenizer.decode(token_ids)

    def _next(self, length: int) -> list[int]:
        if self._place + length > len(self._ids):
            self._place = self._place % 101 + 1  # once more from the top, cut elsewhere
        self._place += length
        return list(self._ids[self._place - length : self._place])


def _standard_library(num_characters: int) -> str:
    texts, total = [], 0
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        texts.append(path.read_text(encoding="utf-8", errors="replace"))
        total += len(texts[-1])
        if total >= num_characters:
            break
    return "".join(texts)


# What the machine allows at most for a model of this size: bytes over bandwidth, products over their peak.


READ, INT8, BF16 = "read bandwidth, all threads", "int8 product peak", "bf16 product peak"
# How each limit is measured; in turn with the contestants, so that a machine's moods touch all alike.
LIMIT_CASES = {READ: library.read_bandwidth_gb_s, INT8: library.int8_peak_gop_s, BF16: library.bf16_peak_gflop_s}
UNITS = {READ: "GB/s", INT8: "GOP/s", BF16: "GFLOP/s"}
_KV_BYTES_PER_NUMBER = 2


@dataclass(frozen=True)
class ModelSizes:
    """Numbers that a step has to read or multiply."""

    layer_weights: int
    head_weights: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int

    @staticmethod
    def read(folder: Path) -> ModelSizes:
        """From config.json and the heads of the safetensors files."""
        config = json.loads((folder / "config.json").read_text())
        shapes: dict[str, list[int]] = {}
        for file in sorted(folder.glob("*.safetensors")):
            shapes |= _shapes(file)
        heads = config["num_attention_heads"]
        return ModelSizes(
            layer_weights=sum(math.prod(shape) for name, shape in shapes.items() if ".layers." in name and len(shape) == 2),
            head_weights=config["vocab_size"] * config["hidden_size"],
            num_layers=config["num_hidden_layers"],
            num_heads=heads,
            num_kv_heads=config.get("num_key_value_heads", heads),
            head_dim=config.get("head_dim") or config["hidden_size"] // heads,
        )

    @property
    def num_weights(self) -> int:
        """All that a decode step reads: the layers' matrices and the head (tied to the embedding or not)."""
        return self.layer_weights + self.head_weights

    @property
    def kv_bytes_per_token(self) -> int:
        """In 16 bits."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * _KV_BYTES_PER_NUMBER

    def prefill_weight_operations(self, length: int) -> float:
        """Of a prompt's products with weights; the head is needed for the last token alone."""
        return 2.0 * (self.layer_weights * length + self.head_weights)

    def prefill_attention_operations(self, length: int) -> float:
        """Scores and weighted values, the causal half."""
        return 4.0 * self.num_layers * self.num_heads * self.head_dim * length * (length + 1) / 2


@dataclass(frozen=True)
class MachineLimits:
    """Medians of the run. `operations_s` by kind."""

    bytes_s: float
    int8_operations_s: float
    bf16_operations_s: float

    @staticmethod
    def of(medians: dict[str, float]) -> MachineLimits | None:
        """None where the machine could not be measured: there is no compiler for the kernels."""
        if not {READ, INT8, BF16} <= medians.keys():
            return None
        return MachineLimits(medians[READ] * 1e9, medians[INT8] * 1e9, medians[BF16] * 1e9)

    def peak(self, bytes_per_weight: float) -> float:
        """Weights of a byte or less can be multiplied as int8."""
        return self.int8_operations_s if bytes_per_weight < 2 else self.bf16_operations_s

    def decode_speed(self, sizes: ModelSizes, bytes_per_weight: float, batch: int, context: float) -> float:
        """Tokens a second at most: a step reads all weights once and each sequence's KV; products take their time, too."""
        num_bytes = sizes.num_weights * bytes_per_weight + batch * context * sizes.kv_bytes_per_token
        compute_s = 2 * sizes.num_weights * batch / self.peak(bytes_per_weight)
        return batch / max(num_bytes / self.bytes_s, compute_s)

    def prefill_speed(self, sizes: ModelSizes, bytes_per_weight: float, length: int) -> float:
        """Tokens a second at most: weights' products at their peak, attention's at that of bf16."""
        seconds = sizes.prefill_weight_operations(length) / self.peak(bytes_per_weight)
        return length / (seconds + sizes.prefill_attention_operations(length) / self.bf16_operations_s)


def _shapes(file: Path) -> dict[str, list[int]]:
    """The head of a safetensors file: its length in 8 bytes, then JSON."""
    with file.open("rb") as stream:
        head = json.loads(stream.read(int.from_bytes(stream.read(8), "little")))
    return {name: entry["shape"] for name, entry in head.items() if name != "__metadata__"}


# What is measured of every contestant, by one definition, and of the machine.
#
#     decode at batch B   B * (n - 1) tokens / (t(n tokens) - t(1 token)): what remains is decode alone
#     prefill             length / t(one prompt, 1 token)
#     KV read             (time per token at a long context - at a short one): what remains is the KV cache's part
#
# Every call gets prompts of its own; in one round all contestants get the same.


SHORT_CONTEXT = 64
_ATTEMPTS = 3


@dataclass(frozen=True)
class Plan:
    """How much is measured."""

    rounds: int = 3
    starts: int = 3
    batches: tuple[int, ...] = (1, 4, 16, 32)
    prompt_tokens: int = 160
    new_tokens: int = 128
    prefill_tokens: int = 1000
    long_context: int = 8000

    @property
    def max_context(self) -> int:
        """Enough for every contestant's cases; the long context is our engine's alone."""
        return self.prefill_tokens + self.new_tokens

    @property
    def mean_context(self) -> float:
        """Of the tokens that decode reads back."""
        return self.prompt_tokens + self.new_tokens / 2


@dataclass
class Measured:
    """Samples by case; a case that failed once has a reason instead."""

    samples: dict[str, list[float]] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)

    @property
    def medians(self) -> dict[str, float]:
        return {name: statistics.median(values) for name, values in self.samples.items() if name not in self.failures}

    def recorded(self, name: str, case: Callable[[], float]) -> Callable[[], float]:
        """The case, keeping its samples; a failure is kept too and costs no further rounds."""

        def run() -> float:
            if name in self.failures:
                return math.nan
            try:
                value = case()
            except (PeerError, RuntimeError, OSError) as error:
                self.failures[name] = str(error)
                say(f"{name}: failed: {error}")
                return math.nan
            self.samples.setdefault(name, []).append(value)
            return value

        return run


def decode_case(name: str, batch: int) -> str:
    return f"{name}: decode, batch {batch}"


def prefill_case(name: str, length: int) -> str:
    return f"{name}: prefill, {length} tokens"


def context_case(name: str, length: int) -> str:
    return f"{name}: seconds a token, context {length}"


def start_case(name: str) -> str:
    return f"{name}: process start to first token"


def measure(contest: Contest, plan: Plan) -> Measured:
    """All cases in turn, round after round, by size: at one size the contestants follow each other."""
    measured, cases = Measured(), dict[str, Callable[[], float]]()
    cases |= LIMIT_CASES
    for batch in plan.batches:
        cases |= {decode_case(seat.contestant.name, batch): Decode(seat, contest.prompts, plan, batch) for seat in contest.seats}
    for seat in contest.seats:
        cases[prefill_case(seat.contestant.name, plan.prefill_tokens)] = Prefill(seat, contest.prompts, plan.prefill_tokens)
    for seat in [seat for seat in contest.seats if seat.contestant.is_ours][:1]:
        for length in (SHORT_CONTEXT, plan.long_context):
            cases[context_case(seat.contestant.name, length)] = Context(seat, contest.prompts, plan, length)
    warm_up(contest, plan)
    interleave({name: measured.recorded(name, case) for name, case in cases.items()}, plan.rounds)
    return measured


def warm_up(contest: Contest, plan: Plan) -> None:
    """Each shape once: some libraries compile or lay out memory for it at first sight."""
    for seat in contest.seats:
        say(f"{seat.contestant.name}: warming up")
        try:
            for batch in plan.batches:
                Decode(seat, contest.prompts, plan, batch)()
            Prefill(seat, contest.prompts, plan.prefill_tokens)()
        except PeerError as error:  # the case itself will tell
            say(f"{seat.contestant.name}: {error}")


def measure_starts(contest: Contest, plan: Plan) -> Measured:
    """Fresh processes, one at a time. The measured ones must be gone: they hold memory."""
    measured, question = Measured(), contest.prompts.question
    fresh = [seat for seat in contest.seats if not seat.contestant.settings]
    cases = {start_case(seat.contestant.name): Start(seat, question) for seat in fresh}
    interleave({name: measured.recorded(name, case) for name, case in cases.items()}, plan.starts)
    return measured


@dataclass
class Decode:
    """Output tokens a second over all sequences. Callable; each call is the next round."""

    seat: Seat
    prompts: Prompts
    plan: Plan
    batch: int
    round: int = 0

    def __call__(self) -> float:
        self.round += 1
        with self.seat.child.turn():
            for attempt in range(_ATTEMPTS):
                one, many = (self._seconds(num_tokens, attempt) for num_tokens in (1, self.plan.new_tokens))
                if many > one:
                    return self.batch * (self.plan.new_tokens - 1) / (many - one)
        raise PeerError(f"{self.plan.new_tokens} tokens took no longer than one, {_ATTEMPTS} times: the machine is disturbed")

    def _seconds(self, num_tokens: int, attempt: int) -> float:
        key = ("decode", self.batch, self.round, num_tokens, attempt)
        return self.seat.child.generate(self.prompts.deal(key, self.batch, self.plan.prompt_tokens), num_tokens).seconds


@dataclass
class Prefill:
    """Prompt tokens a second of one prompt."""

    seat: Seat
    prompts: Prompts
    length: int
    round: int = 0

    def __call__(self) -> float:
        self.round += 1
        with self.seat.child.turn():
            prompts = self.prompts.deal(("prefill", self.round), 1, self.length)
            return self.length / self.seat.child.generate(prompts, 1).seconds


@dataclass
class Context:
    """Seconds a token of one sequence whose prompt has `length` tokens. For contestants that show when the first one came."""

    seat: Seat
    prompts: Prompts
    plan: Plan
    length: int
    round: int = 0

    def __call__(self) -> float:
        self.round += 1
        with self.seat.child.turn():
            prompts = self.prompts.deal(("context", self.length, self.round), 1, self.length)
            reply = self.seat.child.generate(prompts, self.plan.new_tokens)
        if reply.first_seconds is None:
            raise PeerError("does not show when the first token came")
        return (reply.seconds - reply.first_seconds) / (self.plan.new_tokens - 1)


@dataclass
class Start:
    seat: Seat
    question: list[int]

    def __call__(self) -> float:
        return first_token_seconds(self.seat, self.question)
