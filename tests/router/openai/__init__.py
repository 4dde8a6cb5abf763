"""The OpenAI-compatible API: conversions alone, and a real router spoken to by the real `openai` client."""
