"""vLLM as the engine of a worker: a KV connector, a logits processor, and the engine interface of pdmesh around EngineCore.

vLLM is not changed. Its EngineCore runs in the worker's own process, stepped by the engine thread, so both halves of the
connector, the draw of tokens and the KV pool are where the worker's transfers are.
Several ranks are processes beside it (ranks/).
"""
