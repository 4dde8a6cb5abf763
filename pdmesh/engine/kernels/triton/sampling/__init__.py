"""Sampling on the device: penalties, top-k, top-p, min-p, the draw, log-probabilities."""
