"""The native speed of six families beside llama.cpp on the same shape, in turn within one run: decode at batch 1 and 8."""

from __future__ import annotations

import os
import re
import sys
import tempfile
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.cpu.contest import MEASURED
from benchmarks.harness import Figure, interleave, say
from benchmarks.models.equality import equal_share
from benchmarks.peers.environments import LLAMA_CPP, PeerError, ensure_environment, peers_folder
from benchmarks.peers.servers import Child
from tests.support.gguf_export import Q8_0, export
from tests.support.tiny_families import make_tiny_family

BATCHES = (1, 8)
GOAL = 1.5
PROMPT_TOKENS, NEW_TOKENS, ROUNDS = 64, 64, 5
OURS, PEER = "pdmesh int8", "llama.cpp Q8_0"
AGREED_TOKENS = 4
_ATTEMPTS = 3


@dataclass(frozen=True)
class Shape:
    """One model whose speed is compared: a variant with the sizes of a small real one."""

    part: str
    variant: str
    sizes: Mapping[str, Any]

    @property
    def name(self) -> str:
        return f"{self.part} ({self.variant})"


_BASE: dict[str, Any] = {
    "vocab_size": 16384, "hidden_size": 768, "intermediate_size": 2304, "num_hidden_layers": 10, "num_attention_heads": 12,
    "num_key_value_heads": 4, "sliding_window": None, "initializer_range": 0.02,
}  # fmt: skip
_EXPERTS = {"head_dim": 64, "num_experts_per_tok": 4, "num_hidden_layers": 6, "hidden_size": 512, "num_attention_heads": 8}
_PLAIN_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
SHAPES = (
    Shape(
        "experts", "qwen3_moe",
        {**_BASE, **_EXPERTS, "num_experts": 32, "moe_intermediate_size": 384, "mlp_only_layers": [], "norm_topk_prob": True},
    ),
    Shape(
        "softcap and sandwich norms", "gemma2",
        {**_BASE, "head_dim": 64, "query_pre_attn_scalar": 64, "sliding_window": 4096, "tie_word_embeddings": True},
    ),
    Shape(
        "partial rotary", "stablelm",
        {**{key: value for key, value in _BASE.items() if key != "sliding_window"}},
    ),
    Shape("plain MLP with LayerNorm", "starcoder2", {**_BASE, "intermediate_size": 3072}),
    Shape(
        "sinks", "gpt_oss",
        {
            **_BASE, **_EXPERTS, "num_local_experts": 32, "intermediate_size": 384, "sliding_window": 128,
            "rope_parameters": _PLAIN_ROPE,
        },
    ),
    Shape(
        "latent attention", "deepseek_v3",
        {
            **{key: value for key, value in _BASE.items() if key != "sliding_window"}, "num_hidden_layers": 6, "hidden_size": 512,
            "num_attention_heads": 8, "num_key_value_heads": 8, "n_routed_experts": 32, "moe_intermediate_size": 384,
            "num_experts_per_tok": 4, "n_group": 4, "topk_group": 2, "kv_lora_rank": 256, "q_lora_rank": 384,
            "qk_nope_head_dim": 64, "qk_rope_head_dim": 32, "v_head_dim": 64,
        },
    ),
)  # fmt: skip


@dataclass
class Contestants:
    """The processes that have loaded one shape; `absent` says why another has not."""

    children: dict[str, Child] = field(default_factory=dict)
    absent: dict[str, str] = field(default_factory=dict)
    peer: str = PEER  # as it runs

    def admit(self, name: str, start: Callable[[], Child], stack: ExitStack) -> None:
        """Start one, which pauses until its turn, and see that it computes."""
        try:
            child = start()
            stack.callback(child.close)
            child.wait_ready()
            with child.turn():
                child.generate(_prompts(1, 0), 2)
        except (PeerError, OSError, ValueError) as error:
            self.absent[name] = str(error)
            say(f"{name}: absent: {error}")
            return
        self.children[name] = child


def measure(*, quick: bool) -> list[Figure]:
    """Return the figures of all shapes."""
    return [figure for shape in SHAPES for figure in _measure(shape, quick=quick)]


def _measure(shape: Shape, *, quick: bool) -> list[Figure]:
    say(f"{shape.name}")
    with tempfile.TemporaryDirectory(prefix="pdmesh-shapes-") as place, ExitStack() as stack:
        folder, there = make_tiny_family(Path(place) / "model", shape.variant, **shape.sizes), Contestants()
        there.admit(OURS, lambda: _ours(folder), stack)
        _admit_peer(there, folder, Path(place) / "model.gguf", stack)
        cases = {_case(name, batch): Decode(child, batch) for batch in BATCHES for name, child in there.children.items()}
        speeds = interleave(cases, 1 if quick else ROUNDS)
        agreed = _agreement(there.children) if len(there.children) > 1 else None
    return figures(shape.name, speeds, there.absent, there.peer) + _agreed(shape.name, agreed, there.peer)


