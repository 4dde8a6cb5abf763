"""The commands of the `pdmesh` program, one module each: an `Options` dataclass and `run(options) -> exit code`."""
