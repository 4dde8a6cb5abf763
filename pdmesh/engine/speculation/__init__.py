"""Speculative decoding: draft tokens are verified beside the next token in one step, and accepted if the model draws them itself.

Outputs never change (docs/speculation.md): a draft token is accepted if and only if it equals the model's own draw, made with the
noise of its position. A proposer drafts (`proposer.py`), the policy decides how much of it a step verifies (`policy.py`),
`speculator.py` combines them around the engine's step."""
