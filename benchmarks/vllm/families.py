"""Adapters, a mixture of experts and quantized checkpoints on vLLM: the tokens of tiny random models through separation, beside
those of vLLM alone. Where vLLM's CPU backend does not run one, the figure has its reason. Stock vLLM, too, may use AMX
from the start, as it does not see to that itself (`pdmesh_vllm.ranks.link.permit_amx`)."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness import Figure, Options, say
from benchmarks.models.equality import prompts_of
from benchmarks.peers.environments import PeerError
from benchmarks.vllm.answers import STOCK, Answer, Answers, Settings, absent, alone, compared, figures_of
from pdmesh.client.client import AsyncClient
from pdmesh.errors import MeshError
from pdmesh.launcher.mesh import LocalMesh
from pdmesh.launcher.plan import ProcessPlan
from pdmesh.runtime.child import StartFailed
from tests.support.adapters import make_adapter
from tests.support.quantized_checkpoints import FORMATS, Format, compressed, packed_fp8, packed_int8, scheme, write_quantized
from tests.support.tiny_families import make_tiny_family
from tests.support.tiny_models import make_tiny_model

NUM_TOKENS = 32
TIMEOUT_S = 120.0
HEAD_DIM = 32
"""A multiple of 32: what vLLM's CPU kernels demand."""
TARGETS = ("q_proj", "v_proj", "o_proj", "down_proj")
WIDE: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 8, "num_key_value_heads": 4}
"""Widths that kernels for quantized weights take."""
FP8_BLOCKS = Format(
    {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [128, 128]},
    packed_fp8("block", torch.float32, ".weight_scale_inv", block=128),
)
"""As Qwen3's and DeepSeek's fp8 checkpoints have it."""
W8A8 = compressed(
    "int-quantized",
    packed_int8(),
    {
        **scheme(8, "channel"),
        "input_activations": {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True},
    },
)

Found = Mapping[str, Answers]
"""Answers by the name of the adapter; "": the model alone."""


@dataclass(frozen=True)
class Case:
    """A model to make in a folder. `dtype` computes it, in so many ranks where prompts are prefilled and decoded."""

    name: str
    make: Callable[[Path], Path]
    dtype: str = "float32"
    num_adapters: int = 0
    prefill_ranks: int = 1
    decode_ranks: int = 1

    def settings(self, folder: Path) -> Settings:
        """Make the model and its adapters."""
        model = self.make(folder)
        adapters = {f"adapter-{number}": _adapter(model, folder, number) for number in range(self.num_adapters)}
        return Settings(model, self.dtype, kv_memory_mb=64, adapters=adapters)

    def adjust(self, plan: ProcessPlan) -> ProcessPlan:
        """Return a worker's plan with its number of ranks."""
        ranks = {"prefill-0": self.prefill_ranks, "decode-0": self.decode_ranks}.get(plan.name, 1)
        return replace(plan, argv=(*plan.argv, "--tensor-parallel", str(ranks))) if ranks > 1 else plan


def _adapter(model: Path, folder: Path, number: int) -> Path:
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(model)
    return make_adapter(folder / f"adapter-{number}", base, TARGETS, seed=number + 1)


def _dense(folder: Path) -> Path:
    return make_tiny_model(folder / "model", head_dim=HEAD_DIM)


def _family(variant: str, **fields: Any) -> Callable[[Path], Path]:
    return lambda folder: make_tiny_family(folder / "model", variant, head_dim=HEAD_DIM, **fields)


def _quantized(form: Format) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        plain = make_tiny_model(folder / "plain", head_dim=HEAD_DIM, **WIDE)
        return write_quantized(plain, folder, form)[0]

    return make


