"""The protocols of clients: pdmesh.v1, OpenAI, KServe and vLLM's engine protocol, all on one frontend."""
