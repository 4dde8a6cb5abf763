"""What commands show, as text."""

import io

from rich.console import RenderableType

from pdmesh.terminal import MAX_WIDTH, show


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def plain(*parts: RenderableType, width: int = MAX_WIDTH) -> list[str]:
    """Return the lines that a pipe gets, without the spaces with which rich fills the cells of a table."""
    stream = io.StringIO()
    show(*parts, stream=stream, width=width)
    return [line.rstrip() for line in stream.getvalue().splitlines()]
