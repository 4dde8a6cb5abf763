"""`make equality`: the same tokens, token for token, whatever separates, batches, preempts or dies on the way."""
