"""What the router costs, how well it predicts and what it withstands; `make bench-router`."""
