"""What the loop did and why: one line for each change, and for each time that a hold begins or ends."""

import json
import logging
import re
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, TypeAlias

_FIGURES = re.compile(r"[\d.,]+")
MAX_ENTRIES = 1000
Kind: TypeAlias = Literal["scale", "flip", "hold", "resume", "failed"]

logger = logging.getLogger("autoscaler")


@dataclass(frozen=True)
class Entry:
    """`at_s`: on the loop's clock. `kind`: scale or flip, something changes; hold, nothing may; resume, it may again; failed, it
    was tried in vain. `replicas` that each pool is to have from then on."""

    at_s: float
    kind: Kind
    text: str
    replicas: dict[str, int]


class History:
    """The latest entries; each is logged, and told to whoever listens."""

    def __init__(self, on_entry: Callable[[Entry], None] | None = None) -> None:
        self.entries: deque[Entry] = deque(maxlen=MAX_ENTRIES)
        self._on_entry = on_entry
        self._standing: dict[Kind, str] = {}

    def changed(self, at_s: float, kind: Kind, text: str, replicas: dict[str, int]) -> None:
        """Something was done."""
        self._add(Entry(at_s, kind, text, replicas))

    def stands(self, at_s: float, kind: Literal["hold", "failed"], text: str | None, replicas: dict[str, int]) -> None:
        """What is the case for now, None: nothing is. Said once for as long as it lasts, whatever its figures become."""
        before = self._standing.get(kind, "")
        now = "" if text is None else _FIGURES.sub("#", text)
        self._standing[kind] = now
        if text is not None and now != before:
            self._add(Entry(at_s, kind, text, replicas))
        elif text is None and before and kind == "hold":
            self._add(Entry(at_s, "resume", "what was held may change again", replicas))

    def _add(self, entry: Entry) -> None:
        self.entries.append(entry)
        level = logging.INFO if entry.kind in ("scale", "flip", "resume") else logging.WARNING
        logger.log(level, "%s: %s", entry.kind, entry.text)
        if self._on_entry is not None:
            self._on_entry(entry)


def append_to(path: Path) -> Callable[[Entry], None]:
    """A listener that writes entries as JSON, one a line. A full disk ends nothing."""

    def write(entry: Entry) -> None:
        try:
            with path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(asdict(entry)) + "\n")
        except OSError as error:
            logger.warning("decisions are not written to %s: %s", path, error)

    return write


def read_entries(path: Path) -> list[Entry]:
    """What `append_to` has written. Raises OSError, ValueError."""
    return [Entry(**json.loads(line)) for line in path.read_text(encoding="utf-8").splitlines()]
