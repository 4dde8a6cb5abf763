"""Tests of the Responses API over HTTP, with OpenAI's own client."""
