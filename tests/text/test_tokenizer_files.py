"""Tokenizers out of whatever files a folder has, compared with transformers' AutoTokenizer on odd texts."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
from tokenizers import Tokenizer as Backend
from tokenizers import models, pre_tokenizers, trainers
from transformers import AutoTokenizer

from pdmesh.text.chat_template import Message
from pdmesh.text.tokenizer import Tokenizer
from pdmesh.text.tokenizer_files import has_tokenizer
from tests.support.tiny_models import VOCAB_SIZE, write_byte_tokenizer

TEXTS = [
    "", " ", "  two  spaces ", "Hello, world!", "don't WE'LL I'd", "naïve café Ünïcödé", "日本語のテキスト",
    "\t\ttabs\n\nlines\r\n",
    "\U0001f469\u200d\U0001f469\u200d\U0001f467 family \U0001f3f3\ufe0f", "12345 1,234.56 ٣٤٥", "a" * 300, "<unk> <0x41>",
    "x=1;\n    y = [x for x in range(10)]\n", "<tool>call</tool> now", "<img> <img><img>", "mid<think>dle</think>",
    "\u0000\u0001 control", "e\u0301 combining", "<|im_start|>user\nhi<|im_end|>", "</s><s>", "▁ mark", "\ufb01 ligature ½",
    "\ufdfd", "\u200b zero\u200d",
]  # fmt: skip
CORPUS = ["the quick brown fox jumps over the lazy dog 0123456789", "hello world, the tools are hers", "naïve café ünder"] * 40


def config_of(folder: Path, **settings: Any) -> Path:
    """A config.json and a tokenizer_config.json that says `settings`."""
    (folder / "config.json").write_text(json.dumps({"model_type": settings.pop("model_type", "llama"), "vocab_size": VOCAB_SIZE}))
    path = folder / "tokenizer_config.json"
    written = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({**written, **settings}))
    return folder


def assert_same(folder: Path) -> Tokenizer:
    ours, theirs = Tokenizer.load(folder), AutoTokenizer.from_pretrained(str(folder))
    for text in TEXTS:
        ids = ours.encode(text)
        assert ids == theirs.encode(text), text
        for skip in (True, False):
            assert ours.decode(ids, skip_special_tokens=skip) == theirs.decode(ids, skip_special_tokens=skip), (text, skip)
    return ours


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_byte_tokenizer(tmp_path)
    return config_of(tmp_path)


def token(content: str, **flags: bool) -> dict[str, object]:
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": False}
    return {"content": content, **plain, **flags}


def specials() -> dict[str, dict[str, object]]:
    """What tokenizer.json has, as tokenizer_config.json repeats it."""
    return {str(256 + i): token(t, special=True) for i, t in enumerate(("<|endoftext|>", "<|im_start|>", "<|im_end|>"))}


def test_added_tokens_decoder_gives_single_ids(folder: Path) -> None:
    added = {**specials(), "259": token("<tool>"), "260": token("</tool>"), "261": token("<img>", lstrip=True, rstrip=True)}
    ours = assert_same(config_of(folder, added_tokens_decoder={**added, "262": token("<think>", special=True)}))
    assert ours.encode("<tool>x</tool>") == [259, ours.encode("x")[0], 260]
    assert ours.decode(ours.encode("<think><tool>")) == "<tool>"


def test_added_tokens_json(folder: Path) -> None:
    (folder / "added_tokens.json").write_text(json.dumps({"</tool>": 260, "<tool>": 259}))
    ours = assert_same(folder)
    assert ours.encode("<tool></tool>") == [259, 260]


@pytest.mark.parametrize("key", ["additional_special_tokens", "extra_special_tokens"])
@pytest.mark.parametrize("as_tables", [False, True])
def test_tokens_that_are_special_elsewhere_are_hidden(folder: Path, key: str, as_tables: bool) -> None:
    path = folder / "tokenizer.json"
    content = json.loads(path.read_text())
    content["added_tokens"] += [{"id": 259 + i, **token(text)} for i, text in enumerate(("<tool>", "</tool>"))]
    path.write_text(json.dumps(content))
    assert Tokenizer.load(folder).decode([259, 65]).startswith("<tool>")
    listed = [{"__type": "AddedToken", **token("<tool>", special=True)}, "</tool>"] if as_tables else ["<tool>", "</tool>"]
    ours = Tokenizer.load(config_of(folder, **{key: listed}))
    # Of transformers' classes those hide them that build their own tokenizer; all list them as special.
    theirs = AutoTokenizer.from_pretrained(str(config_of(folder, tokenizer_class="Qwen2Tokenizer")))
    assert set(theirs.all_special_tokens) >= {"<tool>", "</tool>"}
    ids = ours.encode("<tool>call</tool> now")
    for skip in (True, False):
        assert ours.decode(ids, skip_special_tokens=skip) == theirs.decode(ids, skip_special_tokens=skip)
    assert ours.decode([259, 260]) == ""
    assert ours.piece(259) is None


def test_named_tokens_of_a_models_own_are_special_and_known_to_templates(folder: Path) -> None:
    template = "{{ image_token }}{% for m in messages %}{{ audio_token }}{{ m.content }}{% endfor %}{{ bos_token }}"
    ours = assert_same(
        config_of(folder, extra_special_tokens={"image_token": "<img>"}, audio_token="<tool>", chat_template=template)
    )
    theirs = AutoTokenizer.from_pretrained(str(folder))
    dialogue = [Message("user", "hello")]
    expected = theirs.apply_chat_template([{"role": "user", "content": "hello"}], tokenize=False)
    assert ours.render_chat(dialogue) == expected == "<img><tool>hello<|im_start|>"


def test_a_token_beyond_the_models_vocabulary_stays_text(folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": 259}))
    ours = Tokenizer.load(config_of(folder, pad_token="[PAD]", vocab_size=259))
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": 259}))
    assert max(Tokenizer.load(folder).encode("[PAD]")) < 259
    assert ours.vocab_size == VOCAB_SIZE


@pytest.mark.parametrize(
    ("files", "declared", "rendered"),
    [
        ({}, [{"name": "default", "template": "D"}, {"name": "rag", "template": "R"}], "D"),
        ({"chat_template.jinja": "J"}, "C", "J"),
        ({"chat_template.jinja": "J", "additional_chat_templates/rag.jinja": "R"}, "C", "J"),
        ({"chat_template.json": json.dumps({"chat_template": "P"})}, None, "P"),
        ({"chat_template.json": json.dumps({"chat_template": "P"})}, "C", "C"),
    ],
)
def test_which_template(folder: Path, files: dict[str, str], declared: object, rendered: str) -> None:
    for name, text in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    config_of(folder, chat_template=declared)
    assert Tokenizer.load(folder).render_chat([Message("user", "x")]) == rendered
    if rendered != "P":  # of processors alone, which transformers reads elsewhere
        theirs = AutoTokenizer.from_pretrained(str(folder))
        assert theirs.apply_chat_template([{"role": "user", "content": "x"}], tokenize=False) == rendered


def test_named_templates_without_a_default_load_and_say_so_when_they_are_asked_for(folder: Path) -> None:
    ours = Tokenizer.load(config_of(folder, chat_template=[{"name": n, "template": n} for n in ("tool_use", "rag")]))
    assert not ours.has_chat_template and ours.encode("x")
    with pytest.raises(ValueError, match="it has the chat templates rag, tool_use and none named default"):
        ours.render_chat([Message("user", "x")])


@pytest.fixture(scope="session")
def sentencepiece_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("spm")
    (folder / "corpus.txt").write_text("\n".join(CORPUS))
    sentencepiece.SentencePieceTrainer.train(
        input=str(folder / "corpus.txt"), model_prefix=str(folder / "tokenizer"), vocab_size=320, model_type="bpe",
        byte_fallback=True, normalization_rule_name="identity", remove_extra_whitespaces=False, character_coverage=0.9995,
        user_defined_symbols=["<tool>"], minloglevel=2,
    )  # fmt: skip
    return folder / "tokenizer.model"


@pytest.mark.parametrize("legacy", [True, False])
@pytest.mark.parametrize("settings", [{}, {"add_bos_token": True}, {"add_eos_token": True}, {"add_prefix_space": False}])
def test_a_sentencepiece_model_alone(sentencepiece_model: Path, tmp_path: Path, settings: dict[str, Any], legacy: bool) -> None:
    shutil.copy(sentencepiece_model, tmp_path)
    named = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "tokenizer_class": "LlamaTokenizer", "legacy": legacy}
    config_of(tmp_path, **named, **settings)
    assert has_tokenizer(tmp_path)
    ours = assert_same(tmp_path)
    processor = sentencepiece.SentencePieceProcessor(model_file=str(sentencepiece_model))
    if "add_prefix_space" not in settings:
        for text in TEXTS[3:6]:
            assert ours.encode(text, add_special_tokens=False) == processor.encode(text)


def test_sentencepiece_models_that_are_not_converted_say_how(tmp_path: Path) -> None:
    (tmp_path / "corpus.txt").write_text("\n".join(CORPUS))
    for kind, problem in (("unigram", "is no BPE"), ("bpe", "normalizes texts")):
        sentencepiece.SentencePieceTrainer.train(
            input=str(tmp_path / "corpus.txt"),
            model_prefix=str(tmp_path / "tokenizer"),
            vocab_size=45,
            model_type=kind,
            minloglevel=2,
        )
        with pytest.raises(ValueError, match=f"tokenizer.model: .*{problem}.*save_pretrained"):
            Tokenizer.load(config_of(tmp_path))
    whole = (tmp_path / "tokenizer.model").read_bytes()
    for damaged in (whole[:100], b"\xff" * 64, b"", b"not a model"):
        (tmp_path / "tokenizer.model").write_bytes(damaged)
        with pytest.raises(ValueError, match=r"tokenizer.model.* is no (SentencePiece model|BPE)"):
            Tokenizer.load(tmp_path)


@pytest.mark.parametrize(
    ("kind", "end"),
    [("GPT2Tokenizer", "<|endoftext|>"), ("Qwen2Tokenizer", "<|endoftext|>"), ("Qwen2TokenizerFast", "<|im_end|>")],
)
def test_vocabulary_and_merges_alone(tmp_path: Path, kind: str, end: str) -> None:
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    names = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=310, special_tokens=names, initial_alphabet=alphabet))
    backend.model.save(str(tmp_path))
    config_of(tmp_path, tokenizer_class=kind, eos_token=end, unk_token="<|endoftext|>", pad_token=end, bos_token=None)
    assert_same(tmp_path)
    assert_same(config_of(tmp_path, added_tokens_decoder={str(i): token(name, special=True) for i, name in enumerate(names)}))


def test_vocabularies_that_are_not_known_say_how(tmp_path: Path) -> None:
    (tmp_path / "vocab.json").write_text("{}")
    (tmp_path / "merges.txt").write_text("")
    with pytest.raises(ValueError, match=r"tokenizer_class 'RobertaTokenizer' cuts a text is not known .*save_pretrained"):
        Tokenizer.load(config_of(tmp_path, tokenizer_class="RobertaTokenizer"))
    (tmp_path / "vocab.json").write_text('{"a": 0, "b": 5}')
    with pytest.raises(ValueError, match="is no vocabulary of ids from 0 on"):
        Tokenizer.load(config_of(tmp_path, tokenizer_class="GPT2Tokenizer"))


@pytest.mark.parametrize("value", [[], {"x": {"content": "a"}}, {"1": "a"}, {"1": {"special": True}}])
def test_added_tokens_that_are_none(folder: Path, value: object) -> None:
    with pytest.raises(ValueError, match="added_tokens_decoder is no mapping of ids to tokens"):
        Tokenizer.load(config_of(folder, added_tokens_decoder=value))


def test_a_folder_without_any(tmp_path: Path) -> None:
    assert not has_tokenizer(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"tokenizer.json is missing.*or tokenizer.model, or vocab.json with merges.txt"):
        Tokenizer.load(tmp_path)
