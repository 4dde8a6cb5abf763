"""Tiny random models with a byte-level tokenizer and a chat template: complete Hugging Face folders for tests.

`make_tiny_model(folder)` takes well under a second and is deterministic: the same arguments give the same weights.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
NUM_BYTES = 256
VOCAB_SIZE = 320  # 256 bytes, then the special tokens, then ids that no text gives (a model may still draw them)
ENDOFTEXT, IM_START, IM_END = range(NUM_BYTES, NUM_BYTES + len(SPECIAL_TOKENS))

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

_DEFAULTS: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
    "initializer_range": 0.2,  # large: greedy output then varies instead of settling on one token
    "bos_token_id": IM_START,
    "eos_token_id": IM_END,
    "pad_token_id": ENDOFTEXT,
}
_ARCHITECTURES = {
    "llama": ("LlamaConfig", "LlamaForCausalLM"),
    "mistral": ("MistralConfig", "MistralForCausalLM"),
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM"),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM"),
}


def make_tiny_model(folder: str | Path, kind: str = "llama", *, seed: int = 0, dtype: str = "float32", **overrides: Any) -> Path:
    """Writes config.json, model.safetensors, tokenizer.json and tokenizer_config.json to `folder`; returns it.

    `kind`: llama, mistral, qwen2 or qwen3. `overrides` are fields of its transformers config, such as
    `num_hidden_layers`, `rope_parameters`, `sliding_window`. Biases and norm weights are random as well.
    """
    import transformers  # tests that only read a folder need no transformers

    config_class, model_class = (getattr(transformers, name) for name in _ARCHITECTURES[kind])
    folder = Path(folder)
    config = config_class(**{**_DEFAULTS, **overrides})
    torch.manual_seed(seed)
    model = model_class(config)
    _randomize_vectors(model)
    model.to(getattr(torch, dtype)).save_pretrained(folder)
    write_byte_tokenizer(folder, max_context=config.max_position_embeddings)
    return folder


def _randomize_vectors(model: torch.nn.Module) -> None:
    """Norm weights and biases start as ones and zeros, which would hide a loader that forgets them."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.1)


def write_byte_tokenizer(folder: str | Path, *, max_context: int = 2048) -> None:
    """tokenizer.json (one token per byte, plus the special tokens) and tokenizer_config.json with the chat template."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|im_start|>",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "model_max_length": max_context,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2))