def _agreement(children: Mapping[str, Child]) -> float:
    """Return the share of greedy tokens before the first difference: both compute the same model, each in its own 8 bits."""
    answers = []
    for child in children.values():
        with child.turn():
            answers.append(child.generate(_prompts(max(BATCHES), 0), AGREED_TOKENS).token_ids)
    return equal_share(answers[0], answers[1])


def _agreed(name: str, share: float | None, peer: str) -> list[Figure]:
    label = f"first {AGREED_TOKENS} tokens of {name}: equal to those of {PEER}"
    return [] if share is None else [Figure(label, share, "share", "higher", peer=peer)]


def _case(name: str, batch: int) -> str:
    return f"{name}, batch {batch}"


def _ours(folder: Path) -> Child:
    """Our engine on the CPU kernels; one that lacks a part says which, and takes no part."""
    settings = {**MEASURED, "backend": "native", "max_context": 1024}
    return _child("pdmesh", Path(sys.executable), {"model": str(folder), "settings": settings})


def _admit_peer(there: Contestants, folder: Path, file: Path, stack: ExitStack) -> None:
    """Admit llama.cpp; without its kernels for AMX where they end it, as on virtual machines that announce it and have none."""
    try:
        python = ensure_environment(LLAMA_CPP, say)
    except (PeerError, OSError) as error:
        there.absent[PEER] = str(error)
        return
    export(folder, file, kind=Q8_0)
    options = {"model": str(file), "threads": len(os.sched_getaffinity(0)), "max_seqs": max(BATCHES), "max_context": 1024}
    for extra in (True, False):
        there.admit(PEER, partial(_child, "llama.cpp", python, {**options, "extra_buffers": extra}), stack)
        if PEER in there.children:
            there.peer = PEER if extra else f"{PEER}, without AMX, with which it ends here"
            return


def _child(library: str, python: Path, options: dict[str, object]) -> Child:
    folder = peers_folder() / "logs"
    folder.mkdir(parents=True, exist_ok=True)
    log = folder / f"models-{re.sub(r'[^a-z]', '-', library)}.log"
    return Child(python, "benchmarks.peers.children", {"library": library, **options}, log)


@dataclass
class Decode:
    """Output tokens a second over all sequences, prompts left out. Callable; each call is the next round."""

    child: Child
    batch: int
    round: int = 0

    def __call__(self) -> float:
        self.round += 1
        with self.child.turn():
            for attempt in range(_ATTEMPTS):
                one, many = (self._seconds(num_tokens, attempt) for num_tokens in (1, NEW_TOKENS))
                if many > one:
                    return self.batch * (NEW_TOKENS - 1) / (many - one)
        raise PeerError(f"{NEW_TOKENS} tokens took no longer than one, {_ATTEMPTS} times: the machine is disturbed")

    def _seconds(self, num_tokens: int, attempt: int) -> float:
        seed = ((self.round * _ATTEMPTS + attempt) * 2 + (num_tokens > 1)) * max(BATCHES)
        return self.child.generate(_prompts(self.batch, seed), num_tokens).seconds


def _prompts(count: int, seed: int) -> list[list[int]]:
    """Return prompts that share no beginning."""
    return [
        [(7919 * (seed + number) + 104_729 * place) % 16_000 + 300 for place in range(PROMPT_TOKENS)] for number in range(count)
    ]


def figures(name: str, speeds: Mapping[str, float], absent: Mapping[str, str], peer_name: str = PEER) -> list[Figure]:
    """Return the speed of each at each batch, and ours over the peer's; an absent one stands with the reason. Pure."""
    found = []
    for batch in BATCHES:
        for side in (OURS, PEER):
            case, label = _case(side, batch), f"decode of {name}, batch {batch}: {side}"
            value = speeds.get(case, f"absent: {absent.get(side, 'not measured')}")
            found.append(Figure(label, value, "tokens/s", "higher"))
        ours, peer = speeds.get(_case(OURS, batch)), speeds.get(_case(PEER, batch))
        if ours is not None and peer is not None:
            found.append(
                Figure(f"decode of {name}, batch {batch}: times {PEER}", ours / peer, "x", "higher", goal=GOAL, peer=PEER)
            )
    return found
