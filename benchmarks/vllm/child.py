"""vLLM alone in one process, under its own Python: stock, or as pdmesh composes it. What a mesh answers is compared with it.

    start      python -m benchmarks.vllm.child '{"kind": "stock", "model": …, "dtype": …, "adapters": {NAME: FOLDER}, …}'
    request    {"prompts": [[ids], …], "emitted": [[ids], …], "max_tokens": n, "temperature": t, "seed": s, "together": false,
                "again": false, "adapter": NAME or ""}
    reply      {"answers": [{"token_ids": [ids], "gaps": [by which each token led the next candidate]}, …]}

`emitted`: what an answer begins with, which is computed as a prompt is, as after the loss of a worker. `again`: each prompt was
asked just before, and is found in the prefix cache. A lead is in nats of the model's own distribution; that of a seeded draw is
among the likeliest candidates, with the noise that each got.

Both get the same arguments of vLLM's engine, made of the same settings as a worker's. The end of sequence is ignored.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.peers.child import Options, serve_requests
from pdmesh.adapter_id import AdapterId
from pdmesh.engine.config import EngineConfig
from pdmesh.engine.sampling.counter_rng import gumbel_array
from pdmesh.worker.config import WorkerConfig
from pdmesh.worker.engines.vllm_settings import engine_args, environment

Answers = list[dict[str, Any]]
_NUM_LIKELIEST = 20
"""Of so many tokens the leads are computed: as many as vLLM and pdmesh return."""


def worker_config(options: Options) -> WorkerConfig:
    """Return the settings of a worker that computes the same."""
    engine = EngineConfig(
        model=options["model"],
        dtype=options["dtype"],
        kv_memory_mb=options["kv_memory_mb"],
        num_threads=options["threads"],
        lora=tuple(f"{name}={folder}" for name, folder in options["adapters"].items()),
    )
    return WorkerConfig(engine=engine, engine_name="vllm", vllm_args=tuple(options["vllm_args"]))


class Stock:
    """vLLM's own offline engine."""

    def __init__(self, options: Options) -> None:
        config = worker_config(options)
        os.environ.update(environment(config))
        import vllm

        from pdmesh_vllm.ranks.link import permit_amx

        permit_amx()  # else it is ended by SIGILL in its kernels for quantized weights

        self._llm = vllm.LLM(**{**engine_args(config), "skip_tokenizer_init": True})
        self._adapters = options["adapters"]
        self.about: Options = {"version": vllm.__version__}

    def answer(self, request: Options) -> Answers:
        """Return the answers. No prompt finds what an earlier request left in the prefix cache. Greedy alone continues."""
        self._llm.reset_prefix_cache()
        pairs = zip(request["prompts"], request["emitted"], strict=True)
        prompts = [{"prompt_token_ids": prompt + emitted} for prompt, emitted in pairs]
        groups = [prompts] if request["together"] else [[prompt] for prompt in prompts]
        if request["again"]:
            for group in groups:
                self._asked(group, request)
        return [answer for group in groups for answer in self._asked(group, request)]

    def _asked(self, prompts: Sequence[Any], request: Options) -> Answers:
        from vllm import SamplingParams

        params = SamplingParams(
            temperature=request["temperature"],
            seed=request["seed"],
            max_tokens=request["max_tokens"],
            ignore_eos=True,
            detokenize=False,
            logprobs=_NUM_LIKELIEST,
        )
        outputs = self._llm.generate(prompts, params, use_tqdm=False, lora_request=self._adapter(request["adapter"]))
        return [_of_stock(output.outputs[0]) for output in outputs]

    def _adapter(self, name: str) -> Any:
        from vllm.lora.request import LoRARequest

        return LoRARequest(name, 1 + list(self._adapters).index(name), self._adapters[name]) if name else None


def _of_stock(output: Any) -> dict[str, Any]:
    likeliest = [[(token, each.logprob) for token, each in position.items()] for position in output.logprobs]
    return {"token_ids": list(output.token_ids), "gaps": [lead(each, 0.0, 0, 0) for each in likeliest]}


