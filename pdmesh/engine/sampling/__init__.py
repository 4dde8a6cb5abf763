"""From logits to tokens: the sampler, its counter-based random numbers, grammar masks."""
