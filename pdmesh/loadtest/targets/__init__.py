"""The servers that a load test can load: pdmesh over gRPC, any OpenAI server over HTTP."""
