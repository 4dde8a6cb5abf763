"""A command of `pdmesh` is one file in `pdmesh/commands/` and one line of `COMMANDS` in `pdmesh/cli.py`."""

import re
import sys
from pathlib import Path

import pytest

import pdmesh.commands
from pdmesh import cli

SOURCE = '''
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Options:
    """Greet a person."""

    name: str = field(default="", metadata={"help": "who, also as bare words", "positional": True})
    loud: bool = field(default=False, metadata={"help": "with an exclamation mark"})

    def validate(self) -> None:
        if not self.name:
            raise ValueError("name: is missing; name a person")


def run(options: Options) -> int:
    print(f"hello {options.name}" + "!" * options.loud)
    return 0
'''


@pytest.fixture(autouse=True)
def registered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file, in a folder of its own, and the one line of the registry."""
    (tmp_path / "greet.py").write_text(SOURCE)
    monkeypatch.setattr(pdmesh.commands, "__path__", [*pdmesh.commands.__path__, str(tmp_path)])
    monkeypatch.delitem(sys.modules, "pdmesh.commands.greet", raising=False)
    monkeypatch.setitem(cli.COMMANDS, "greet", cli.Command("greet a person"))


def test_it_runs_with_flags_words_and_variables(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert cli.run(["greet", "Ada", "Lovelace", "--loud"]) == 0
    monkeypatch.setenv("PDMESH_NAME", "Grace")
    assert cli.run(["greet"]) == 0
    assert capsys.readouterr().out == "hello Ada Lovelace!\nhello Grace\n"


def test_it_is_shown_and_explained(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["--help"]) == 0
    assert re.search(r"^  greet +greet a person$", capsys.readouterr().out, re.MULTILINE)
    with pytest.raises(SystemExit) as caught:
        cli.run(["greet", "--help"])
    assert caught.value.code == 0
    assert "usage: pdmesh greet" in capsys.readouterr().out
    assert cli.run(["gret"]) == 2
    assert "did you mean greet?" in capsys.readouterr().err


def test_its_settings_are_checked(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.run(["greet"])
    assert caught.value.code == 2
    assert capsys.readouterr().err == "pdmesh greet: --name: is missing; name a person\n"
