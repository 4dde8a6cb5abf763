"""What prompts of 100 000 tokens cost a router: `python -m benchmarks.router.long_prompts`.

    stages     tokenize, hash, look up, place and remember, each as CPU time in this process, before a fleet of 64 workers whose
               caches have half of every prompt; the reference is the `tokenizers` library, which other gateways encode with
    router     CPU time of a router's process for each such request, text over gRPC to the last of 8 tokens, with everything
               around the stages: the message, its checks, and the token ids that go to two workers (`stub_worker.py`); each text
               is asked once, so that no router has it in its index

Texts are consecutive pieces of the Python standard library's sources, so that no two are alike. Three tokenizers, since the time
depends on how a vocabulary splits texts: Llama 3's pattern (GPT-4's, Qwen's and others' are of its kind), SmolLM2's, whose digits
stand alone, and TinyLlama's, as SentencePiece makes them.
"""

from __future__ import annotations

import json
import random
import statistics
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from benchmarks.harness import Figure, Options, parser_of, running, say, show
from benchmarks.policy_cost import view
from benchmarks.router.overhead import CLIENT, router
from benchmarks.router.stub_worker import MANY, MAX_CONTEXT
from pdmesh.models.catalogue import SMOLLM2, TINYLLAMA
from pdmesh.models.registry import ensure_model
from pdmesh.text.grammar import GrammarCompiler
from pdmesh.text.tokenizer import Tokenizer
from pdmesh.v1 import common_pb2, worker_pb2
from router.kv_index.index import PrefixIndex
from router.routing.cost_policy import PredictPolicy
from router.routing.filters import RoutingRequest
from router.routing.fleet_snapshot import FleetSnapshot
from router.routing.learned import Overheads
from router.tokenization.prepared_request import PreparedRequest, ServedModel

NUM_TOKENS = 100_000
RATE_GOAL = 50.0
"""Prompts a second of one core."""
NUM_WORKERS, NUM_PROMPTS = 64, 24
LLAMA3 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
GUIDE = "llm-d's sizing guide: 32 cores for 50 requests/s"
Result = TypeVar("Result")
STAGES = ("tokenize", "hash", "look up", "place", "remember")


def figures(options: Options) -> list[Figure]:
    """All of them; two minutes."""
    found: list[Figure] = []
    with tempfile.TemporaryDirectory() as name:
        for label, folder in model_folders(Path(name)).items():
            tokenizer = Tokenizer.load(folder)
            texts = texts_of(tokenizer, int(options.pick(NUM_PROMPTS, 4)))
            found += _stage_figures(label, tokenizer, texts)
            found.append(_router_figure(label, folder, texts, options.pick(8.0, 2.0)))
    return found


def model_folders(root: Path) -> dict[str, Path]:
    """Folders with a tokenizer and a context that has room, without weights, by the tokenizer's label."""
    own = {"SmolLM2's tokenizer": SMOLLM2.name, "TinyLlama's tokenizer": TINYLLAMA.name}
    sources = {label: json.loads((ensure_model(name, say) / "tokenizer.json").read_text()) for label, name in own.items()}
    split = {"type": "Split", "pattern": {"Regex": LLAMA3}, "behavior": "Isolated", "invert": False}
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    pattern = {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, level]}}
    sources = {"Llama 3's pattern, SmolLM2's vocabulary": {**sources["SmolLM2's tokenizer"], **pattern}, **sources}
    folders = {label: root / str(number) for number, label in enumerate(sources)}
    for label, folder in folders.items():
        folder.mkdir()
        (folder / "tokenizer.json").write_text(json.dumps(sources[label]))
        config = {"vocab_size": 49152, "max_position_embeddings": MAX_CONTEXT, "eos_token_id": 2}
        (folder / "config.json").write_text(json.dumps(config))
    return folders


def texts_of(tokenizer: Tokenizer, count: int) -> list[str]:
    """`count` texts of about NUM_TOKENS tokens, no two alike."""
    source = "".join(_sources(count * 6 * NUM_TOKENS))
    characters = round(NUM_TOKENS * 400_000 / len(tokenizer.encode_detached(source[:400_000])))
    return [source[number * characters :][:characters] for number in range(count)]


def _sources(least: int) -> Iterator[str]:
    """Texts of the standard library until there are `least` characters."""
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("**/*.py")):
        text = path.read_text(encoding="utf-8", errors="replace")
        yield text
        least -= len(text)
        if least <= 0:
            return


def _stage_figures(label: str, tokenizer: Tokenizer, texts: Sequence[str]) -> list[Figure]:
    tokenizer.long_texts.prepare()
    fleet = _Fleet(tokenizer)
    for text in texts:
        fleet.route(text)
    medians = {stage: statistics.median(values[2:]) for stage, values in fleet.seconds.items()}  # the first ones warm up
    reference = statistics.median(_reference_seconds(tokenizer, text) for text in texts[2:6])
    total = sum(medians.values())
    say(f"{label}: " + ", ".join(f"{stage} {1e3 * value:.1f} ms" for stage, value in medians.items()))
    name = f"{NUM_TOKENS} tokens, {label}"
    library = f"tokenizers: {1e3 * reference:.0f} ms"
    return [
        Figure(f"{name}: routing part, prompts a second of one core", 1 / total, "1/s", "higher", goal=RATE_GOAL, peer=GUIDE),
        *(
            Figure(f"{name}: {stage}", 1e3 * medians[stage], "ms", "lower", peer=library if stage == STAGES[0] else None)
            for stage in STAGES
        ),
    ]


