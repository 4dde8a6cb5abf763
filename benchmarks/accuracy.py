"""The accuracy half of `make bench-cpu`: what each variant of the engine costs in quality, against `transformers` in fp32.

    python -m benchmarks.accuracy [--windows N] [--variants bfloat16,int8]

Every window of a fixed text goes through the engine's own model in chunks of prefill. Part of some goes once more, through
decode steps with the text's tokens, alone and in a batch: in a batch-invariant backend these logits are the same bits. Last,
greedy text from the beginnings of windows. Windows begin without a special token.

Not covered: what was lost before the checkpoint. One that was made from a 4-bit GGUF file loses next to nothing by int4.
"""

import argparse
import ast
import codecs
import hashlib
import math
import statistics
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import Tensor

from benchmarks.engine_runs import GREEDY, run
from benchmarks.harness import Figure, missed, parser_of, say
from pdmesh.engine.config import EngineConfig
from pdmesh.engine.engine import Engine
from pdmesh.engine.kv_cache.block_pool import num_blocks_for
from pdmesh.engine.loader.loader import load_model
from pdmesh.engine.runner.batch import StepBatch
from pdmesh.models.registry import DEFAULT_MODEL, ensure_model
from pdmesh.text.block_hash import hash_block
from pdmesh.text.tokenizer import Tokenizer

# How far logits are from the reference's: perplexity, KL divergence, greedy agreement. Sums in float64.


# Rows compared at once: their float64 distributions (3 MB each way at 49 152 tokens) stay in the cache, which is twice as fast.
ROWS = 8


@dataclass(frozen=True)
class TokenScores:
    """Per predicted token. [T] each."""

    nll: Tensor  # float64, nats: -log q(the text's next token)
    kl: Tensor  # float64, nats: KL(reference || ours)
    agrees: Tensor  # bool: both distributions have the same most likely token (the lowest id of equals)


@dataclass(frozen=True)
class Accuracy:
    """Over all tokens. `kl_p99` is interpolated between ranks."""

    perplexity: float
    kl_mean: float
    kl_p99: float
    agreement: float


def score(reference: Tensor, ours: Tensor, targets: Tensor) -> TokenScores:
    """Compares logits [T, V] float32 row by row; `targets` [T] int64 are the text's next tokens.

    Raises ValueError for logits that are NaN or a row that has no distribution: a figure made of them would say nothing.
    """
    if reference.shape != ours.shape or targets.shape != ours.shape[:1]:
        raise ValueError(f"logits {tuple(ours.shape)}, reference {tuple(reference.shape)}, targets {tuple(targets.shape)} differ")
    blocks = (slice(start, start + ROWS) for start in range(0, len(targets), ROWS))
    return join([_score_rows(reference[rows], ours[rows], targets[rows]) for rows in blocks])


def join(parts: Sequence[TokenScores]) -> TokenScores:
    """The scores of several pieces of the text one after the other."""
    return TokenScores(*(torch.cat([getattr(part, name) for part in parts]) for name in ("nll", "kl", "agrees")))


def summarize(scores: TokenScores) -> Accuracy:
    return Accuracy(
        perplexity=scores.nll.mean().exp().item(),
        kl_mean=scores.kl.mean().item(),
        kl_p99=scores.kl.quantile(0.99).item(),
        agreement=scores.agrees.double().mean().item(),
    )


def perplexity_ratio(ours: TokenScores, theirs: TokenScores) -> tuple[float, float]:
    """Perplexity of ours over theirs on the same tokens, and the ratio's standard error by the tokens' paired differences."""
    difference = ours.nll - theirs.nll
    ratio = difference.mean().exp()
    return ratio.item(), (ratio * difference.std() / len(difference) ** 0.5).item()


def common_prefix(left: Sequence[int], right: Sequence[int]) -> int:
    """Tokens until the two differ, or until the shorter ends."""
    pairs = enumerate(zip(left, right, strict=False))
    return next((index for index, (a, b) in pairs if a != b), min(len(left), len(right)))


