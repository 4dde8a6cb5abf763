"""`make bench-router`: what the router is worth: its policy, its admission, its predictions, its overhead, its loss."""
