"""Pieces of the page that all of its sections are made of. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape


def section(title: str, content: str) -> str:
    """A heading and what stands under it (markup)."""
    return f"<section><h2>{escape(title)}</h2>{content}</section>"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Text in rows, without a head if that is empty; it scrolls by itself where it is wider than the page."""
    top = f"<tr>{''.join(f'<th>{escape(name)}</th>' for name in head)}</tr>" if head else ""
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<div class="scroll"><table>{top}{body}</table></div>'
