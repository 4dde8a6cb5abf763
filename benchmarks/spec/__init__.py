"""What speculation is worth, measured: prompts (`prompts.py`) and named workloads (`workloads.py`), and what they are made of."""