def _score_rows(reference: Tensor, ours: Tensor, targets: Tensor) -> TokenScores:
    log_p, log_q = _log_probabilities(reference, "the reference"), _log_probabilities(ours, "the engine")
    p = log_p.exp()
    # A token that the reference rules out adds nothing, whatever ours says of it (0 * -inf would be NaN).
    terms = torch.where(p > 0, p * (log_p - log_q), 0.0)
    return TokenScores(
        nll=-log_q.gather(1, targets[:, None])[:, 0],
        kl=terms.sum(-1).clamp_min(0.0),  # never negative but for rounding
        agrees=reference.argmax(-1) == ours.argmax(-1),
    )


def _log_probabilities(logits: Tensor, whose: str) -> Tensor:
    log_p = torch.log_softmax(logits.double(), dim=-1)
    # One check finds NaN, +inf and rows that are -inf throughout: each makes the whole row NaN.
    bad = log_p[:, 0].isnan()
    if bad.any():
        raise ValueError(f"{whose}: {int(bad.sum())} of {len(bad)} rows of logits hold NaN or infinity")
    return log_p


# The fixed text for perplexity: prose from docstrings of Python's standard library, so nothing is fetched.
#
# The files are read, not imported, and were chosen because these docstrings are the same from Python 3.10 to 3.13. The digest
# says which text a figure is about: figures with different digests cannot be compared, ratios to another variant still can.


# Of the standard library, in this order: the first windows come from the first files.
FILES = (
    "textwrap.py",
    "optparse.py",
    "cmd.py",
    "_pydecimal.py",
    "difflib.py",
    "xml/sax/handler.py",
    "email/message.py",
    "unittest/case.py",
    "urllib/parse.py",
    "codecs.py",
    "http/cookiejar.py",
    "json/__init__.py",
    "xml/etree/ElementTree.py",
    "pickle.py",
    "email/policy.py",
    "xmlrpc/server.py",
    "mimetypes.py",
    "email/header.py",
    "uuid.py",
    "xml/sax/xmlreader.py",
)
# Shorter docstrings are labels rather than prose.
MIN_CHARACTERS = 200
_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass(frozen=True)
class Windows:
    """Consecutive pieces of the text, all of one length in tokens; `digest` is the SHA-256 of the text that they cover."""

    token_ids: tuple[tuple[int, ...], ...]
    digest: str


def fixed_text(library: Path | None = None) -> str:
    """The Zen of Python, then every longer docstring of FILES without examples. Raises ValueError where a file is missing."""
    folder = library or Path(sysconfig.get_path("stdlib"))
    parts = [zen(_read(folder / "this.py"))]
    for name in FILES:
        parts += prose(_read(folder / name))
    return "\n\n".join(parts)


def zen(source: str) -> str:
    """The poem that this.py keeps in ROT13 as its first string; importing the module would print it."""
    strings = (node.value for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Constant))
    return codecs.decode(next(value for value in strings if isinstance(value, str)), "rot13")


def prose(source: str) -> list[str]:
    """The docstrings of a module's source, from top to bottom, without short ones and those with an interpreter's prompts."""
    nodes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, _DOCUMENTED)]
    nodes.sort(key=lambda node: getattr(node, "lineno", 0))  # a module has no line: it comes first
    texts = [ast.get_docstring(node) or "" for node in nodes]
    return [text for text in texts if len(text) >= MIN_CHARACTERS and ">>>" not in text]


def cut_windows(tokenizer: Tokenizer, text: str, num_windows: int, length: int) -> Windows:
    """The first `num_windows` pieces of `length` tokens, without special tokens. Raises ValueError when the text is too short."""
    token_ids = tokenizer.encode(text, add_special_tokens=False)
    if len(token_ids) < num_windows * length:
        raise ValueError(f"windows: {num_windows} of {length} tokens are more than the text's {len(token_ids)}; ask for fewer")
    covered = token_ids[: num_windows * length]
    pieces = tuple(tuple(covered[start : start + length]) for start in range(0, len(covered), length))
    return Windows(pieces, hashlib.sha256(tokenizer.decode(covered).encode()).hexdigest())


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(f"text: {path.name} of the standard library cannot be read ({error}); use a complete Python") from error


# The reference for accuracy: `transformers` in fp32, computed once for all variants.
#
# Logits of a window (512 tokens x 49 152 x 4 bytes = 100 MB) go to a temporary file. Computing them again for each variant would
# take as long as the slowest of these; float16 on disk would add an error as large as those that are measured.


