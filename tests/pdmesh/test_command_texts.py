"""Commands that product code tells people to type: their words and flags exist."""

import ast
import re
from collections.abc import Iterator
from typing import Literal, get_args, get_origin, get_type_hints

from pdmesh.cli import COMMANDS, command_of
from pdmesh.runtime.config import ENV_PREFIX, options_of
from tests.structure.measure import product

REPLACED = "…"  # stands for a replaced field of an f-string
_NAMED = re.compile(r"(?<![\w./-])pdmesh (?P<words>[a-z-]+(?: (?:[^\s`;,:()]+|\"[^\"]*\"))*)")
_FLAG = re.compile(r"--[a-z][a-z0-9-]*")


def texts(tree: ast.Module) -> Iterator[str]:
    """Yield the string literals, f-strings as one text."""
    parts = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            yield "".join(str(part.value) if isinstance(part, ast.Constant) else REPLACED for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in parts:
            yield node.value


def named(text: str) -> list[list[str]]:
    """Return the commands in `text`, each as its words; prose that has "pdmesh" as its subject is none."""
    found = [match["words"].rstrip(".").split() for match in _NAMED.finditer(text)]
    return [words for words in found if words[0] in COMMANDS]


def problems(words: list[str]) -> list[str]:
    """Return what of a command does not exist."""
    command, *rest = words
    path: tuple[str, ...] = (command,)
    if rest and rest[0] in COMMANDS[command].subcommands and rest[0] != "run":
        path, rest = (command, rest[0]), rest[1:]
    options = command_of(path).Options
    known = {option.flag for option in options_of(options, ENV_PREFIX)}
    wrong = [word for word in rest for flag in _FLAG.findall(word) if flag not in known]
    actions = _actions(options)
    if actions and rest and not rest[0].startswith("-") and rest[0] not in (*actions, REPLACED):
        wrong.append(rest[0])
    return wrong


def _actions(options: type[object]) -> tuple[str, ...]:
    """Return the values of the first bare word, if there is a list of them."""
    first = next((name for name, field in options.__dataclass_fields__.items() if field.metadata.get("positional")), None)  # type: ignore[attr-defined]
    hint = get_type_hints(options)[first] if first else None
    return get_args(hint) if get_origin(hint) is Literal else ()


def test_commands_are_found_and_checked() -> None:
    assert named("make one with: pdmesh keys new --keys FILE --name NAME") == [
        ["keys", "new", "--keys", "FILE", "--name", "NAME"]
    ]
    assert problems(["keys", "new", "--keys", "FILE", "--name", "NAME"]) == ["--keys"]
    assert problems(["keys", "make"]) == ["make"]
    assert named("`pdmesh up` starts one; pdmesh needs 3.11") == [["up"]]


def test_commands_in_texts_exist() -> None:
    modules = product()
    found = [(path, words) for path, module in modules.items() for text in texts(module.tree) for words in named(text)]
    assert len(found) > 50
    wrong = [f"{path}: pdmesh {' '.join(words)}: {problem}" for path, words in found for problem in problems(words)]
    assert wrong == []
