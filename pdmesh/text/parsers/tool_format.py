"""What a format of calls is made of. Each module of `formats/` has one, and the table in `registry.py` names them."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from pdmesh.text.parsers.forcing import Form
from pdmesh.text.parsers.machine import Parse, Schemas
from pdmesh.text.parsers.reasoning import ThinkMarks

_MARK = re.compile(r"<[^<>\s]+>|\[[A-Z_]+\]")


@dataclass(frozen=True)
class ToolFormat:
    """A format of calls: how it is read, and how it is written. `signs`: a template that has all of one of these groups writes
    it. `opening`: the mark behind which a call can be forced; "" where text before it cannot be told from it. `more_marks`: those
    that may be special tokens of a tokenizer, `opening` and what `form` writes aside. `thoughts`: the format itself has them, so
    a reasoning format has no effect."""

    parse: Callable[[Schemas], Parse]
    form: Form
    signs: tuple[tuple[str, ...], ...]
    opening: str = ""
    more_marks: tuple[str, ...] = ()
    thoughts: ThinkMarks | None = None

    def is_shown_by(self, template: str) -> bool:
        """Return whether a chat template has the marks of this format. Pure."""
        return any(all(sign in template for sign in group) for group in self.signs)

    @property
    def marks(self) -> tuple[str, ...]:
        """Return the marks of the format, which a parser has to see also where they are special tokens."""
        written = _MARK.findall(" ".join((*self.form[:5], self.opening)))
        return (*(mark for mark in written if mark not in self.more_marks), *self.more_marks)
