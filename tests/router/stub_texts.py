"""What stub workers say, as a text, and what they were asked: for tests of chats over HTTP."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from pdmesh.v1 import common_pb2
from tests.router import stub_model
from tests.router.mesh import Mesh, write_model
from tests.support.tiny_models import IM_END

Say = Callable[[Mesh, str], int]


def sayer(monkeypatch: pytest.MonkeyPatch) -> Say:
    """Returns what sets the text of every output, and returns the number of its tokens, at which a stub has to be stopped."""

    def say(mesh: Mesh, text: str) -> int:
        tokens = [*mesh.router.core.models["tiny"].tokenizer.encode(text, add_special_tokens=False), IM_END]

        def finish_reason(request: common_pb2.TokenRequest, index: int) -> common_pb2.FinishReason.ValueType:
            if index + 1 >= len(tokens):
                return common_pb2.FINISH_REASON_STOP
            return stub_model.LENGTH if index + 1 >= request.sampling.max_tokens else stub_model.UNFINISHED

        monkeypatch.setattr(stub_model, "token", lambda request, choice, index: tokens[min(index, len(tokens) - 1)])
        monkeypatch.setattr(stub_model, "finish_reason", finish_reason)
        return len(tokens)

    return say


def model_with_template(parent: Path, template: str) -> Path:
    """Writes a model whose chat template is this one."""
    folder = write_model(parent)
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": template}))
    return folder


def prompt_of(mesh: Mesh) -> str:
    """What the latest request was rendered to."""
    submit = mesh["d0"].submits[-1].request
    return mesh.router.core.models["tiny"].tokenizer.decode(submit.prompt_token_ids, skip_special_tokens=False)
