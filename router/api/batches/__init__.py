"""Batch files in OpenAI's form: `/v1/files` and `/v1/batches`, on a folder. Each line runs as a request of another protocol."""
