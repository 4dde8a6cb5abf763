"""`generate` of transformers in bfloat16."""

from __future__ import annotations

import torch
import transformers

from benchmarks.peers.child import Answer, Loaded, Options, Prompts, serve


def load(options: Options) -> Loaded:
    torch.set_num_threads(options["threads"])
    model = transformers.AutoModelForCausalLM.from_pretrained(options["model"], dtype=torch.bfloat16).eval()

    def generate(prompts: Prompts, max_tokens: int) -> Answer:
        ids = torch.tensor(prompts)  # equally long
        with torch.inference_mode():
            out = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                max_new_tokens=max_tokens,
                eos_token_id=-1,  # a token that is never drawn: nothing ends early
            )
        return Answer(out[:, ids.shape[1] :].tolist())

    return Loaded(generate, {"version": transformers.__version__})


if __name__ == "__main__":
    serve(load)
