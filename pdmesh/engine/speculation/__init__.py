"""Speculation: tokens are guessed, computed beside the next one in one step, and kept as far as the model draws them itself.

What is drawn never changes (design.md, section 6): a drafted token is kept if and only if it equals the model's own draw, made
with the noise of its place. A proposer guesses (`proposer.py`), the policy decides how much of it a step verifies (`policy.py`),
`speculator.py` brings them together around the engine's step.
"""
