"""The objectives file, read anew when it has changed: what people promise changes while the autoscaler runs."""

import logging
from pathlib import Path

from pdmesh.autoscaler.config import goals_of, objective_of, promise
from pdmesh.planning.capacity_load import Goals
from pdmesh.runtime.config import ConfigError

logger = logging.getLogger(__name__)


class ObjectivesFile:
    """`model`: whose. `goals`: those that were read last without a mistake."""

    def __init__(self, path: str, model: str, transit_ms: float) -> None:
        """`model` empty: the only one in it, from then on. Raises ConfigError."""
        self._path, self._transit_ms = path, transit_ms
        self._seen = _content(path)
        objective = objective_of(path, model)
        self.model, self.goals = objective.model, goals_of(objective, transit_ms)

    def look(self) -> Goals:
        """Those in force now. A file that cannot be used is said once, and changes nothing."""
        content = _content(self._path)
        if content != self._seen:
            self._seen = content
            self._read()
        return self.goals

    def _read(self) -> None:
        before = self.goals
        try:
            self.goals = goals_of(objective_of(self._path, self.model), self._transit_ms)
        except ConfigError as error:
            logger.error("the changed objectives cannot be used, %s stays: %s", promise(before), error)
        else:
            logger.info("objectives were read anew: %s; before: %s", promise(self.goals), promise(before))


def _content(path: str) -> bytes | None:
    """None: it cannot be read. Compared as a whole: two writes within a clock tick leave the same time and size."""
    try:
        return Path(path).read_bytes()
    except OSError:
        return None
