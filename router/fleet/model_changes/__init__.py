"""Changes to all workers of a model while they serve, those that come later included: other weights, pause, sleep and wake."""