class LogitsFile:
    """Logits [length, vocab] float32 of one window after the other in a file."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._shapes: list[tuple[int, ...]] = []
        self._starts = [0]

    def append(self, logits: Tensor) -> None:
        """Raises OSError when the disk is full; TMPDIR chooses another."""
        self._file.seek(self._starts[-1])
        logits.contiguous().numpy().tofile(self._file)
        self._shapes.append(tuple(logits.shape))
        self._starts.append(self._file.tell())

    def read(self, index: int) -> Tensor:
        shape = self._shapes[index]
        self._file.seek(self._starts[index])
        return torch.from_numpy(np.fromfile(self._file, dtype=np.float32, count=math.prod(shape))).view(shape)


@dataclass(frozen=True)
class Reference:
    """What transformers says. `logits` by window; `continuations` of the prompts, greedy."""

    logits: LogitsFile
    accuracy: Accuracy
    continuations: list[list[int]]


@contextmanager
def reference_of(
    folder: Path, windows: Sequence[Sequence[int]], prompts: Sequence[Sequence[int]], new_tokens: int
) -> Iterator[Reference]:
    """Computes the reference on all windows and prompts, which are equally long. The logits go when the context ends."""
    from transformers import AutoModelForCausalLM

    # The file has no name: it goes with its descriptor, however we end.
    with tempfile.TemporaryFile(prefix="pdmesh-accuracy-") as file:
        logits = LogitsFile(file)
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        accuracy = _run_windows(model, windows, logits)
        continuations = _continue(model, prompts, new_tokens)
        del model  # the variants need the memory
        yield Reference(logits, accuracy, continuations)


@torch.inference_mode()
def _run_windows(model: Any, windows: Sequence[Sequence[int]], file: LogitsFile) -> Accuracy:
    parts = []
    for window in windows:
        ids = torch.tensor([list(window)])
        logits = model(ids).logits[0].float()
        file.append(logits)
        parts.append(score(logits[:-1], logits[:-1], ids[0, 1:]))
    return summarize(join(parts))


@torch.inference_mode()
def _continue(model: Any, prompts: Sequence[Sequence[int]], new_tokens: int) -> list[list[int]]:
    """Greedy tokens past any end of sequence. One batch of equal lengths needs no padding, and no mask that shifts positions."""
    ids = torch.tensor([list(prompt) for prompt in prompts])
    settings = {"max_new_tokens": new_tokens, "do_sample": False, "eos_token_id": None}
    output = model.generate(ids, attention_mask=torch.ones_like(ids), **settings)
    continuations: list[list[int]] = output[:, ids.shape[1] :].tolist()
    return continuations


# One variant of the engine under measurement: logits of whole windows, by prefill and by decode, and greedy text.
#
# `window_logits` is the only place that knows how a model is called.


# Tokens in a step of prefill. More than one step for a window, so that chunks after the first are measured too.
CHUNK = 128


@dataclass(frozen=True)
class Piece:
    """Tokens of one sequence in one step; the `num_computed` before them are in the pool. Slots are places for sequences."""

    slot: int
    token_ids: Sequence[int]
    num_computed: int


class Variant:
    """A loaded model in an engine that is idle whenever logits are asked for, so that the whole pool can be used here."""

    def __init__(self, folder: Path, overrides: Mapping[str, object], *, slot_tokens: int, num_slots: int) -> None:
        """`num_slots` sequences of `slot_tokens` tokens fit at once. `overrides` are fields of EngineConfig."""
        config = EngineConfig(**{"model": str(folder), **overrides})  # type: ignore[arg-type]
        self._blocks_per_slot = num_blocks_for(slot_tokens, config.block_size)
        self._config = replace(
            config,
            num_blocks=num_slots * self._blocks_per_slot,
            kv_memory_mb=0,
            max_num_seqs=CHUNK,  # a step that returns logits of all its tokens
            max_num_batched_tokens=CHUNK,
            prefix_caching=False,  # blocks are written here behind the allocator's back
            speculation="none",
        )
        self._loaded = load_model(self._config)
        self._engine = Engine(self._config, hash_block=hash_block, loaded=self._loaded)

    @property
    def numeric_mode(self) -> str:
        return self._engine.numeric_mode

    def window_logits(self, pieces: Sequence[Piece]) -> Tensor:
        """Logits [T, vocab] float32 of all T tokens of the pieces, in their order, by one step of the engine's model.

        May be a buffer that the next step writes to.
        """
        return self._loaded.model.forward(self._batch(pieces), self._engine.kv.tensor)

    def prefill(self, slot: int, token_ids: Sequence[int]) -> Tensor:
        """[len(token_ids), vocab]: the sequence from its beginning, in chunks."""
        logits: Tensor | None = None
        for start in range(0, len(token_ids), CHUNK):
            rows = self.window_logits([Piece(slot, token_ids[start : start + CHUNK], start)])
            logits = rows.new_empty(len(token_ids), rows.shape[1]) if logits is None else logits
            logits[start : start + rows.shape[0]] = rows
        if logits is None:
            raise ValueError("token_ids: empty; give at least one token")
        return logits

    def decode(self, windows: Sequence[Sequence[int]], starts: Sequence[int], steps: int) -> Tensor:
        """[sequence, step, vocab]: prefill of `start` tokens of each window, then the text's next tokens, one a step."""
        # Whatever an earlier window left behind must not stand in for keys that a decode step forgets to write.
        self._engine.kv.tensor.zero_()
        for slot, (window, start) in enumerate(zip(windows, starts, strict=True)):
            self.prefill(slot, window[:start])
        logits: Tensor | None = None
        for step in range(steps):
            places = [(slot, start + step) for slot, start in enumerate(starts)]
            rows = self.window_logits([Piece(slot, [windows[slot][place]], place) for slot, place in places])
            logits = rows.new_empty(len(windows), steps, rows.shape[1]) if logits is None else logits
            logits[:, step] = rows
        if logits is None:
            raise ValueError(f"steps: {steps}; give at least 1")
        return logits

    def greedy(self, prompts: Sequence[Sequence[int]], new_tokens: int) -> list[list[int]]:
        """Tokens that the engine appends to each prompt, past any end of sequence; all prompts at once."""
        return run(self._engine, prompts, GREEDY.params(new_tokens, ignore_eos=True))

    def close(self) -> None:
        """Gives the KV memory back; the weights go with the object."""
        self._engine.kv.close()

    def _batch(self, pieces: Sequence[Piece]) -> StepBatch:
        block_size = self._config.block_size
        token_ids = [token for piece in pieces for token in piece.token_ids]
        places = [(p.slot, p.num_computed + i) for p in pieces for i in range(len(p.token_ids))]
        slot_tokens = self._blocks_per_slot * block_size
        starts = [0]
        for piece in pieces:
            starts.append(starts[-1] + len(piece.token_ids))
        return StepBatch(
            token_ids=torch.tensor(token_ids),
            positions=torch.tensor([position for _, position in places]),
            # A slot's blocks lie one after the other: here a token's place is its position.
            slot_mapping=torch.tensor([slot * slot_tokens + position for slot, position in places]),
            query_starts=starts,
            context_lens=[piece.num_computed + len(piece.token_ids) for piece in pieces],
            block_tables=[self._table(piece) for piece in pieces],
            logits_rows=torch.arange(len(token_ids)),
        )

    def _table(self, piece: Piece) -> list[int]:
        num_blocks = num_blocks_for(piece.num_computed + len(piece.token_ids), self._config.block_size)
        if num_blocks > self._blocks_per_slot:
            raise ValueError(f"slot_tokens: {piece.num_computed + len(piece.token_ids)} tokens do not fit into a slot")
        first = piece.slot * self._blocks_per_slot
        return list(range(first, first + num_blocks))


