"""Latent attention (DeepSeek-V2, 2024) over a pool that holds the latent: one key for all heads, whose beginning is its value."""
