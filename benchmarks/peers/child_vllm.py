"""vLLM on the CPU: its offline engine, in this one process."""

from __future__ import annotations

import vllm  # type: ignore[import-not-found]

from benchmarks.peers.child import Answer, Loaded, Options, Prompts, serve


def load(options: Options) -> Loaded:
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


if __name__ == "__main__":
    serve(load)
