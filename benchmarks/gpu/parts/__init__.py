"""One module for each part of plan.py: `run(context)` measures, and hands over each figure as soon as it is known."""
