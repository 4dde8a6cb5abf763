"""A simulated router around the real admission and routing policy."""
