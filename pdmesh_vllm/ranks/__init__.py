"""Several ranks of one model, each in a process of its own."""