def lead(likeliest: Sequence[tuple[int, float]], temperature: float, seed: int, index: int) -> float:
    """Return by how much the best of the likeliest tokens leads the next one, in nats of the model's distribution. Pure."""
    scores = np.array([logprob for _, logprob in likeliest])
    if temperature:
        noise = gumbel_array(seed, 0, index, np.array([token for token, _ in likeliest], dtype=np.int64))
        scores = scores + temperature * noise
    first, second = np.sort(scores)[::-1][:2]
    return float(first - second)


class Composed:
    """pdmesh's engine of vLLM, as a worker has it, without the worker."""

    def __init__(self, options: Options) -> None:
        from pdmesh_vllm.engine import load_engine

        self._engine = load_engine(worker_config(options), lambda done, what: None)
        self._adapters = {name: _adapter_id(name, Path(folder)) for name, folder in options["adapters"].items()}
        self._serial = itertools.count(1)
        self.about: Options = {"version": self._engine.facts.numeric_mode}

    def answer(self, request: Options) -> Answers:
        """Return the answers. Each group of prompts has a cache salt of its own."""
        numbers = range(len(request["prompts"]))
        groups = [list(numbers)] if request["together"] else [[number] for number in numbers]
        return [answer for group in groups for answer in self._group(group, request)]

    def _group(self, numbers: Sequence[int], request: Options) -> Answers:
        salt = f"salt-{next(self._serial)}"
        if request["again"]:
            self._asked(numbers, request, salt)
        return self._asked(numbers, request, salt)

    def _asked(self, numbers: Sequence[int], request: Options, salt: str) -> Answers:
        core, found = self._engine.core, dict[str, dict[str, Any]]()
        for number in numbers:
            asked = self._request(number, request, salt)
            if not core.add(asked):
                raise ValueError(f"the engine takes no more than {len(found)} requests: raise max_num_seqs")
            found[asked.request_id] = {"token_ids": [], "gaps": []}
        running = set(found)
        while running:
            result = core.step()
            for update in result.updates if result else ():
                _take(found[update.request_id], update, request)
                running -= {update.request_id} if update.finish_reason else set()
        core.check_integrity()
        return list(found.values())

    def _request(self, number: int, request: Options, salt: str) -> Any:
        from pdmesh.engine.request import EngineRequest
        from pdmesh.sampling_params import SamplingParams

        sampling = SamplingParams(
            temperature=request["temperature"],
            seed=request["seed"],
            max_tokens=request["max_tokens"] + len(request["emitted"][number]),
            ignore_eos=True,
            logprobs=_NUM_LIKELIEST,
        )
        name = f"alone-{next(self._serial)}"
        adapter = self._adapters[request["adapter"]] if request["adapter"] else None
        emitted = (tuple(request["emitted"][number]),) if request["emitted"][number] else ()
        prompt = tuple(request["prompts"][number])
        return EngineRequest(name, prompt, sampling, emitted, cache_root=salt.encode(), adapter=adapter)


def _take(found: dict[str, Any], update: Any, request: Options) -> None:
    found["token_ids"] += update.token_ids
    drawn = enumerate(update.logprobs, start=update.index)
    found["gaps"] += [lead(each.top, request["temperature"], request["seed"], index) for index, each in drawn]


def _adapter_id(name: str, folder: Path) -> AdapterId:
    from pdmesh_vllm.adapters import described

    return described(name, folder)[0]


def load(options: Options) -> tuple[Options, Callable[[Options], Options]]:
    """Load the kind of engine that the options name."""
    kinds: dict[str, Callable[[Options], Stock | Composed]] = {"stock": Stock, "composed": Composed}
    engine = kinds[options["kind"]](options)
    return engine.about, lambda request: {"answers": engine.answer(request)}


if __name__ == "__main__":
    serve_requests(load)
