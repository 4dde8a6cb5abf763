"""Broken and foreign folders: each is refused in one line that names the file, the key or the tensor, before weights are read
where headers show it, and by no other exception than ValueError or OSError, which a worker's entry prints without a traceback."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from pdmesh.engine.config import EngineConfig
from pdmesh.engine.loader import headers
from pdmesh.engine.loader.loader import load_model
from pdmesh.text.tokenizer import Tokenizer
from tests.support.tiny_models import make_tiny_model

Change = Callable[[Path], object]
WEIGHTS, CONFIG, INDEX = "model.safetensors", "config.json", "model.safetensors.index.json"
DOWN, NORM = "model.layers.1.mlp.down_proj.weight", "model.norm.weight"


def key(**changes: Any) -> Change:
    """Keys of config.json that differ; ... takes one away."""

    def change(folder: Path) -> None:
        content = {**json.loads((folder / CONFIG).read_text()), **changes}
        (folder / CONFIG).write_text(json.dumps({name: value for name, value in content.items() if value is not ...}))

    return change


def text(name: str, content: str | bytes) -> Change:
    """The content of a file."""
    return lambda folder: (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())


def cut(name: str, size: int) -> Change:
    """Only the first bytes of a file; negative: all but so many."""
    return lambda folder: (folder / name).write_bytes((folder / name).read_bytes()[:size])


def in_place(name: str) -> Change:
    """A folder where the file was."""

    def change(folder: Path) -> None:
        (folder / name).unlink()
        (folder / name).mkdir()

    return change


def gone(name: str) -> Change:
    return lambda folder: (folder / name).unlink()


def tensors(edit: Callable[[dict[str, torch.Tensor]], object]) -> Change:
    """Other tensors."""

    def change(folder: Path) -> None:
        content = load_file(folder / WEIGHTS)
        edit(content)
        save_file(content, folder / WEIGHTS)

    return change


def tensor(name: str, make: Callable[[torch.Tensor], torch.Tensor]) -> Change:
    return tensors(lambda content: content.update({name: make(content[name]).contiguous()}))


def dtype(kind: torch.dtype) -> Change:
    return tensor(DOWN, lambda weight: (weight * 10).to(kind))


def sharded(index: object, *, keep: bool = False) -> Change:
    """An index in place of the single file; `keep`: its shard is there."""

    def change(folder: Path) -> None:
        (folder / WEIGHTS).rename(folder / "model-00001-of-00002.safetensors")
        if not keep:
            (folder / "model-00001-of-00002.safetensors").unlink()
        (folder / INDEX).write_text(index if isinstance(index, str) else json.dumps(index))

    return change


def pickled(folder: Path) -> None:
    (folder / WEIGHTS).unlink()
    torch.save({}, folder / "pytorch_model.bin")


def looped(name: str) -> Change:
    def change(folder: Path) -> None:
        (folder / name).unlink()
        (folder / name).symlink_to(folder / name)

    return change


def nan(name: str, value: float = float("nan")) -> Change:
    def put(weight: torch.Tensor) -> torch.Tensor:
        weight.view(-1)[3] = value
        return weight

    return tensor(name, put)


def header(edit: Callable[[dict[str, Any]], object]) -> Change:
    """Another header of the safetensors file, over the same bytes."""

    def change(folder: Path) -> None:
        content = (folder / WEIGHTS).read_bytes()
        size = int.from_bytes(content[:8], "little")
        table = json.loads(content[8 : 8 + size])
        edit(table)
        written = json.dumps(table).encode()
        (folder / WEIGHTS).write_bytes(len(written).to_bytes(8, "little") + written + content[8 + size :])

    return change


HEADERS: dict[str, tuple[Change, str]] = {
    # config.json
    "no config": (gone(CONFIG), "no config.json; give"),
    "empty config": (text(CONFIG, ""), r"config.json: Expecting value"),
    "config cut off": (cut(CONFIG, 100), r"config.json: .*line"),
    "config is a list": (text(CONFIG, "[1]"), "config.json: it holds no JSON object"),
    "config is binary": (text(CONFIG, b"\xff\xfe\x00"), "config.json: .*(decode|byte)"),
    "config is a folder": (in_place(CONFIG), "no config.json; give"),
    "config loops": (looped(CONFIG), "(no config.json; give|[Ss]ymbolic links)"),
    "no model type": (key(model_type=...), "model_type '' is not supported; this engine runs"),
    "unknown model type": (key(model_type="flux"), "model_type 'flux' is not supported; this engine runs"),
    **{
        f"recurrent {kind}": (key(model_type=kind), f"model_type '{kind}' is not supported: its layers have a recurrent state")
        for kind in ("mamba", "mamba2", "falcon_h1", "jamba", "rwkv", "recurrent_gemma", "zamba2", "qwen3_next", "bamba")
    },
    **{
        f"no {name}": (key(**{name: ...}), f"config.json has no '{name}'")
        for name in ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size", "intermediate_size")
    },
    **{
        f"{name} {value!r}": (key(**{name: value}), f"{name}'?,? .*{'0' if value == 0 else said}")
        for name, value, said in (
            ("hidden_size", 0, ""),
            ("num_hidden_layers", 0, ""),
            ("vocab_size", -5, "not a count"),
            ("num_attention_heads", "4", "not a count"),
            ("num_hidden_layers", 2.5, "not a count"),
            ("rms_norm_eps", "small", "not a number"),
            ("hidden_act", "tangent", "not supported"),
            ("max_position_embeddings", True, "not a count"),
            ("num_hidden_layers", float("inf"), "inf, not a count"),
            ("num_hidden_layers", 10**18, "a model has 10000 layers at most"),
            ("vocab_size", 10**400, "not a count"),
            ("rms_norm_eps", float("nan"), "nan, not a number"),
            ("rms_norm_eps", -1e-5, "must be above 0"),
            ("attention_bias", "False", "neither true nor false"),
            ("tie_word_embeddings", "false", "neither true nor false"),
        )
    },
    "heads that do not divide": (key(num_key_value_heads=3), "num_attention_heads 4 is not a multiple of num_key_value_heads 3"),
    "unknown key": (key(use_flux=True), "use_flux: not read .*--override use_flux=null"),
    "unknown nested key": (
        key(rope_parameters={"rope_type": "default", "rope_theta": 1e4, "swirl": 2}),
        r"rope_parameters.swirl: not read .*--override rope_parameters.swirl=null",
    ),
    "not causal": (key(is_causal=False), "is_causal False is not supported"),
    "unknown rope": (key(rope_parameters={"rope_type": "spiral"}), "rope_type 'spiral' is not supported"),
    "rope without factor": (key(rope_parameters={"rope_type": "yarn", "rope_theta": 1e4}), "'yarn' lack 'factor'"),
    "rope is a number": (key(rope_parameters=3), "rope_parameters is 3, not a mapping"),
    "rope that scales nothing": (key(rope_scaling={"factor": 8.0}), r"rope_scaling.factor 8.0 scales nothing.*give rope_type"),
    "rope below zero": (key(rope_parameters={"rope_type": "default", "rope_theta": -1.0}), "rope_theta is -1.0; it must be"),
    "rope from a text": (
        key(rope_parameters={"rope_type": "yarn", "rope_theta": 1e4, "factor": 2, "original_max_position_embeddings": "few"}),
        "rope_parameters.original_max_position_embeddings is 'few', not a count",
    ),
    "rope of too much": (key(partial_rotary_factor=1.5), "partial_rotary_factor is 1.5; it must be from 0 to 1"),
    "layer kinds": (key(layer_types=["full_attention", "linear_attention"]), "layer_types"),
    "experts on llama": (key(num_local_experts=8), "num_local_experts: not read"),
    "end tokens that are text": (key(eos_token_id="</s>"), "eos_token_id is '</s>', not a token id"),
    "generation config cut off": (text("generation_config.json", "{"), "generation_config.json: "),
    # The files of weights
    "no weights": (gone(WEIGHTS), "neither model.safetensors nor model.safetensors.index.json"),
    "pickles alone": (pickled, r"pytorch_model.bin.*convert"),
    "Meta's pickles alone": (
        lambda folder: (folder / WEIGHTS).rename(folder / "consolidated.00.pth"), r"consolidated.00.pth.*convert",
    ),
    "weights are empty": (text(WEIGHTS, b""), "model.safetensors cannot be read .*get it again"),
    "weights are text": (text(WEIGHTS, "<html>404</html>" * 9), "model.safetensors cannot be read .*get it again"),
    "weights are a pointer": (text(WEIGHTS, "version git-lfs\noid sha256:00\nsize 9\n"), "model.safetensors cannot"),
    "weights cut in the header": (cut(WEIGHTS, 200), "model.safetensors cannot be read .*get it again"),
    "weights cut in the data": (cut(WEIGHTS, -1000), "model.safetensors cannot be read .*get it again"),
    "weights with a huge header": (text(WEIGHTS, b"\xff" * 8 + b"{}"), "model.safetensors cannot be read"),
    "weights loop": (looped(WEIGHTS), "(neither model.safetensors|[Ss]ymbolic links)"),
    "index of absent shards": (
        sharded({"weight_map": {NORM: "model-00001-of-00002.safetensors", DOWN: "model-00002-of-00002.safetensors"}}),
        "shards are missing: model-00001-of-00002.safetensors, model-00002-of-00002.safetensors; download them again",
    ),
    "index without a map": (sharded({"metadata": {}}), "index.json: it has no weight_map"),
    "index cut off": (sharded('{"weight_map": {'), "index.json: "),
    "index with an empty map": (sharded({"weight_map": {}}), "index.json: it has no weight_map"),
    "index out of the folder": (sharded({"weight_map": {NORM: "../../x.safetensors"}}), "index.json.*x.safetensors"),
    "index of a shard that lacks tensors": (
        lambda folder: (
            tensors(lambda content: content.pop(DOWN))(folder),
            sharded({"weight_map": {NORM: "model-00001-of-00002.safetensors"}}, keep=True)(folder),
        )[0],
        f"no tensor '{DOWN}'",
    ),
    # Tensors
    "no norm": (tensors(lambda content: content.pop(NORM)), f"no tensor '{NORM}' in its .*; the checkpoint is incomplete"),
    "no head": (tensors(lambda content: content.pop("lm_head.weight")), "no tensor 'lm_head.weight'"),
    "no layer": (key(num_hidden_layers=3), "no tensor 'model.layers.2"),
    "other names": (
        tensors(lambda content: [content.update({f"x.{name}": content.pop(name)}) for name in list(content)]),
        "no tensor 'model.",
    ),
    "rows missing": (tensor(DOWN, lambda w: w[:-1]), rf"{DOWN}: shape \(63, 128\) in the checkpoint, \(64, 128\) by its config"),
    "transposed": (tensor(DOWN, lambda w: w.t()), rf"{DOWN}: shape \(128, 64\) in the checkpoint, \(64, 128\) by its config"),
    "no rows": (tensor(DOWN, lambda w: w[:0]), rf"{DOWN}: shape \(0, 128\) in the checkpoint"),
    "three dimensions": (tensor(DOWN, lambda w: w[None]), rf"{DOWN}: shape \(1, 64, 128\) in the checkpoint"),
    "a number": (tensor(NORM, lambda w: w[0]), rf"{NORM}: shape \(\) in the checkpoint, \(64,\) by its config"),
    "another vocabulary": (key(vocab_size=400), r"embed_tokens.weight: shape \(320, 64\) .*, \(400, 64\) by its config"),
    "huge vocabulary": (key(vocab_size=10**12), r"embed_tokens.weight: shape \(320, 64\) .*, \(1000000000000, 64\)"),
    "huge width": (key(hidden_size=4 * 10**9), r"shape .* in the checkpoint, .*by its config"),
    **{
        f"stored as {kind}": (dtype(kind), f"{DOWN}.*(I8|U8|I32|I64|F8_E4M3|BOOL|int8|uint8|int32|int64|float8|bool)")
        for kind in (torch.int8, torch.uint8, torch.int32, torch.int64, torch.float8_e4m3fn, torch.bool)
    },
    "a dtype that is none": (header(lambda table: table[NORM].update(dtype="F3")), "model.safetensors cannot be read"),
    "offsets beyond the file": (header(lambda table: table[NORM].update(data_offsets=[0, 1 << 40])), "model.safetensors cannot"),
}  # fmt: skip
"""What headers show."""

NUMBERS: dict[str, tuple[Change, str]] = {
    "NaN in a product": (nan(DOWN), f"{DOWN}: .*NaN"),
    "NaN in a norm": (nan(NORM), f"{NORM}: .*NaN"),
    "infinity in the embeddings": (nan("model.embed_tokens.weight", float("inf")), "model.embed_tokens.weight: .*infinity"),
    "minus infinity in the head": (nan("lm_head.weight", float("-inf")), "lm_head.weight: .*infinity"),
}
"""What only the weights show."""

TOKENIZERS: dict[str, tuple[Change, str]] = {
    "no tokenizer": (gone("tokenizer.json"), "tokenizer.json is missing"),
    "tokenizer cut off": (cut("tokenizer.json", 500), "tokenizer.json cannot be read"),
    "tokenizer is binary": (text("tokenizer.json", b"\xff\xfe"), "tokenizer.json cannot be read"),
    "tokenizer of no model": (text("tokenizer.json", "{}"), "tokenizer.json cannot be read"),
    "settings cut off": (cut("tokenizer_config.json", 20), "tokenizer_config.json is no JSON"),
    "settings are a list": (text("tokenizer_config.json", "[]"), "tokenizer_config.json is no JSON object"),
    "template of numbers": (text("tokenizer_config.json", '{"chat_template": [1, 2]}'), "chat_template is neither"),
    "special tokens cut off": (text("special_tokens_map.json", "{"), "special_tokens_map.json is no JSON"),
    "added tokens without ids": (text("added_tokens.json", '{"a": "b"}'), "added_tokens.json: is no mapping of tokens to ids"),
    "processor's template": (
        lambda folder: (text("tokenizer_config.json", "{}")(folder), text("chat_template.json", "{}")(folder))[0],
        "chat_template.json holds no JSON object with a chat_template",
    ),
}


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("sound"))


@pytest.fixture
def folder(sound: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(sound, tmp_path / "model"))


def test_there_are_enough(folder: Path) -> None:
    assert len(HEADERS) + len(NUMBERS) + len(TOKENIZERS) >= 60
    headers.check_model(folder)
    Tokenizer.load(folder)


def one_line(error: BaseException) -> str:
    line = str(error)
    assert line and len(line.splitlines()) == 1 and len(line) < 1200
    return line


@pytest.mark.parametrize("name", HEADERS)
def test_headers_show_it(folder: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    change, said = HEADERS[name]
    change(folder)
    monkeypatch.setattr("pdmesh.engine.loader.loader.weights_hash", lambda *_: pytest.fail("weights were read"))
    with pytest.raises((ValueError, OSError), match=rf"(?s)^.*{said}") as raised:
        load_model(EngineConfig(model=str(folder), num_blocks=16))
    one_line(raised.value)
    with pytest.raises((ValueError, OSError)):
        headers.check_model(folder)


@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize("backend", ["torch", "native"])
def test_weights_show_it(folder: Path, name: str, backend: str) -> None:
    change, said = NUMBERS[name]
    change(folder)
    with pytest.raises(ValueError, match=said) as raised:
        load_model(EngineConfig(model=str(folder), num_blocks=16, backend=backend))
    assert "get it again" in one_line(raised.value)


@pytest.mark.parametrize("name", TOKENIZERS)
def test_the_tokenizers_files_show_it(folder: Path, name: str) -> None:
    change, said = TOKENIZERS[name]
    change(folder)
    with pytest.raises((ValueError, OSError), match=said) as raised:
        Tokenizer.load(folder)
    one_line(raised.value)


@pytest.mark.parametrize(
    "name",
    ["empty config", "recurrent mamba", "weights cut in the data", "stored as torch.int8", "NaN in a norm", "config loops"],
)
def test_a_workers_entry_says_it_in_one_line(folder: Path, name: str) -> None:
    change, said = {**HEADERS, **NUMBERS}[name]
    change(folder)
    command = [sys.executable, "-m", "pdmesh.worker", "--model", str(folder), "--num-blocks", "16", "--port", "0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=dict(os.environ))
    assert done.returncode and "Traceback" not in done.stderr
    assert len([line for line in done.stderr.splitlines() if re.search(said, line)]) == 1, done.stderr


def test_extra_tensors_are_named_once_and_harmless(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    tensors(lambda content: content.update({f"vision.{i}": torch.zeros(2) for i in range(6)}))(folder)
    load_model(EngineConfig(model=str(folder), num_blocks=16))
    [line] = [record.getMessage() for record in caplog.records if "vision.0" in record.getMessage()]
    assert "nothing uses: vision.0, vision.1, vision.2, vision.3, vision.4 and 1 more" in line
