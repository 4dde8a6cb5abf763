"""Families with LayerNorm, most of them with attention and MLP in parallel or a plain MLP."""
