"""The protocols of clients: pdmesh.v1, OpenAI, Anthropic, KServe and vLLM's engine protocol, all on one frontend."""
