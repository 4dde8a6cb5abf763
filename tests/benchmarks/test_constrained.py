"""The schemas of `make bench-constrained` are schemas, differ, and can be followed."""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema

from benchmarks.constrained import FREE_TEXT, prompt, schema
from pdmesh.text.grammar import GrammarCompiler
from pdmesh.text.tokenizer import Tokenizer
from tests.support.tiny_models import IM_END, VOCAB_SIZE, write_byte_tokenizer


def test_schemas(tmp_path: Path) -> None:
    write_byte_tokenizer(tmp_path)
    compiler = GrammarCompiler(Tokenizer.load(tmp_path).to_json(), VOCAB_SIZE, {IM_END})
    texts = [json.dumps(schema(number)) for number in range(500)]
    assert len(set(texts)) >= 490
    for text in texts[::5]:
        jsonschema.Draft202012Validator.check_schema(json.loads(text))
        compiler.compile("json_schema", text)
    assert texts[3] == json.dumps(schema(3))
    assert len({prompt(number) for number in range(500)}) == 500
    assert compiler.compile("regex", FREE_TEXT).matcher().forced is None