Overrides = Mapping[str, object]
Window = tuple[int, ...]

# The variant that others are measured against, and how much of its perplexity each kind of weights, and KV of int8 beside weights
# of bfloat16, may come to.
BASE = "bfloat16"
GOALS = {"int8": 1.005, "int4": 1.03}
KV_GOALS = {"int8": 1.005}
VARIANTS: dict[str, Overrides] = {
    "float32": {"dtype": "float32"},
    BASE: {"dtype": "bfloat16"},
    "bfloat16 + int8 KV": {"dtype": "bfloat16", "kv_dtype": "int8"},
    "int8": {"quantization": "int8", "kv_dtype": "bfloat16"},
    "int8 + int8 KV": {"quantization": "int8", "kv_dtype": "int8"},
    "int4": {"quantization": "int4", "kv_dtype": "bfloat16"},
    "int4 + int8 KV": {"quantization": "int4", "kv_dtype": "int8"},
}
PEER = "transformers, fp32"


@dataclass(frozen=True)
class Sizes:
    """How much is measured. Prompts are the beginnings of windows, decode takes the first windows: no more than there are."""

    num_windows: int = 16
    window_tokens: int = 512
    num_prompts: int = 16
    prompt_tokens: int = 64
    new_tokens: int = 64
    decode_batch: int = 4
    decode_steps: int = 64


