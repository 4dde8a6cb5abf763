"""Put on PYTHONPATH by a test: the first engine step of the process fails."""

import pdmesh.engine.engine


def step(self: pdmesh.engine.engine.Engine) -> None:
    if self.has_work:
        raise RuntimeError("the engine is broken on purpose")


pdmesh.engine.engine.Engine.step = step  # type: ignore[method-assign]
