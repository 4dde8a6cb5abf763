"""OpenVINO GenAI with continuous batching, reading the GGUF file itself."""

from __future__ import annotations

import numpy as np
import openvino  # type: ignore[import-not-found]
import openvino_genai  # type: ignore[import-not-found]

from benchmarks.peers.child import Answer, Loaded, Options, Prompts, serve


def load(options: Options) -> Loaded:
    scheduler = openvino_genai.SchedulerConfig()
    scheduler.enable_prefix_caching = False
    scheduler.max_num_seqs = options["max_seqs"]
    scheduler.cache_size = 2  # GB
    scheduler.max_num_batched_tokens = 2048  # prefill is a fifth faster than with the 256 by default
    # The KV cache in 16 bits, as the others have it; 8 by default, which is no faster here.
    properties = {"INFERENCE_NUM_THREADS": options["threads"], "KV_CACHE_PRECISION": "f16"}
    pipeline = openvino_genai.LLMPipeline(options["model"], "CPU", scheduler_config=scheduler, **properties)

    def generate(prompts: Prompts, max_tokens: int) -> Answer:
        config = openvino_genai.GenerationConfig(max_new_tokens=max_tokens, ignore_eos=True, do_sample=False)
        ids = np.array(prompts, dtype=np.int64)  # equally long
        inputs = openvino_genai.TokenizedInputs(openvino.Tensor(ids), openvino.Tensor(np.ones_like(ids)))
        return Answer(pipeline.generate(inputs, config).tokens)

    return Loaded(generate, {"version": openvino_genai.__version__})


if __name__ == "__main__":
    serve(load)
