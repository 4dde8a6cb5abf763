"""A worker process: an engine with the prefill service, the decode service, or both on it.

`main` is the process, `assembly` puts the worker together; `step_dispatcher` carries the engine's results to the services,
`roles` says which services take requests, `control` serves what every worker answers, `config` holds settings and binds the
engine's threads to cores.
"""
