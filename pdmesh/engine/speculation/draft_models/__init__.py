"""Models that draft: a smaller one with the same vocabulary, or the first layers of the target itself."""
