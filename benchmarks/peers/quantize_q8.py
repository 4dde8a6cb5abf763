"""python -m benchmarks.peers.quantize_q8 IN.gguf OUT.gguf, under llama.cpp's environment: all weights to Q8_0."""

from __future__ import annotations

import ctypes
import sys

import llama_cpp  # type: ignore[import-not-found]


def main(source: str, target: str) -> int:
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype = llama_cpp.LLAMA_FTYPE_MOSTLY_Q8_0
    params.allow_requantize = True
    params.nthread = 2
    return int(llama_cpp.llama_model_quantize(source.encode(), target.encode(), ctypes.byref(params)))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
