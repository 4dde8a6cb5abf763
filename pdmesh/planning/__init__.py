"""Models shared by router, autoscaler and simulator: latency model, capacity planning. Pure and without torch."""