@dataclass(frozen=True)
class Measured:
    """One variant. `decode_difference` in logits, `common_prefix` in tokens."""

    scores: TokenScores
    decode_difference: float
    common_prefix: float


def accuracy_figures(folder: Path, variants: Mapping[str, Overrides], sizes: Sizes | None = None) -> list[Figure]:
    """Measures each variant (name -> fields of EngineConfig) on the model in `folder`, a Hugging Face folder.

    Ratios and their goals need the variant BASE among `variants`. A variant with a field `model` of its own is measured against
    the reference of `folder`. Raises ValueError for what the engine refuses and for logits that are not finite.
    """
    sizes = sizes or Sizes()
    windows = cut_windows(Tokenizer.load(folder), fixed_text(), sizes.num_windows, sizes.window_tokens)
    prompts = [window[: sizes.prompt_tokens] for window in windows.token_ids[: sizes.num_prompts]]
    say(f"accuracy on {sizes.num_windows} windows of {sizes.window_tokens} tokens, SHA-256 {windows.digest}")
    measured: dict[str, Measured] = {}
    with reference_of(folder, windows.token_ids, prompts, sizes.new_tokens) as reference:
        for name, overrides in variants.items():
            measured[name] = _measure(name, folder, overrides, windows.token_ids, prompts, reference, sizes)
    figures = [
        Figure(f"text: {sizes.num_windows} windows of {sizes.window_tokens} tokens", windows.digest, "SHA-256", "higher"),
        Figure(f"perplexity: {PEER}", reference.accuracy.perplexity, "perplexity", "lower"),
    ]
    for name, overrides in variants.items():
        figures += _figures(name, measured[name], sizes)
        if name != BASE and BASE in measured:
            figures.append(_ratio(name, overrides, measured))
    return figures


def _measure(
    name: str,
    folder: Path,
    overrides: Overrides,
    windows: Sequence[Window],
    prompts: Sequence[Window],
    reference: Reference,
    sizes: Sizes,
) -> Measured:
    """Loads one variant, measures it and gives its memory back."""
    started = time.monotonic()
    num_slots = max(sizes.decode_batch, len(prompts))
    slot_tokens = max(sizes.window_tokens, sizes.prompt_tokens + sizes.new_tokens)
    with closing(Variant(folder, overrides, slot_tokens=slot_tokens, num_slots=num_slots)) as variant:
        measured = Measured(
            scores=prefill_scores(variant, windows, reference),
            decode_difference=decode_difference(variant, windows[: sizes.decode_batch], sizes.decode_steps),
            common_prefix=mean_common_prefix(variant.greedy(prompts, sizes.new_tokens), reference.continuations),
        )
        say(f"{name} ({variant.numeric_mode}): {time.monotonic() - started:.0f} s, {summarize(measured.scores)}")
    return measured


def prefill_scores(variant: Variant, windows: Sequence[Window], reference: Reference) -> TokenScores:
    """All windows, every token but a window's last, which the text gives no successor."""
    parts = []
    for index, window in enumerate(windows):
        ours, expected = variant.prefill(0, window), reference.logits.read(index)
        parts.append(score(expected[:-1], ours[:-1], torch.tensor(window[1:])))
    return join(parts)


def decode_difference(variant: Variant, windows: Sequence[Window], steps: int) -> float:
    """Largest absolute difference of a logit between decode steps, alone and in a batch, and prefill. 0: the same bits."""
    starts = decode_starts(len(windows[0]), len(windows), steps)
    pairs = zip(windows, starts, strict=True)
    expected = torch.stack([variant.prefill(0, window)[start : start + steps] for window, start in pairs])
    alone = variant.decode(windows[-1:], starts[-1:], steps)
    together = variant.decode(windows, starts, steps)
    return max((alone - expected[-1:]).abs().max().item(), (together - expected).abs().max().item())


