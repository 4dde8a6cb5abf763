"""Speculation: what it is worth, and the training of draft heads."""
