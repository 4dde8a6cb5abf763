"""One file for each family of checkpoints: its config.json and its tensors in the vocabulary of parts."""
