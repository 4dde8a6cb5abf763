"""One worker process: an engine with the prefill service, the decode service, or both on it.

`main` is its process, `assembly` puts it together; `dispatch` carries the engine's results to the services, `roles` says which
services take work, `control` answers what every worker answers, `cpus` where the engine's threads run.
"""
