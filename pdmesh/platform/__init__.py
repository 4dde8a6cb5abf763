"""What the system can do, found by trying, and what is done where it cannot. Standard library alone: every package may use it."""
