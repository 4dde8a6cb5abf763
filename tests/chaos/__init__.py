"""`make chaos`: a mesh of real processes under load while its processes, links, memory, registry and clocks fail.

`plan` says what is to be struck at which state (pure), `campaign` strikes it by `faults` in a `mesh` whose links, clocks and
failpoints the suite holds, `load` keeps streams running and compares every token with an engine alone, `report` counts. `run` is
the command; `record` says what became of each fault and lets it go on where it was stopped.
"""
