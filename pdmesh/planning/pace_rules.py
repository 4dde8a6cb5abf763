"""How engines keep a promised pace, for all who predict what they do. Copies of the numbers in `engine/pacing.py`, which explains
each and cannot be imported here; a test compares them."""

PACE_TARGET = 0.9
"""Of a TPOT objective, the pace: steps that hold prompts last no longer, once what sequences are ahead is used up."""
SPREAD = 8
"""Steps over which what they are ahead is used up."""
MAX_SHARE = 0.75
"""Of the time, for steps of running sequences alone: prompts get the rest, as long as the objective is kept all the same."""
LEAST_TOKENS = 8
"""Of prompts in a step, whatever anybody was promised."""
FORGIVEN = 32
"""Paces that a sequence can be behind."""
