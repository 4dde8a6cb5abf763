"""The fixed text for perplexity: prose from docstrings of Python's standard library, so nothing is fetched.

The files are read, not imported, and were chosen because these docstrings are the same from Python 3.10 to 3.13. The digest
says which text a figure is about: figures with different digests cannot be compared, ratios to another variant still can.
"""

import ast
import codecs
import hashlib
import sysconfig
from dataclasses import dataclass
from pathlib import Path

from pdmesh.text.tokenizer import Tokenizer

# Of the standard library, in this order: the first windows come from the first files.
FILES = (
    "textwrap.py",
    "optparse.py",
    "cmd.py",
    "_pydecimal.py",
    "difflib.py",
    "xml/sax/handler.py",
    "email/message.py",
    "unittest/case.py",
    "urllib/parse.py",
    "codecs.py",
    "http/cookiejar.py",
    "json/__init__.py",
    "xml/etree/ElementTree.py",
    "pickle.py",
    "email/policy.py",
    "xmlrpc/server.py",
    "mimetypes.py",
    "email/header.py",
    "uuid.py",
    "xml/sax/xmlreader.py",
)
# Shorter docstrings are labels rather than prose.
MIN_CHARACTERS = 200
_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass(frozen=True)
class Windows:
    """Consecutive pieces of the text, all of one length in tokens; `digest` is the SHA-256 of the text that they cover."""

    token_ids: tuple[tuple[int, ...], ...]
    digest: str


def fixed_text(library: Path | None = None) -> str:
    """The Zen of Python, then every longer docstring of FILES without examples. Raises ValueError where a file is missing."""
    folder = library or Path(sysconfig.get_path("stdlib"))
    parts = [zen(_read(folder / "this.py"))]
    for name in FILES:
        parts += prose(_read(folder / name))
    return "\n\n".join(parts)


def zen(source: str) -> str:
    """The poem that this.py keeps in ROT13 as its first string; importing the module would print it."""
    strings = (node.value for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Constant))
    return codecs.decode(next(value for value in strings if isinstance(value, str)), "rot13")


def prose(source: str) -> list[str]:
    """The docstrings of a module's source, from top to bottom, without short ones and those with an interpreter's prompts."""
    nodes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, _DOCUMENTED)]
    nodes.sort(key=lambda node: getattr(node, "lineno", 0))  # a module has no line: it comes first
    texts = [ast.get_docstring(node) or "" for node in nodes]
    return [text for text in texts if len(text) >= MIN_CHARACTERS and ">>>" not in text]


def cut_windows(tokenizer: Tokenizer, text: str, num_windows: int, length: int) -> Windows:
    """The first `num_windows` pieces of `length` tokens, without special tokens. Raises ValueError when the text is too short."""
    token_ids = tokenizer.encode(text, add_special_tokens=False)
    if len(token_ids) < num_windows * length:
        raise ValueError(f"windows: {num_windows} of {length} tokens are more than the text's {len(token_ids)}; ask for fewer")
    covered = token_ids[: num_windows * length]
    pieces = tuple(tuple(covered[start : start + length]) for start in range(0, len(covered), length))
    return Windows(pieces, hashlib.sha256(tokenizer.decode(covered).encode()).hexdigest())


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(f"text: {path.name} of the standard library cannot be read ({error}); use a complete Python") from error
