"""OpenAI's Responses API over HTTP: items and events to `pdmesh.v1` and back, and responses that are kept for the next turn."""
