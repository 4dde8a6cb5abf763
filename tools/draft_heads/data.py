"""The model's own outputs, each token with the hidden state that it was drawn from: what draft heads learn from."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from pdmesh.distillation.prompts import requests
from pdmesh.engine.config import EngineConfig
from pdmesh.engine.engine import Engine
from pdmesh.engine.kv_cache.events import LayerReadiness
from pdmesh.engine.loader.loader import LoadedModel
from pdmesh.engine.request import EngineRequest
from pdmesh.engine.runner.batch import StepBatch
from pdmesh.sampling_params import SamplingParams
from pdmesh.text.block_hash import hash_block
from pdmesh.text.tokenizer import Tokenizer

_TEMPERATURES, _HELD_OUT_TEMPERATURES = (0.0, 0.7, 0.0, 0.8, 0.9, 1.0), (0.0, 0.8)
_INDEX, _STATES = "outputs.safetensors", "states.f16"
_BLOCK = 16


@dataclass(frozen=True)
class Outputs:
    """Outputs one after the other: number i has the tokens `starts[i]` to `starts[i + 1]`."""

    tokens: Tensor  # [N] int64
    states: Tensor  # [N, H] float16: of the hidden state that the token was drawn from, what heads begin with
    starts: Tensor  # [n + 1] int64
    temperatures: Tensor  # [n] float32, 0: greedy
    seeds: Tensor  # [n] int64

    def __len__(self) -> int:
        return len(self.temperatures)

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @staticmethod
    def load(folder: Path) -> Outputs:
        """What `generate` left there; the states are mapped, not read."""
        index = load_file(folder / _INDEX)
        tokens = index["tokens"]
        states = np.memmap(folder / _STATES, np.float16, "c").reshape(len(tokens), -1)
        return Outputs(tokens, torch.from_numpy(states), index["starts"], index["temperatures"], index["seeds"])

    @staticmethod
    def are_in(folder: Path) -> bool:
        return (folder / _INDEX).is_file()


@dataclass(frozen=True)
class Plan:
    """How much to generate: whatever ends first. `parallel` sequences at a time, each of at most `max_tokens`."""

    seed: int
    minutes: float
    most_tokens: int
    parallel: int = 64
    max_tokens: int = 256
    max_prompt: int = 768
    held_out: bool = False


@dataclass
class _Open:
    """An output that grows."""

    temperature: float
    seed: int
    tokens: list[int] = field(default_factory=list)
    states: list[Tensor] = field(default_factory=list)


class Recorder:
    """Keeps the hidden states of each step of a loaded model, which is the caller's alone."""

    def __init__(self, loaded: LoadedModel) -> None:
        self.hidden = torch.empty(0)
        self._size, self._forward = loaded.config.hidden_size, loaded.model.forward
        loaded.model.forward = self.forward  # type: ignore[method-assign]

    def forward(self, batch: StepBatch, kv: Tensor, signal: LayerReadiness | None = None, hidden: Tensor | None = None) -> Tensor:
        self.hidden = torch.empty((len(batch.logits_rows), self._size)) if hidden is None else hidden
        return self._forward(batch, kv, signal, self.hidden)


def generate(
    loaded: LoadedModel, model: Path, plan: Plan, folder: Path, begin: Callable[[Tensor], Tensor], say: Callable[[str], None]
) -> Outputs:
    """Writes outputs of the model to `folder`. `begin`: hidden states [n, H] -> what heads begin with (HeadMaths.begin)."""
    folder.mkdir(parents=True, exist_ok=True)
    per_sequence = -(-(plan.max_prompt + plan.max_tokens) // _BLOCK)
    config = EngineConfig(
        str(model),
        block_size=_BLOCK,
        num_blocks=plan.parallel * per_sequence,
        max_num_seqs=plan.parallel,
        prefix_caching=False,
        speculation="none",  # each step is to show one hidden state of every sequence
    )
    recorder = Recorder(loaded)
    engine = Engine(config, hash_block=hash_block, loaded=loaded)
    wanted = _requests(Tokenizer.load(model), plan)
    started, done, is_open = time.monotonic(), [], {}  # type: float, list[_Open], dict[str, _Open]
    num_tokens, said = 0, started
    with (folder / _STATES).open("wb") as file:
        while time.monotonic() - started < plan.minutes * 60 and num_tokens < plan.most_tokens:
            while len(is_open) < plan.parallel:
                request, output = next(wanted)
                engine.add(request)
                is_open[request.request_id] = output
            result = engine.step()
            assert result is not None, "there is room for all of them"
            num_tokens += len(result.updates)
            for row, update in enumerate(result.updates):
                output = is_open[update.request_id]
                output.tokens += update.token_ids
                output.states.append(recorder.hidden[row])
                if update.finish_reason is not None:
                    done.append(_close(is_open.pop(update.request_id), begin, file))
            if time.monotonic() - said > 30:
                said = time.monotonic()
                say(f"{num_tokens} tokens, {num_tokens / (said - started):.0f}/s")
        done += [_close(output, begin, file) for output in is_open.values() if output.tokens]
    say(f"{num_tokens} tokens of {len(done)} outputs in {time.monotonic() - started:.0f} s")
    _save(done, folder / _INDEX)
    return Outputs.load(folder)


def _close(output: _Open, begin: Callable[[Tensor], Tensor], file: BinaryIO) -> _Open:
    states = begin(torch.stack(output.states)).float().half()
    states.numpy().tofile(file)
    output.states.clear()
    return output


def _save(outputs: list[_Open], path: Path) -> None:
    tensors = {
        "tokens": torch.tensor([token for output in outputs for token in output.tokens]),
        "starts": torch.tensor([0, *itertools.accumulate(len(output.tokens) for output in outputs)]),
        "temperatures": torch.tensor([output.temperature for output in outputs]),
        "seeds": torch.tensor([output.seed for output in outputs]),
    }
    save_file(tensors, path)


def _requests(tokenizer: Tokenizer, plan: Plan) -> Iterator[tuple[EngineRequest, _Open]]:
    temperatures = itertools.cycle(_HELD_OUT_TEMPERATURES if plan.held_out else _TEMPERATURES)
    for number, request in enumerate(requests(plan.seed, held_out=plan.held_out)):
        is_text = isinstance(request, str) or not tokenizer.has_chat_template
        ids = tokenizer.encode(_as_text(request)) if is_text else tokenizer.apply_chat_template(request)  # type: ignore[arg-type]
        temperature, seed = next(temperatures), plan.seed * 1_000_003 + number
        sampling = SamplingParams(temperature=temperature, seed=seed, max_tokens=plan.max_tokens)
        yield EngineRequest(str(number), tuple(ids[-plan.max_prompt :]), sampling), _Open(temperature, seed)


def _as_text(request: object) -> str:
    return request if isinstance(request, str) else "\n\n".join(turn.content for turn in request)  # type: ignore[attr-defined]
