"""Flags, environment and defaults; every error names what gave the wrong value."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdmesh.runtime import config as runtime_config
from pdmesh.runtime.config import ConfigError, describe, dump, load, parse, to_env


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


@dataclass(frozen=True)
class Inner:
    max_num_seqs: int = field(default=8, metadata={"help": "sequences at once"})
    share: float = 0.5

    def validate(self) -> None:
        if self.max_num_seqs < 1:
            raise ConfigError("max_num_seqs", f"{self.max_num_seqs} is less than 1", "give at least 1")
        if self.share > 1:
            raise ValueError(f"share: {self.share} is more than 1; give a share such as 0.5")


@dataclass(frozen=True)
class Settings:
    """Settings of a test, 100% of them."""

    model: str = field(metadata={"help": "which model"})
    engine: Inner = field(default_factory=Inner, metadata={"flatten": True})
    draft: Inner = field(default_factory=lambda: Inner(max_num_seqs=2))
    roles: tuple[Literal["prefill", "decode"], ...] = ("prefill", "decode")
    colour: Colour = Colour.RED
    limit: int | None = None
    tracing: bool = False
    redis_url: str = field(default="", metadata={"secret": True, "help": "registry"})

    def validate(self) -> None:
        if self.tracing and self.limit is None:
            raise ConfigError("limit", "is missing with tracing", "give a limit")
        if self.model == self.redis_url:
            raise ValueError("model and registry are the same")


def settings(*argv: str, **env: str) -> Settings:
    return parse(Settings, argv, env, prog="test")


def problem(*argv: str, **env: str) -> str:
    with pytest.raises(ConfigError) as caught:
        settings(*argv, **env)
    return str(caught.value)


def test_defaults() -> None:
    assert settings("--model", "m") == Settings("m")


def test_a_flag_wins_over_the_environment_and_that_over_the_default() -> None:
    env = {"PDMESH_MODEL": "from env", "PDMESH_LIMIT": "3", "PDMESH_TRACING": "yes"}
    assert settings("--limit=4", **env) == Settings("from env", limit=4, tracing=True)
    assert settings("--no-tracing", **env).tracing is False


def test_nested_fields_are_flat_or_prefixed() -> None:
    result = settings("--model", "m", "--max-num-seqs", "5", "--draft-share", "0.25", PDMESH_DRAFT_MAX_NUM_SEQS="7")
    assert result.engine == Inner(5)
    assert result.draft == Inner(7, 0.25)


def test_the_outer_default_of_a_nested_dataclass_holds() -> None:
    assert settings("--model", "m", "--draft-share", "0.25").draft == Inner(2, 0.25)


def test_choices_tuples_and_optionals() -> None:
    result = settings("--model", "m", "--roles", "decode", "--colour", "blue", "--limit", "")
    assert (result.roles, result.colour, result.limit) == (("decode",), Colour.BLUE, None)


@pytest.mark.parametrize(
    ("argv", "env", "expected"),
    [
        ((), {}, "--model: is required; give --model or set PDMESH_MODEL"),
        (
            ("--model",),
            {},
            "--model: expected one argument; write --model=VALUE where the value begins with a -, or see test --help",
        ),
        (("--model", "m", "--limti", "3"), {}, "--limti: unknown flag; did you mean --limit?"),
        (("--model", "m", "--max-num", "3"), {}, "--max-num: unknown flag"),
        (("--model", "m", "stray"), {}, "stray: unexpected argument; see test --help"),
        (("--model", "m", "--limit", "3x"), {}, "--limit: '3x' is not an integer"),
        (("--model", "m", "--share", "nan"), {}, "--share: 'nan' is not a finite number"),
        (("--model", "m", "--colour", "green"), {}, "--colour: 'green' is not known; give one of red, blue"),
        (("--model", "m", "--roles", "decode,x"), {}, "--roles: 'x' is not known; give one of prefill, decode"),
        (("--model", "m", "--tracing=1"), {}, "--tracing: ignored explicit argument"),
        (("--model", "m"), {"PDMESH_LIMIT": "3x"}, "PDMESH_LIMIT: '3x' is not an integer"),
        (("--model", "m"), {"PDMESH_TRACING": "maybe"}, "PDMESH_TRACING: 'maybe' is neither true nor false"),
        (("--model", "m", "--max-num-seqs", "0"), {}, "--max-num-seqs: 0 is less than 1; give at least 1"),
        (("--model", "m"), {"PDMESH_DRAFT_MAX_NUM_SEQS": "0"}, "PDMESH_DRAFT_MAX_NUM_SEQS: 0 is less than 1"),
        (("--model", "m", "--draft-share", "2"), {}, "--draft-share: 2.0 is more than 1; give a share such as 0.5"),
        (("--model", "m", "--tracing"), {}, "--limit: is missing with tracing; give a limit"),
        (("--model", "m"), {"PDMESH_REDIS_URL": "m"}, "configuration: model and registry are the same"),
    ],
)
def test_errors_name_their_source(argv: tuple[str, ...], env: dict[str, str], expected: str) -> None:
    assert problem(*argv, **env).startswith(expected)


def test_load_exits_with_one_line_and_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        load(Settings, ["--limit", "x"], {}, prog="router")
    assert caught.value.code == 2
    assert capsys.readouterr().err == "router: --model: is required; give --model or set PDMESH_MODEL\n"


def test_help_shows_flag_variable_default_and_meaning(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        load(Settings, ["--help"], {}, prog="router")
    assert caught.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "Settings of a test, 100% of them." in text
    assert "--max-num-seqs integer sequences at once (default: 8; PDMESH_MAX_NUM_SEQS)" in text
    assert "which model (required; PDMESH_MODEL)" in text


def test_a_secret_may_stand_in_a_file(tmp_path: Path) -> None:
    path = tmp_path / "url"
    path.write_text("redis://:p@h:1/0\n")
    env = {"PDMESH_MODEL": "m", "PDMESH_REDIS_URL_FILE": str(path)}
    assert parse(Settings, [], env, prog="t").redis_url == "redis://:p@h:1/0"
    assert parse(Settings, [], env | {"PDMESH_REDIS_URL": "r"}, prog="t").redis_url == "r"
    assert parse(Settings, ["--redis-url=f"], env, prog="t").redis_url == "f"
    assert parse(Settings, [], {"PDMESH_MODEL": "m", "PDMESH_REDIS_URL_FILE": ""}, prog="t").redis_url == ""
    with pytest.raises(ConfigError, match="--model: is required"):  # no secret
        parse(Settings, [], {"PDMESH_MODEL_FILE": str(path)}, prog="t")
    path.write_bytes(b"\xff")
    with pytest.raises(ConfigError, match=r"PDMESH_REDIS_URL_FILE: .*url: is not UTF-8"):
        parse(Settings, [], env, prog="t")
    path.unlink()
    with pytest.raises(
        ConfigError, match=r"PDMESH_REDIS_URL_FILE: .*url: No such file.*; name a file .* or set PDMESH_REDIS_URL"
    ):
        parse(Settings, [], env, prog="t")


def test_secrets_are_not_shown() -> None:
    config = settings("--model", "m", "--redis-url", "redis://:pass@host")
    assert dump(config)["redis_url"] == "hidden"
    assert dump(config)["engine.max_num_seqs"] == 8
    assert "pass" not in describe(Settings)


def test_describe_is_a_table_of_all_settings() -> None:
    lines = describe(Settings).splitlines()
    assert len(lines) == 2 + 10
    assert r"| `--colour` | `PDMESH_COLOUR` | red\|blue | red |  |" in lines
    assert any(line.startswith("| `--tracing, --no-tracing` |") for line in lines)


def test_bugs_of_the_author_are_type_errors() -> None:
    @dataclass(frozen=True)
    class Clash:
        a: Inner = field(default_factory=Inner, metadata={"flatten": True})
        b: Inner = field(default_factory=Inner, metadata={"flatten": True})

    @dataclass(frozen=True)
    class Unsupported:
        a: dict[str, str] = field(default_factory=dict)

    # Annotations of local classes are looked up in the module.
    with pytest.raises(TypeError, match="both want --max-num-seqs"):
        parse(Clash, [], {}, prog="test")
    with pytest.raises(TypeError, match=r"Unsupported\.a: configuration cannot hold dict"):
        parse(Unsupported, [], {}, prog="test")


inner = st.builds(Inner, st.integers(1, 10**9), st.floats(-1e9, 1.0))
anything = st.builds(
    Settings,
    model=st.text(min_size=1).filter(lambda text: text != "x"),
    engine=inner,
    draft=inner,
    roles=st.lists(st.sampled_from(["prefill", "decode"])).map(tuple),
    colour=st.sampled_from(Colour),
    limit=st.integers(-(10**18), 10**18),  # longer ones are refused
    tracing=st.booleans(),
    redis_url=st.just("x"),
)


@given(anything)
def test_to_env_is_the_inverse_of_load(config: Settings) -> None:
    assert parse(Settings, [], to_env(config), prog="test") == config


@given(st.lists(st.text(max_size=20), max_size=6), st.dictionaries(st.sampled_from(["PDMESH_LIMIT", "PDMESH_ROLES"]), st.text()))
def test_any_input_gives_a_configuration_or_a_config_error(argv: list[str], env: dict[str, str]) -> None:
    try:
        assert isinstance(parse(Settings, ["--model", "m", *argv], env, prog="test"), Settings)
    except ConfigError as error:
        assert "\n" not in str(error).splitlines()[0]
    except SystemExit as exit_:
        assert exit_.code == 0  # -h among the texts


@given(st.sampled_from([int, float, bool, int | None, tuple[int, ...], Colour, Literal["a", "b"]]), st.text())
def test_parse_value_gives_a_value_or_a_value_error(type_: object, text: str) -> None:
    try:
        value = runtime_config.parse_value(type_, text)
    except ValueError as error:
        assert len(str(error)) < 400
    else:
        assert runtime_config.parse_value(type_, runtime_config.format_value(type_, value)) == value


def test_what_no_text_can_say_is_refused() -> None:
    with pytest.raises(ValueError, match="cannot be written"):
        runtime_config.format_value(tuple[str, ...], ("a,b",))


def test_choices_of_a_registry_are_read_when_flags_are() -> None:
    registry = {"plain": 1}

    @dataclass(frozen=True)
    class Chosen:
        kind: str = field(default="plain", metadata={"choices": registry})

    with pytest.raises(ConfigError, match="'fancy' is not known; give one of plain"):
        parse(Chosen, ["--kind=fancy"], {}, prog="test")
    registry["fancy"] = 2
    assert parse(Chosen, ["--kind=fancy"], {}, prog="test").kind == "fancy"
    assert "plain|fancy" in describe(Chosen).replace("\\|", "|")


def test_choices_are_for_text() -> None:
    @dataclass(frozen=True)
    class Wrong:
        count: int = field(default=1, metadata={"choices": ("1",)})

    with pytest.raises(TypeError, match="choices are for text"):
        parse(Wrong, [], {}, prog="test")
