"""Greedy tokens of steps as graphs are those of the same launches: decode steps, also ahead of their tokens, and prompts' chunks
beside them, as graphs between attentions."""

from __future__ import annotations

from dataclasses import replace

from benchmarks.engine_runs import GREEDY
from benchmarks.engine_runs import run as run_engine
from benchmarks.gpu.context import Context
from benchmarks.gpu.shapes import ragged_prompts
from benchmarks.harness import Figure
from pdmesh.engine.config import EngineConfig
from pdmesh.engine.kernels.triton.model import TritonModel
from pdmesh.engine.models.config import ModelConfig
from pdmesh.engine.models.decoder import DecoderModel
from tests.gpu.errors import num_differing
from tests.support.random_models import graph_model, launched_model, make_decoder, make_engine
from tests.support.random_weights import engine_config

CASES = (("1B", "none"), ("1B", "int4"), ("8B", "none"), ("8B", "int8"))
NUM_PROMPTS = 5
EXPECTED_S = 8.0


def run(context: Context) -> None:
    for model, weights in CASES:
        if context.has_time(EXPECTED_S if context.device == "cuda" else 0.0, f"greedy tokens of {model}, weights {weights}"):
            _case(context, model, weights)


def _case(context: Context, model: str, weights: str) -> None:
    scale, shape = context.scale, context.scale.config(model)
    title = f"{model} {'unquantized' if weights == 'none' else weights}"
    config = engine_config(
        context.device, max_num_seqs=NUM_PROMPTS, max_context=3 * scale.prompt + scale.greedy_tokens, max_num_batched_tokens=64
    )
    decoder = make_decoder(shape, weights, config, context.dtype)
    graphs = graph_model(decoder, config)
    ways = {
        "single launches": (launched_model(decoder, config), replace(config, steps_ahead=False)),
        "graphs": (graphs, replace(config, steps_ahead=False)),
        "graphs, steps ahead": (graphs, config),
    }
    answers = {name: _tokens(context, shape, model_of, of) for name, (model_of, of) in ways.items()}
    expected = answers.pop("single launches")
    for name, found in answers.items():
        _compare(context, f"{title}, {name}", found, expected)
    _describe_reference(context, title, decoder, config, shape, expected)


def _tokens(context: Context, shape: ModelConfig, model: TritonModel | DecoderModel, config: EngineConfig) -> list[list[int]]:
    engine = make_engine(model, config, context.dtype)
    params = GREEDY.params(context.scale.greedy_tokens, ignore_eos=True)
    tokens = run_engine(engine, ragged_prompts(shape.vocab_size, context.scale.prompt), params)
    engine.close()
    return tokens


def _compare(context: Context, name: str, found: list[list[int]], expected: list[list[int]]) -> None:
    differing = num_differing(found, expected)
    if differing or not any(expected):
        context.fail(f"{name}: {differing} of {sum(map(len, expected))} greedy tokens differ from single launches")
    context.add(
        Figure(f"greedy tokens that differ: {name}", float(differing), "tokens", "lower", goal=0.0, peer="single launches")
    )


def _describe_reference(
    context: Context, name: str, decoder: DecoderModel, config: EngineConfig, shape: ModelConfig, expected: list[list[int]]
) -> None:
    """How many tokens torch's reference draws alike: all in float32; in bfloat16 a near tie may fall otherwise, so no goal."""
    if decoder.dtype.itemsize < 4 and not context.has_time(EXPECTED_S, f"{name}: torch's reference"):
        return
    found = _tokens(context, shape, decoder, replace(config, backend="torch"))
    alike = sum(map(len, expected)) - num_differing(found, expected)
    context.add(
        Figure(
            f"greedy tokens like torch's reference: {name}",
            float(alike),
            "tokens",
            "higher",
            limit=float(sum(map(len, expected))),
        )
    )
