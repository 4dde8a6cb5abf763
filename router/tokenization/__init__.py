"""From a client's message to a prepared request: validation, tokenization, the queue of long texts."""
