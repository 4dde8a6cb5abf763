"""Programs for developers: stubs, references, lists and training. Not installed."""