def _reference_seconds(tokenizer: Tokenizer, text: str) -> float:
    """CPU time of the `tokenizers` library, for NUM_TOKENS tokens."""
    began = time.process_time()
    count = len(tokenizer.encode(text))
    return (time.process_time() - began) * NUM_TOKENS / count


class _Fleet:
    """The parts of a router that decide where a prompt goes, before workers that have cached half of it. `seconds` of each stage,
    for NUM_TOKENS tokens."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        draw = random.Random(0)
        self._model = ServedModel(
            "m", tokenizer, GrammarCompiler(tokenizer.to_json(), tokenizer.vocab_size, tokenizer.eos_token_ids)
        )
        views = [view(number, draw) for number in range(NUM_WORKERS)]
        self._roster = FleetSnapshot(
            [replace(each, max_context=MAX_CONTEXT, num_total_blocks=MANY, num_free_blocks=MANY) for each in views]
        )
        self._infos = [
            worker_pb2.WorkerInfo(
                worker_id=f"w{number}",
                address=f"10.0.{number >> 8}.{number & 255}:50051",
                epoch=number,
                identity=common_pb2.Identity(model="m", weights_hash="w", num_layers=2, numeric_mode="n", protocol_version=1),
                layout=common_pb2.KVLayout(block_size=16, kv_dtype="bfloat16", tensor_parallel_size=1, arrangement="plain"),
            )
            for number in range(NUM_WORKERS)
        ]
        self._index = PrefixIndex(4_000_000)
        self._index.set_workers(self._infos)
        self._index.set_followed((info.address, info.epoch) for info in self._infos)
        self._policy = PredictPolicy(Overheads(), local_prefill_tokens=32)
        self._draw = draw
        self.seconds: dict[str, list[float]] = {stage: [] for stage in STAGES}

    def route(self, text: str) -> None:
        """One prompt. Before it counts, four workers learn of its first half, as if they had computed it."""
        tokens = self._timed("tokenize", lambda: self._model.tokenizer.encode_detached(text))
        prepared = self._prepared(tokens)
        info = self._infos[0]
        layout = info.layout
        names = self._timed("hash", lambda: prepared.block_names(info.identity, layout.kv_dtype, layout.block_size))
        for number in self._draw.sample(range(NUM_WORKERS), 4):
            self._index.apply((self._infos[number].address, number), names[: len(names) // 2], ())
        cached = self._timed("look up", lambda: self._index.look_up(prepared).cached)
        request = replace(
            RoutingRequest("m", len(tokens), max_total_tokens=len(tokens) + 256), cached_tokens=cached, ttft_goal_s=30.0
        )
        self._timed("place", lambda: self._policy.choose(self._roster, request, 0.0))
        self._timed("remember", lambda: self._index.record(info, names))
        for values in self.seconds.values():
            values[-1] *= NUM_TOKENS / len(tokens)

    def _prepared(self, tokens: Sequence[int]) -> PreparedRequest:
        return PreparedRequest("r", self._model, tuple(tokens), common_pb2.SamplingParams(n=1, max_tokens=256), ())

    def _timed(self, stage: str, work: Callable[[], Result]) -> Result:
        began = time.process_time_ns()
        result = work()
        self.seconds[stage].append((time.process_time_ns() - began) / 1e9)
        return result


def _router_figure(label: str, folder: Path, texts: Sequence[str], seconds: float) -> Figure:
    """CPU time of a router's process for each prompt, its own start and the first prompts apart. `seconds`: the most that
    the first ones may take, and the others."""
    num_first = max(1, len(texts) // 4)
    with router(folder) as (process, address):
        _ask(address, folder / "first.json", texts[:num_first], seconds)  # for what is made at the first long text
        began_s = process.cpu_s
        answer = _ask(address, folder / "texts.json", texts[num_first:], seconds)
        each = (process.cpu_s - began_s) / answer["requests"]
    say(f"{label}: {1e3 * each:.1f} ms of the router's CPU for a prompt")
    name = f"{NUM_TOKENS} tokens, {label}: the whole router, prompts a second of one core"
    return Figure(name, 1 / each, "1/s", "higher", peer=GUIDE)


def _ask(address: str, given: Path, texts: Sequence[str], seconds: float) -> Mapping[str, float]:
    """Each text once, three at a time, until all are answered or the time is over."""
    given.write_text(json.dumps(list(texts)))
    with running(CLIENT, "closed", "--address", address, "--seconds", seconds, "--count", 3, "--texts", given) as client:
        return client.hear()


if __name__ == "__main__":
    parser = parser_of("benchmarks.router.long_prompts", __doc__)
    parser.add_argument("--quick", action="store_true", help="half a minute; the numbers are rough")
    show(figures(Options("router", parser.parse_args().quick)))
