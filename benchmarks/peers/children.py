"""Our own engine and the libraries of others behind one protocol (`child.py`), so that everybody is measured alike:
`python -m benchmarks.peers.children '{"library": NAME, …}'`, under the library's own Python, which imports it alone.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from typing import Any

from benchmarks.peers.child import Answer, Loaded, Options, Prompts, serve


def engine(options: Options) -> Loaded:
    """`settings` are fields of EngineConfig; without them the engine is as a user gets it."""
    from pdmesh.engine.config import EngineConfig
    from pdmesh.engine.engine import Engine
    from pdmesh.engine.kernels.cpu.model import NativeModel
    from pdmesh.engine.loader.loader import load_model
    from pdmesh.text.block_hash import hash_block

    config = EngineConfig(model=options["model"], **options.get("settings", {}))
    loaded = load_model(config)
    made = Engine(config, hash_block=hash_block, loaded=loaded)
    shape = made.kv.shape
    about: Options = {
        "version": made.numeric_mode,
        "kv_dtype": str(shape.dtype).removeprefix("torch."),
        "kv_bytes_per_token": shape.bytes_per_block / shape.block_size,
    }
    if isinstance(loaded.model, NativeModel):
        weights = loaded.model.weights
        about["weight_bytes"] = weights.bytes_per_step
        about["packed_bytes"] = weights.bytes_per_step + weights.embedding.nbytes  # of a dense model
    return Loaded(EngineRunner(made).generate, about)


class EngineRunner:
    """Runs prompts through one engine, all at once."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._numbers = itertools.count()

    def generate(self, prompts: Prompts, max_tokens: int) -> Answer:
        started, first_seconds = time.perf_counter(), None
        outputs = self._add(prompts, max_tokens)
        num_without_token = len(outputs)
        while self._engine.has_work:
            result = self._engine.step()
            for update in result.updates if result else ():
                output = outputs[update.request_id]
                num_without_token -= not output
                output.extend(update.token_ids)
            if first_seconds is None and not num_without_token:
                first_seconds = time.perf_counter() - started
        return Answer(list(outputs.values()), first_seconds)

    def _add(self, prompts: Prompts, max_tokens: int) -> dict[str, list[int]]:
        from pdmesh.engine.request import EngineRequest
        from pdmesh.sampling_params import SamplingParams

        sampling, outputs = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True), dict[str, list[int]]()
        for prompt in prompts:
            request = EngineRequest(request_id=f"r{next(self._numbers)}", prompt=tuple(prompt), sampling=sampling)
            if not self._engine.add(request):
                raise ValueError(f"the engine takes no more than {len(outputs)} requests: raise max_num_seqs")
            outputs[request.request_id] = []
        return outputs


def openvino(options: Options) -> Loaded:
    """OpenVINO GenAI with continuous batching: a GGUF file, which it reads itself, or a folder in its own format."""
    import numpy as np
    import openvino  # type: ignore[import-not-found]
    import openvino_genai  # type: ignore[import-not-found]

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


def transformers(options: Options) -> Loaded:
    """Its `generate` in bfloat16."""
    import torch
    import transformers

    torch.set_num_threads(options["threads"])
    model = transformers.AutoModelForCausalLM.from_pretrained(options["model"], dtype=torch.bfloat16).eval()

    def generate(prompts: Prompts, max_tokens: int) -> Answer:
        ids = torch.tensor(prompts)  # equally long
        # A token that is never drawn ends a sequence: nothing ends early.
        settings = {"do_sample": False, "max_new_tokens": max_tokens, "eos_token_id": -1}
        with torch.inference_mode():
            out = model.generate(ids, attention_mask=torch.ones_like(ids), **settings)
        return Answer(out[:, ids.shape[1] :].tolist())

    return Loaded(generate, {"version": transformers.__version__})


def vllm(options: Options) -> Loaded:
    """On the CPU: its offline engine, in this one process."""
    import vllm

    engine = vllm.LLM(
        model=options["model"],
        dtype="bfloat16",
        max_model_len=options["max_context"],
        max_num_seqs=options["max_seqs"],
        enable_prefix_caching=False,
        skip_tokenizer_init=True,
    )

    def generate(prompts: Prompts, max_tokens: int) -> Answer:
        greedy = vllm.SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)
        outputs = engine.generate([{"prompt_token_ids": list(ids)} for ids in prompts], greedy, use_tqdm=False)
        return Answer([output.outputs[0].token_ids for output in outputs])

    return Loaded(generate, {"version": vllm.__version__})


def llama_cpp(options: Options) -> Loaded:
    from benchmarks.peers.llama import load

    return load(options)


LIBRARIES: dict[str, Callable[[Options], Loaded]] = {
    "pdmesh": engine, "openvino": openvino, "vllm": vllm, "llama.cpp": llama_cpp, "transformers": transformers,
}  # fmt: skip

if __name__ == "__main__":
    serve(lambda options: LIBRARIES[options["library"]](options))
