"""What `make test-thorough` runs beyond `make test`: variants of properties whose other variants stay in every run.

Each pattern is searched in a test's name with its parameters. `make test` keeps at least one variant of each property; the slow
ones here differ in model family, number of ranks, transport or numbers only, or prove by a long way what `make test` proves by a
shorter one (said beside them).
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
    "tests/engine/parallel/test_parallel_engine.py": (
        r"\[qwen3|4-bfloat16|test_four_ranks\[|heads\[llama-|guessed_ahead\[llama|chunks\[llama-4|decoded_by_another\[llama-1"
    ),
    "tests/engine/test_tails.py": (
        r"\[(llama-odd-groups-(native|torch-1-)|mistral-window-torch|groups-7-native|head-dim-80-native)"
    ),
    "tests/engine/kernels/triton/test_parallel.py": r"\[(4-none|2-int8|2-fp8|2-int4)\]|between_degrees\[to one",
    "tests/engine/kernels/triton/test_families.py": r"of_the_reference\[(cohere|olmo3)|float16\[gemma2",
    "tests/engine/kernels/triton/test_fp8_kv.py": r"guesses_draw_the_same_tokens\[.*speculation",
    "tests/engine/kernels/triton/test_handoff.py": r"in_fp8\[(fp8-fp8-staged|auto-fp8-staged|fp8-auto-seen)",
    "tests/engine/kernels/triton/test_pieces.py": r"quantized_weights\[int4|test_greedy_tokens_of_an_engine",
    # One rank on Triton stays, and ranks of the torch backend.
    "tests/engine/kernels/triton/test_pooling.py": r"test_ranks_pool_alike",
    "tests/engine/kernels/triton/test_variants.py": r"\[(int8|int4|experts int8|adapters|latents|experts none)-",
    "tests/engine/kernels/cpu/test_model_bits.py": (
        r"\[.*-(2|3|5|6|7|12|24|33)-(1|2)\]$|\[(groups|head)|company_and_chunks.*-3\]|company_and_chunks.*float32-float32-1"
    ),
    "tests/engine/kernels/cpu/test_engine_bits.py": (
        r"test_preempted\[.*-33-|batched\[(float32|bfloat16|int4).*-7-2|preempted\[(bfloat16|int4).*-2\]"
    ),
    # Tokens of every family stay; rounding, company and trees keep a model of each kind: norms, experts, sinks, a latent.
    "tests/engine/kernels/cpu/test_families.py": (
        rf"torch_backend\[({CLONES})\]|"
        r"test_it_rounds.*\[(int8-(?!gemma2|mixtral|gpt_oss)|int4-(?!gemma2|mixtral))"
        r"|change_no_bit\[(?!gemma2|mixtral|gpt_oss|llama4|minicpm3|phi-)|change_no_bit_whatever.*\[(?!gemma2)"
        r"|test_predictions.*\[(bfloat16|int4)|test_a_drafted_tree.*\[(?!gpt_oss-float32|minicpm3)"
    ),
    # Each way in which a header or a tensor differs stays.
    "tests/engine/weights/test_gguf_architectures.py": (
        r"of_transformers\[(arcee|deepseek2, v2 without|ernie4_5-moe|exaone4, no|gptneox, seq|granite\]|granitemoe\]|llama, yarn"
        r"|dots1|olmo2\]|qwen2\]|qwen3\]|stablelm, par|starcoder\])"
    ),
    # Every map that an adapter changes is in one of these.
    "tests/engine/lora/test_families.py": r"\[(?!llama\]|gpt2|phi3\]|gpt_neox\]|falcon\]|gemma2|mixtral|deepseek_v3\]|cohere\])",
    "tests/engine/kernels/cpu/test_model_tiers.py": r"\[portable",
    "tests/engine/parallel/test_families.py": r"\[(stablelm|phi|gpt_neox|olmoe|llama4|gemma2)|whole_experts.*\[(mixtral|qwen2)",
    "tests/engine/speculation/test_never_loses.py": r"\[.*-(1|2|3)\]$|test_wrong_guesses\[(0\.2|2\.0|None-(steep|memory))",
    "tests/engine/speculation/test_grammar.py": (
        r"test_a_dead_end.*-(2|4|5)-1\]|test_same_answers.*torch|inside_what_was_kept\[torch"
    ),
    "tests/benchmarks/test_spec_bench.py": r"test_acceptance_is_the_one_that_was_forced\[0\.",
    "tests/benchmarks/test_gpu_bench.py": r"test_what_steps_launch_was_compiled_ahead\[int8\]",
    # The kernels of other tiers alone; `test_model_tiers.py` has whole models on the tiers of this processor.
    "tests/engine/kernels/cpu/test_kernels_tiers.py": r".",
    "tests/engine/kernels/cpu/test_sampling.py": r"torch_sampler\[portable",
    # A mesh without all capabilities is in every run (tests/mesh/test_without.py); here each is taken from the parts that use it.
    "tests/platform/test_without.py": r"work_without_it\[",
    "tests/engine/test_worker_memory.py": r"full_disk.*\[62914560|start_at_once|read_only",
    # Vectors of tiny models are compared in every run.
    "tests/engine/test_pooling.py": r"test_the_real_model",
    "tests/engine/lora/test_native_maps.py": r"company_nor.*\[(llama-bias-int4|hidden)",
    "tests/engine/weights/test_broken.py": r"workers_entry.*\[(config loops|stored as|empty config)",
    "tests/pdmesh/test_up_refusals.py": r"\[change(1|2|4)",
    "tests/pdmesh/test_models.py": r"test_the_real_converter",
    "tests/kvtransfer/test_processes.py": r"\[(grpc|tcp)\+.*=kill|\[cuda_ipc-push\.part",
    "tests/text/test_long_text_encoder.py": r"same_kind\[(digits|o200k)",
    # A simulated worker is searched in every run, by the same code.
    "tests/fuzzing/test_corpus.py": r"simulated_mesh\[mesh-router",
    # `make simulate` finds bugs that are put in and makes them small.
    "tests/simulation/shrinking/test_shrink.py": r"test_a_bug_is_found_and_made_small",
    # `make equality` runs all ways of all prompts. Drawn tokens are compared in every run by test_numbers.py.
    "tests/mesh/test_equality.py": r"\[(greedy|with a seed)\]",
    "tests/mesh/test_autoscale.py": r"goes_to_zero.*\[both",
    "tests/mesh/test_families.py": r"\[mixtral",
    "tests/mesh/test_paused_writer.py": r"\[tcp",
    "tests/mesh/test_kv_equality.py": r"\[greedy-|forced_ways\]",
    "tests/mesh/test_numbers.py": r"\[(grpc|shm)-.*(bfloat16|int4|int8|torch)|\[tcp-.*(none|torch)|\[tcp-{'dtype'",
    "tests/mesh/test_tensor_parallel.py": r"gives_the_same_tokens\[(shm-2-1|shm-2-2|tcp-1-2|tcp-2-1)\]",
    "tests/mesh/test_layouts.py": r"other_block_sizes.*\[(shm-48-16|tcp-16-48|shm-16-48)\]",
}


def mark(items: Iterable[pytest.Item]) -> None:
    """Mark the tests of the table."""
    for item in items:
        file, _, name = item.nodeid.partition("::")
        if (pattern := SLOW.get(file)) and re.search(pattern, name):
            item.add_marker("thorough")
