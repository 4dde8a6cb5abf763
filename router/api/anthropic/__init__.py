"""Anthropic's Messages API over HTTP, in the router's process: JSON to `pdmesh.v1`, and its responses to messages or events."""
