"""A tiny model with a byte tokenizer and grammars over it, requests for it, and what an engine answers."""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import dataclass, field, replace
from pathlib import Path

from pdmesh.engine.config import EngineConfig
from pdmesh.engine.engine import Engine
from pdmesh.engine.loader.loader import LoadedModel, load_model
from pdmesh.engine.outputs import FinishReason, StepResult, TokenLogprobs
from pdmesh.engine.request import EngineRequest
from pdmesh.engine.speculation.proposer import Proposer
from pdmesh.sampling_params import SamplingParams
from pdmesh.text.grammar import GrammarCompiler
from pdmesh.text.tokenizer import Tokenizer
from tests.support.handed_over import hand_over
from tests.support.mock_engine import FreeRows, open_engine
from tests.support.tiny_models import IM_END, VOCAB_SIZE, make_tiny_model

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "kind": {"enum": ["first", "second"]},
        "sizes": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99}, "minItems": 1, "maxItems": 3},
    },
    "required": ["name", "kind", "sizes"],
    "additionalProperties": False,
}
Answers = dict[tuple[str, int], "Answer"]


@dataclass
class Answer:
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    first_index: int = 0
    num_steps: int = field(default=0, compare=False)  # those that brought it tokens
    num_drafted: int = field(default=0, compare=False)
    num_accepted: int = field(default=0, compare=False)


@dataclass(frozen=True)
class Model:
    config: EngineConfig
    loaded: LoadedModel
    tokenizer: Tokenizer
    grammars: GrammarCompiler

    @classmethod
    def make(cls, folder: Path, backend: str) -> Model:
        make_tiny_model(folder, head_dim=32)
        # With KV in int8 the tiny model's answers are others, in none of which an end token is guessed.
        kv_dtype = "bfloat16" if backend == "native" else "auto"
        config = EngineConfig(model=str(folder), num_blocks=200, num_threads=1, backend=backend, kv_dtype=kv_dtype)
        tokenizer = Tokenizer.load(folder)
        return cls(config, load_model(config), tokenizer, GrammarCompiler(tokenizer.to_json(), VOCAB_SIZE, {IM_END}))

    def engine(self, *proposers: Proposer, **settings: object) -> Engine:
        """With proposers: whatever they guess is verified."""
        engine = open_engine(replace(self.config, **settings), self.loaded, proposers)  # type: ignore[arg-type]
        if engine.speculator is not None:
            engine.speculator.curve = FreeRows((1,), (1.0,))
        return engine

    def request(
        self, name: str, kind: str = "json_schema", source: str = json.dumps(SCHEMA), **sampling: object
    ) -> EngineRequest:
        params = SamplingParams(**{"temperature": 0.9, "max_tokens": 120, "seed": 5, **sampling})  # type: ignore[arg-type]
        prompt = tuple(name.encode() * 9)
        return EngineRequest(name, prompt, params, grammar=self.grammars.compile(kind, source))

    def text(self, answer: Answer) -> str:
        return self.tokenizer.decode(answer.token_ids)


def requests(model: Model) -> list[EngineRequest]:
    """Among requests without a constraint."""
    return [
        model.request("a"),
        model.request("b", temperature=0.0, repetition_penalty=1.2),
        model.request("c", n=3, top_k=20, frequency_penalty=0.3),
        replace(model.request("free", n=2, max_tokens=40), grammar=None),
        model.request("d", "regex", "(abc|abd){2,9}-[0-9]+x"),
        model.request("e", "regex", "forced from the beginning to its end", top_p=0.8),
        model.request("f", max_tokens=17),
    ]


def collect(answers: Answers, result: StepResult) -> None:
    for update in result.updates:
        answer = answers[update.request_id, update.choice]
        if not answer.token_ids:
            answer.first_index = update.index
        assert update.index == answer.first_index + len(answer.token_ids)
        assert answer.finish_reason is None
        answer.token_ids += update.token_ids
        answer.logprobs += update.logprobs
        answer.finish_reason = update.finish_reason
        answer.num_steps += 1
        answer.num_drafted += update.num_drafted
        answer.num_accepted += update.num_accepted


def run(engine: Engine, *asked: EngineRequest) -> Answers:
    answers: Answers = defaultdict(Answer)
    for each in asked:
        assert engine.add(each)
    while (result := engine.step()) is not None:
        collect(answers, result)
    engine.check_integrity()
    return dict(answers)


def run_apart(prefill: Engine, decode: Engine, *asked: EngineRequest) -> Answers:
    """First tokens in one engine, all others in another."""
    answers: Answers = defaultdict(Answer)
    for each in asked:
        answers.update(first := run(prefill, replace(each, prefill_only=True)))
        hand_over(prefill, decode, each, {choice: answer.token_ids[0] for (_, choice), answer in first.items()})
    while (result := decode.step()) is not None:
        collect(answers, result)
    decode.check_integrity()
    return dict(answers)


def tokens(answers: Answers) -> dict[tuple[str, int], tuple[list[int], FinishReason | None]]:
    return {key: (answer.token_ids, answer.finish_reason) for key, answer in answers.items()}
