"""The API of Anthropic: conversions alone, and a real router spoken to by the real `anthropic` client."""
