"""Families with latent attention."""
