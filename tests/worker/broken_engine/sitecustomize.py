"""Put on PYTHONPATH by a test: the first engine step of the process fails."""

import engine.engine


def step(self: engine.engine.Engine) -> None:
    if self.has_work:
        raise RuntimeError("the engine is broken on purpose")


engine.engine.Engine.step = step  # type: ignore[method-assign]
