"""`make train-heads`: trains draft heads for a model, on its own outputs."""
