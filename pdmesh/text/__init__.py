"""Converts text and token ids: tokenizer, chat template, incremental detokenization, stop strings, block hashes. No torch."""
