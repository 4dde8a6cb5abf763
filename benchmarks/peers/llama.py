"""llama.cpp through its C interface: one `llama_batch` a step over all sequences, each with a KV stream of its own.

`python -m benchmarks.peers.llama IN.gguf OUT.gguf q8_0|q4_0|q4_1`, under its own environment, quantizes all weights.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Sequence
from typing import Any

import llama_cpp  # type: ignore[import-not-found]
import numpy as np

from benchmarks.peers.child import Answer, Loaded, Options, Prompts

# Tokens that one llama_decode call may hold (it cuts them into smaller ones itself).
_MAX_BATCH = 8192
_CONTEXT_STEP = 256


class Llama:
    """A model and one context per number of sequences: KV streams are set out when a context is made."""

    def __init__(self, options: Options) -> None:
        llama_cpp.llama_backend_init()
        self._options = options
        params = llama_cpp.llama_model_default_params()
        params.use_extra_bufts = options.get("extra_buffers", True)
        self._model = llama_cpp.llama_model_load_from_file(options["model"].encode(), params)
        if not self._model:
            raise ValueError(f"llama.cpp does not load {options['model']}")
        self._num_vocab = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self._model))
        self._contexts: dict[int, tuple[Any, int]] = {}
        self._batch = llama_cpp.llama_batch_init(_MAX_BATCH, 0, 1)

    def generate(self, prompts: Prompts, max_tokens: int) -> Answer:
        context = self._context(len(prompts), max(map(len, prompts)) + max_tokens)
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(context), False)
        outputs: list[list[int]] = [[] for _ in prompts]
        tokens, past = [list(ids) for ids in prompts], 0
        for _ in range(max_tokens):
            drawn = self._step(context, tokens, past)
            past += len(tokens[0])
            tokens = [[token] for token in drawn]
            for output, token in zip(outputs, drawn, strict=True):
                output.append(token)
        return Answer(outputs)

    def _context(self, num_sequences: int, length: int) -> Any:
        """The context for so many sequences, made anew if they outgrow it."""
        context, capacity = self._contexts.get(num_sequences, (None, 0))
        if length <= capacity:
            return context
        if context:
            llama_cpp.llama_free(context)
        capacity = -(-length // _CONTEXT_STEP) * _CONTEXT_STEP
        params = llama_cpp.llama_context_default_params()
        params.n_seq_max, params.n_ctx, params.n_batch = num_sequences, num_sequences * capacity, _MAX_BATCH
        params.n_threads = params.n_threads_batch = self._options["threads"]
        context = llama_cpp.llama_init_from_model(self._model, params)
        if not context:
            raise ValueError(f"llama.cpp makes no context for {num_sequences} sequences of {capacity} tokens")
        self._contexts[num_sequences] = context, capacity
        return context

    def _step(self, context: Any, tokens: Sequence[Sequence[int]], past: int) -> list[int]:
        """One call for the next tokens of all sequences (equally many, from position `past`); the greedy draw of each."""
        last = self._fill(tokens, past)
        status = llama_cpp.llama_decode(context, self._batch)
        if status:
            raise ValueError(f"llama_decode returns {status}")
        return [self._greedy(context, index) for index in last]

    def _fill(self, tokens: Sequence[Sequence[int]], past: int) -> list[int]:
        """Writes the batch; returns the place of each sequence's last token, the only ones with logits."""
        batch, place, last = self._batch, 0, []
        for sequence, ids in enumerate(tokens):
            for offset, token in enumerate(ids):
                batch.token[place], batch.pos[place] = token, past + offset
                batch.n_seq_id[place], batch.seq_id[place][0] = 1, sequence
                batch.logits[place] = offset == len(ids) - 1
                place += 1
            last.append(place - 1)
        batch.n_tokens = place
        return last

    def _greedy(self, context: Any, index: int) -> int:
        logits = llama_cpp.llama_get_logits_ith(context, index)
        return int(np.ctypeslib.as_array(ctypes.cast(logits, ctypes.POINTER(ctypes.c_float)), (self._num_vocab,)).argmax())


def load(options: Options) -> Loaded:
    return Loaded(Llama(options).generate, {"version": llama_cpp.__version__})


def quantize(source: str, target: str, kind: str) -> int:
    """Its status: 0 where all went well."""
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{kind.upper()}")
    params.pure = True  # else some matrices keep more bits, as suits real weights
    params.allow_requantize = True
    params.nthread = 2
    return int(llama_cpp.llama_model_quantize(source.encode(), target.encode(), ctypes.byref(params)))


if __name__ == "__main__":
    sys.exit(quantize(*sys.argv[1:]))
