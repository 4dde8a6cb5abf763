"""OpenAI's protocol over HTTP, in the router's process: JSON to `pdmesh.v1`, and its responses to JSON or events."""
