"""The life of one request: the stages in their order, and what each of them does."""
