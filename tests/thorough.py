"""What `make test-thorough` runs beyond `make test`: variants of properties whose other variants stay in every run.

Each pattern is searched in a test's name with its parameters. `make test` keeps at least one variant of each property; the slow
ones here differ in model family, number of ranks, transport or numbers only.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

import pytest

CLONES = (
    "biogpt|codegen|cwm|exaone_moe|flex_olmo|gemma3|glm4_moe_lite|gpt_neo|granite_swa|granitemoe_swa|hunyuan_v1_moe|hy_v3|hyperclovax|"
    "iquestcoder|jais2|llama4|mellum|minimax_m2|mistral3|persimmon|solar_open|vaultgemma|youtu"
)

SLOW = {
    # One family of models stays (qwen2: biases), greedy and drawn; the other and four ranks in float32 are here.
    "tests/engine/parallel/test_parallel_engine.py": r"\[qwen3|4-bfloat16|test_four_ranks\[",
    "tests/engine/test_tails.py": r"\[(llama-odd-groups-native|mistral-window-torch|groups-7-native|head-dim-80-native)",
    "tests/engine/kernels/triton/test_parallel.py": r"\[(4-none|2-int8|2-fp8)\]",
    # One rank on Triton stays, and ranks of the torch backend.
    "tests/engine/kernels/triton/test_pooling.py": r"test_ranks_pool_alike",
    "tests/engine/kernels/triton/test_variants.py": r"\[(int8|int4|experts int8|adapters|latents)-",
    "tests/engine/kernels/cpu/test_model_bits.py": (
        r"\[.*-(2|3|5|6|7|12|24|33)-(1|2)\]$|\[(groups|head)|company_and_chunks.*-3\]"
    ),
    "tests/engine/kernels/cpu/test_engine_bits.py": r"test_preempted\[.*-33-",
    # Tokens of every family stay; rounding, company and trees keep a model of each kind: norms, experts, sinks, a latent.
    "tests/engine/kernels/cpu/test_families.py": (
        rf"torch_backend\[({CLONES})\]|"
        r"test_it_rounds.*\[(int8-(?!gemma2|mixtral|gpt_oss)|int4-(?!gemma2|mixtral))"
        r"|change_no_bit\[(?!gemma2|mixtral|gpt_oss|llama4|minicpm3|phi-)|change_no_bit_whatever.*\[(?!gemma2)"
        r"|test_predictions.*\[(bfloat16|int4)|test_a_drafted_tree.*\[(?!gpt_oss|minicpm3)"
    ),
    # Families whose parts others have: torch alone compares them with transformers in every run.
    "tests/engine/test_families.py": rf"test_every_tensor_is_used\[({CLONES})[],]",
    # Each way in which a header or a tensor differs stays.
    "tests/engine/weights/test_gguf_architectures.py": (
        r"of_transformers\[(arcee|deepseek2, v2 without|ernie4_5-moe|exaone4, no|gptneox, seq|granite\]|granitemoe\]|llama, yarn"
        r"|dots1|olmo2\]|qwen2\]|qwen3\]|stablelm, par|starcoder\])"
    ),
    # Every map that an adapter changes is in one of these.
    "tests/engine/lora/test_families.py": r"\[(?!llama\]|gpt2|phi3\]|gpt_neox\]|falcon\]|gemma2|mixtral|deepseek_v3\]|cohere\])",
    "tests/engine/kernels/cpu/test_model_tiers.py": r"\[portable",
    "tests/engine/parallel/test_families.py": r"\[stablelm",
    "tests/engine/speculation/test_never_loses.py": r"\[.*-(1|2|3)\]$|test_wrong_guesses\[(0\.2|2\.0)",
    "tests/engine/speculation/test_grammar.py": r"test_a_dead_end.*-(2|4|5)-1\]|test_same_answers.*torch",
    "tests/benchmarks/test_spec_bench.py": r"test_acceptance_is_the_one_that_was_forced\[0\.",
    "tests/benchmarks/test_gpu_bench.py": r"test_what_steps_launch_was_compiled_ahead\[int8\]",
    # `make equality` runs all ways of all prompts; transformers' tokens are greedy, so the drawn ones stay beside them.
    "tests/mesh/test_equality.py": r"\[greedy\]",
    "tests/mesh/test_kv_equality.py": r"\[greedy-|forced_ways\]",
    "tests/mesh/test_numbers.py": r"\[grpc-.*(bfloat16|int4|torch)|\[shm-.*(bfloat16|int4|torch)",
    "tests/mesh/test_tensor_parallel.py": r"gives_the_same_tokens\[(shm-2-1|shm-2-2|tcp-1-2)\]",
    "tests/mesh/test_layouts.py": r"other_block_sizes.*\[(shm-48-16|tcp-16-48)\]",
}


def mark(items: Iterable[pytest.Item]) -> None:
    """Mark the tests of the table."""
    for item in items:
        file, _, name = item.nodeid.partition("::")
        if (pattern := SLOW.get(file)) and re.search(pattern, name):
            item.add_marker("thorough")
