"""Coverage-guided fuzzing of everything that reads what others write: `make fuzz`. What it found is replayed by `make test`."""
