"""What router, autoscaler and simulator share: the latency model, capacity arithmetic. Pure and without torch."""
