"""Families with RMSNorm and a dense MLP: Llama and what grew from it."""
