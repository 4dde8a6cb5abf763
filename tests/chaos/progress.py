"""Rounds that are done, in a file: a campaign that was stopped goes on behind the last of them."""

from __future__ import annotations

import json
from pathlib import Path

from pdmesh.models.catalogue import cache_folder
from tests.chaos.record import Round


class Progress:
    """One line of JSON for each round of one plan. A line that was cut off in the middle counts as not written."""

    def __init__(self, plan_name: str, *, fresh: bool) -> None:
        """`plan_name`: what tells plans apart. `fresh`: forget what is there."""
        self._file = cache_folder() / "chaos" / f"{plan_name}.jsonl"
        self._file.parent.mkdir(parents=True, exist_ok=True)
        if fresh:
            self._file.unlink(missing_ok=True)
        self.rounds = self._read()
        self._write_all()

    @property
    def path(self) -> Path:
        return self._file

    def find(self, campaign: str, number: int) -> Round | None:
        """The round, if it is done."""
        return next((each for each in self.rounds if (each.campaign, each.number) == (campaign, number)), None)

    def add(self, done: Round) -> None:
        """Keeps a round."""
        self.rounds.append(done)
        with self._file.open("a", encoding="utf-8") as file:
            file.write(json.dumps(done.to_json()) + "\n")

    def _read(self) -> list[Round]:
        if not self._file.exists():
            return []
        lines = self._file.read_text(encoding="utf-8").split("\n")[:-1]
        return [Round.from_json(json.loads(line)) for line in lines]

    def _write_all(self) -> None:
        """Without the line that was cut off."""
        self._file.write_text("".join(json.dumps(each.to_json()) + "\n" for each in self.rounds), encoding="utf-8")
