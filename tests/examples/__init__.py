"""Every example runs as its readers would run it."""