CASES = (
    Case("LoRA, two adapters", _dense, num_adapters=2),
    Case("two ranks prefill, two decode", _dense, prefill_ranks=2, decode_ranks=2),
    Case("one rank prefills, two decode", _dense, decode_ranks=2),
    Case("two ranks prefill, one decodes", _dense, prefill_ranks=2),
    Case("Mixtral", _family("mixtral")),
    Case("Qwen3-MoE", _family("qwen3_moe", mlp_only_layers=[])),
    Case("fp8, compressed-tensors", _quantized(FORMATS["compressed fp8 by output"]), dtype="bfloat16"),
    Case("fp8 in blocks of 128", _quantized(FP8_BLOCKS), dtype="bfloat16"),
    Case("GPTQ, 4 bits", _quantized(FORMATS["gptq 4 bits g32"]), dtype="bfloat16"),
    Case("AWQ, 4 bits", _quantized(FORMATS["awq g32"]), dtype="bfloat16"),
    Case("w8a8, compressed-tensors", _quantized(W8A8), dtype="bfloat16"),
    Case("w4a16, compressed-tensors", _quantized(FORMATS["compressed w4a16 g32"]), dtype="bfloat16"),
)


def prompts() -> dict[int, list[int]]:
    """Return prompts of bytes by number. Pure."""
    return dict(enumerate(prompts_of("llama")))


# Who answers.


def by_stock(settings: Settings) -> Found:
    """Return stock vLLM's answers, one request at a time. Raises PeerError with its reason where it cannot serve the model."""
    with alone("stock", settings) as one:
        return {name: one.ask(prompts(), NUM_TOKENS, adapter=name) for name in _names(settings)}


async def by_mesh(case: Case, settings: Settings) -> Found:
    """Return the answers of a prefill and a decode worker. Raises StartFailed or MeshError; RuntimeError without a hand-off."""
    config = settings.mesh(adjust=case.adjust)
    async with LocalMesh(config, on_event=say) as mesh, AsyncClient(mesh.router_addresses) as client:
        return {name: await _asked(client, name or config.name_of_model) for name in _names(settings)}


def _names(settings: Settings) -> tuple[str, ...]:
    return ("", *settings.adapters)


async def _asked(client: AsyncClient, model: str) -> Answers:
    found = {}
    for number, prompt in prompts().items():
        answer = await client.generate(
            prompt, model=model, temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, mode="remote", timeout=TIMEOUT_S
        )
        found[number] = Answer(answer.choices[0].token_ids, evidence=answer.timings.kv_bytes)
    if not all(each.evidence for each in found.values()):
        raise RuntimeError("a prompt was computed where it was decoded: nothing was handed off")
    return found


# Figures.


def figures(case: Case, expected: Found, found: Found) -> Iterator[Figure]:
    """Yield how equal the answers are, for the model and each adapter, and how many adapters change them. Pure."""
    for name, answers in found.items():
        yield from figures_of(f"{case.name}{f', {name}' if name else ''}", compared(answers, expected[name]), STOCK)
    adapters = [_tokens(answers) for name, answers in expected.items() if name]
    if adapters:
        differing = sum(tokens != _tokens(expected[""]) for tokens in adapters)
        unit = f"of {len(adapters)} adapters"
        yield Figure(
            f"{case.name}: adapters whose answers differ from the model's", differing, unit, "higher", goal=len(adapters)
        )


def _tokens(answers: Answers) -> list[list[int]]:
    return [list(answer.token_ids) for answer in answers.values()]


async def measure(options: Options) -> list[Figure]:
    """Measure every case."""
    return [figure for case in CASES for figure in await _measure(case)]


async def _measure(case: Case) -> list[Figure]:
    say(f"{case.name}: making")
    with tempfile.TemporaryDirectory(prefix="pdmesh-vllm-") as folder:
        settings = case.settings(Path(folder))
        try:
            expected = await asyncio.to_thread(by_stock, settings)
        except PeerError as error:
            say(f"{case.name}: vLLM alone does not serve it: {error}")
            return [absent(f"{case.name}: answers equal", str(error))]
        try:
            found = await by_mesh(case, settings)
        except (StartFailed, MeshError, RuntimeError) as error:
            say(f"{case.name}: vLLM serves it, and the mesh does not: {error}")
            return [Figure(f"{case.name}: answers equal", 0.0, f"failed: {error}", "higher", goal=1.0, peer=STOCK)]
    measured = list(figures(case, expected, found))
    say(f"{case.name}: {[figure.value for figure in measured]}")
    return measured
