"""A tokenizer from a model folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from pdmesh.text.chat_template import Message
from pdmesh.text.tokenizer import Tokenizer
from tests.text.samples import byte_fallback_backend, byte_level_backend, make_tokenizer, write_folder

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}{{ '<|im_start|>assistant\n' }}"
)


def test_everything_comes_from_the_folder(tmp_path: Path) -> None:
    folder = write_folder(
        tmp_path,
        byte_level_backend(),
        config={"vocab_size": 512, "max_position_embeddings": 2048, "eos_token_id": 0},
        generation_config={"eos_token_id": [2, 0]},
        tokenizer_config={"eos_token": {"content": "<|im_end|>"}, "chat_template": TEMPLATE, "model_max_length": int(1e30)},
    )
    tokenizer = Tokenizer.load(folder)
    assert (tokenizer.vocab_size, tokenizer.max_context, tokenizer.eos_token_ids) == (512, 2048, frozenset((0, 2)))
    ids = tokenizer.apply_chat_template([Message("user", "the dog")])
    assert ids.count(1) == 2
    assert ids.count(2) == 1
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<|im_start|>user\nthe dog<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.decode(ids) == "user\nthe dog\nassistant\n"


def test_a_bare_tokenizer_json_is_enough(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(write_folder(tmp_path, byte_level_backend()))
    assert (tokenizer.vocab_size, tokenizer.max_context, tokenizer.eos_token_ids) == (401, 0, frozenset())
    assert not tokenizer.has_chat_template
    with pytest.raises(ValueError, match="no chat template"):
        tokenizer.apply_chat_template([Message("user", "x")])


def test_eos_falls_back_to_config_then_to_the_named_token(tmp_path: Path) -> None:
    named = {"eos_token": "<|im_end|>"}
    by_config = write_folder(tmp_path / "a", byte_level_backend(), config={"eos_token_id": 0}, tokenizer_config=named)
    by_name = write_folder(tmp_path / "b", byte_level_backend(), special_tokens_map=named)
    assert Tokenizer.load(by_config).eos_token_ids == {0}
    assert Tokenizer.load(by_name).eos_token_ids == {2}


def test_a_separate_template_file_wins(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, byte_level_backend(), tokenizer_config={"chat_template": "old"})
    (folder / "chat_template.jinja").write_text("the")
    tokenizer = Tokenizer.load(folder)
    assert tokenizer.apply_chat_template([Message("user", "x")]) == tokenizer.encode("the")


def test_language_model_of_a_larger_one(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, byte_level_backend(), config={"text_config": {"vocab_size": 999, "eos_token_id": 1}})
    tokenizer = Tokenizer.load(folder)
    assert (tokenizer.vocab_size, tokenizer.eos_token_ids) == (999, frozenset((1,)))


def test_special_tokens_named_only_in_the_configuration(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, byte_fallback_backend(), tokenizer_config={"eos_token": "世"})
    tokenizer = Tokenizer.load(folder)
    (eos,) = tokenizer.eos_token_ids
    assert tokenizer.decode([eos]) == ""
    assert tokenizer.token_text(eos) == "世"


def test_padding_and_truncation_of_the_file_do_not_apply(tmp_path: Path) -> None:
    backend = byte_level_backend()
    backend.enable_truncation(2)
    backend.enable_padding(length=50)
    ids = Tokenizer.load(write_folder(tmp_path, backend)).encode("x y z !")
    assert 2 < len(ids) < 50


@pytest.mark.parametrize(
    ("name", "content"),
    [("config.json", "{"), ("tokenizer_config.json", "[]"), ("tokenizer.json", "{}"), ("config.json", '{"text_config": 1}')],
)
def test_damaged_files_are_named(tmp_path: Path, name: str, content: str) -> None:
    folder = write_folder(tmp_path, byte_level_backend())
    (folder / name).write_text(content)
    with pytest.raises(ValueError, match=name):
        Tokenizer.load(folder)


def test_a_missing_tokenizer_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"tokenizer\.json is missing.*fetch"):
        Tokenizer.load(tmp_path)


def test_a_gguf_file_instead_of_a_folder_says_what_to_do(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGUF")
    with pytest.raises(ValueError, match="pdmesh models fetch"):
        Tokenizer.load(file)


def test_text_of_single_tokens() -> None:
    tokenizer = make_tokenizer("byte_level")
    start_of_euro = tokenizer.encode("€")[0]
    assert tokenizer.token_text(start_of_euro) == "\ufffd"
    assert tokenizer.token_text(1) == "<|im_start|>"
    assert tokenizer.token_text(10**6) == ""
    assert make_tokenizer("metaspace").token_text(make_tokenizer("metaspace").encode("the")[0]) == " the"


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback"])
@pytest.mark.parametrize("text", ["世界 你好", "ภาษาไทย", "日本語", "👩\u200d👩\u200d👧 and", "naïve �"])
def test_the_bytes_of_single_tokens_join_to_the_text(kind: str, text: str) -> None:
    tokenizer = make_tokenizer(kind)
    ids = tokenizer.encode(text)
    parts = [tokenizer.single_token_bytes(token_id) for token_id in ids]
    assert b"".join(parts).decode().lstrip() == text and all(parts)
    assert any("\ufffd" in tokenizer.token_text(token_id) for token_id in ids)
    assert tokenizer.single_token_bytes(1) == tokenizer.token_text(1).encode()
    assert tokenizer.single_token_bytes(10**6) == b""


def test_half_a_surrogate_pair_is_refused() -> None:
    with pytest.raises(ValueError, match="Unicode"):
        make_tokenizer("byte_level").encode("\ud800")