def decode_starts(length: int, count: int, steps: int) -> list[int]:
    """Where each of `count` sequences begins to decode: spread over a window, the last as late as `steps` allow, and each at
    another place in its block."""
    return [max(1, (length - steps) * (number + 1) // count - number) for number in range(count)]


def mean_common_prefix(outputs: Sequence[Sequence[int]], expected: Sequence[Sequence[int]]) -> float:
    return statistics.fmean(common_prefix(ours, theirs) for ours, theirs in zip(outputs, expected, strict=True))


def _figures(name: str, measured: Measured, sizes: Sizes) -> list[Figure]:
    accuracy = summarize(measured.scores)
    decode = f"decode (batch 1 and {min(sizes.decode_batch, sizes.num_windows)}) against prefill"
    return [
        Figure(f"perplexity: {name}", accuracy.perplexity, "perplexity", "lower", peer=PEER),
        Figure(f"KL divergence, mean: {name}", accuracy.kl_mean, "nats/token", "lower", limit=0.0, peer=PEER),
        Figure(f"KL divergence, 99th percentile: {name}", accuracy.kl_p99, "nats/token", "lower", limit=0.0, peer=PEER),
        Figure(f"greedy agreement: {name}", accuracy.agreement, "share of tokens", "higher", limit=1.0, peer=PEER),
        Figure(
            f"greedy text, mean common beginning: {name}",
            measured.common_prefix,
            f"of {sizes.new_tokens} tokens",
            "higher",
            limit=float(sizes.new_tokens),
            peer=PEER,
        ),
        Figure(f"largest difference, {decode}: {name}", measured.decode_difference, "logits", "lower", goal=0.0),
    ]


def _ratio(name: str, overrides: Overrides, measured: Mapping[str, Measured]) -> Figure:
    """How far the perplexity is from BASE's. The text is a sample: a ratio nearer to its goal than its error decides nothing."""
    ratio, error = perplexity_ratio(measured[name].scores, measured[BASE].scores)
    goal = GOALS.get(str(overrides.get("quantization")), KV_GOALS.get(str(overrides.get("kv_dtype"))))
    unit = f"ratio (standard error {error:.4f})"
    return Figure(f"perplexity, of {BASE}'s: {name}", ratio, unit, "lower", goal=goal, peer=f"this engine, {BASE}")


def table(figures: Sequence[Figure]) -> str:
    """One line per figure: name, value, unit and, where there is one, the goal."""
    width = max(len(figure.name) for figure in figures)
    return "\n".join(f"{figure.name:<{width}}  {_shown(figure)}" for figure in figures)


def _shown(figure: Figure) -> str:
    value = figure.value if isinstance(figure.value, str) else f"{figure.value:.6g}"
    goal = "" if figure.goal is None else f"   goal {figure.goal}: {'MISSED' if missed(figure) else 'met'}"
    return f"{value} {figure.unit}{goal}"


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """`variants` comes back as the chosen entries of VARIANTS."""
    parser = parser_of("benchmarks.accuracy", __doc__)
    parser.add_argument("--model", default=DEFAULT_MODEL, help="known name or Hugging Face folder (default: %(default)s)")
    parser.add_argument("--windows", type=int, default=Sizes.num_windows, help="windows of text (default: %(default)s)")
    parser.add_argument("--variants", default=",".join(VARIANTS), help=f"of: {','.join(VARIANTS)} (default: all)")
    args = parser.parse_args(argv)
    if args.windows < 1:
        parser.error(f"--windows: {args.windows} is less than 1; give at least 1")
    names = [name.strip() for name in args.variants.split(",")]
    if unknown := [name for name in names if name not in VARIANTS]:
        parser.error(f"--variants: {', '.join(unknown)} not known; give some of {', '.join(VARIANTS)}")
    args.variants = {name: VARIANTS[name] for name in names}
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """0, or 1 when a goal is missed."""
    args = parse_args(argv)
    figures = accuracy_figures(ensure_model(args.model, say), args.variants, Sizes(num_windows=args.windows))
    print(table(figures))
    return 1 if any(missed(figure) for figure in figures) else 0


if __name__ == "__main__":
    sys.exit(main())
