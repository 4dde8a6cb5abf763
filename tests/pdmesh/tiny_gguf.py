"""A GGUF file of a tiny Llama, with tokenizer and chat template: 100 KB, written in milliseconds."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
from tokenizers import pre_tokenizers

_HIDDEN, _FEED_FORWARD, _NUM_HEADS, _NUM_KV_HEADS, _CONTEXT = 32, 64, 4, 2, 256
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


def write_tiny_gguf(path: Path, *, seed: int = 0) -> Path:
    """Two layers of random float32 weights; a token per byte and one of two bytes, behind three special ones."""
    tokens = [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet()), "th"]
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_context_length(_CONTEXT)
    writer.add_embedding_length(_HIDDEN)
    writer.add_block_count(2)
    writer.add_feed_forward_length(_FEED_FORWARD)
    writer.add_head_count(_NUM_HEADS)
    writer.add_head_count_kv(_NUM_KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([gguf.TokenType.CONTROL] * len(SPECIAL) + [gguf.TokenType.NORMAL] * (len(tokens) - len(SPECIAL)))
    writer.add_token_merges(["t h"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template("{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}")
    for name, shape in _shapes(len(tokens)).items():
        writer.add_tensor(name, np.random.default_rng(seed).standard_normal(shape).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _shapes(vocab_size: int) -> dict[str, tuple[int, ...]]:
    kv_size = _HIDDEN // _NUM_HEADS * _NUM_KV_HEADS
    layer = {
        "attn_norm": (_HIDDEN,),
        "attn_q": (_HIDDEN, _HIDDEN),
        "attn_k": (kv_size, _HIDDEN),
        "attn_v": (kv_size, _HIDDEN),
        "attn_output": (_HIDDEN, _HIDDEN),
        "ffn_norm": (_HIDDEN,),
        "ffn_gate": (_FEED_FORWARD, _HIDDEN),
        "ffn_up": (_FEED_FORWARD, _HIDDEN),
        "ffn_down": (_HIDDEN, _FEED_FORWARD),
    }
    layers = {f"blk.{index}.{name}.weight": shape for index in range(2) for name, shape in layer.items()}
    return {"token_embd.weight": (vocab_size, _HIDDEN), **layers, "output_norm.weight": (_HIDDEN,)}
