"""vLLM alone in one process, under its own Python: stock, or as pdmesh composes it. What a mesh answers is compared with it.

    start      python -m benchmarks.vllm.child '{"kind": "stock", "model": …, "dtype": …, "adapters": {NAME: FOLDER}, …}'
    request    {"prompts": [[ids], …], "max_tokens": n, "temperature": t, "seed": s, "together": false, "adapter": NAME or ""}
    reply      {"answers": [{"token_ids": [ids], "gaps": [by which the likeliest token's logit exceeds the second's]}, …]}

Both get the same arguments of vLLM's engine, made of the same settings as a worker's. The end of sequence is ignored.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.peers.child import Options, serve_requests
from pdmesh.adapter_id import AdapterId
from pdmesh.engine.config import EngineConfig
from pdmesh.worker.config import WorkerConfig
from pdmesh.worker.engines.vllm_settings import engine_args, environment

Answers = list[dict[str, Any]]
_NUM_LIKELIEST = 2


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

        self._llm = vllm.LLM(**{**engine_args(config), "skip_tokenizer_init": True})
        self._adapters = options["adapters"]
        self.about: Options = {"version": vllm.__version__}

    def answer(self, request: Options) -> Answers:
        """Return the answers. No prompt finds what an earlier request left in the prefix cache."""
        self._llm.reset_prefix_cache()
        prompts = [{"prompt_token_ids": prompt} for prompt in request["prompts"]]
        groups = [prompts] if request["together"] else [[prompt] for prompt in prompts]
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
    likeliest = [sorted((each.logprob for each in position.values()), reverse=True) for position in output.logprobs]
    return {"token_ids": list(output.token_ids), "gaps": [first - second for first, second, *_ in likeliest]}


class Composed:
    """pdmesh's engine of vLLM, as a worker has it, without the worker."""

    def __init__(self, options: Options) -> None:
        from pdmesh_vllm.engine import load_engine

        self._engine = load_engine(worker_config(options), lambda done, what: None)
        self._adapters = {name: _adapter_id(name, Path(folder)) for name, folder in options["adapters"].items()}
        self._serial = itertools.count(1)
        self.about: Options = {"version": self._engine.facts.numeric_mode}

    def answer(self, request: Options) -> Answers:
        """Return the answers. Each request has a cache salt of its own."""
        numbers = range(len(request["prompts"]))
        groups = [list(numbers)] if request["together"] else [[number] for number in numbers]
        return [answer for group in groups for answer in self._asked(group, request)]

    def _asked(self, numbers: Sequence[int], request: Options) -> Answers:
        core, found = self._engine.core, dict[str, dict[str, Any]]()
        for number in numbers:
            asked = self._request(request["prompts"][number], request)
            if not core.add(asked):
                raise ValueError(f"the engine takes no more than {len(found)} requests: raise max_num_seqs")
            found[asked.request_id] = {"token_ids": [], "gaps": []}
        running = set(found)
        while running:
            result = core.step()
            for update in result.updates if result else ():
                _take(found[update.request_id], update)
                running -= {update.request_id} if update.finish_reason else set()
        core.check_integrity()
        return list(found.values())

    def _request(self, prompt: Sequence[int], request: Options) -> Any:
        from pdmesh.engine.request import EngineRequest
        from pdmesh.sampling_params import SamplingParams

        sampling = SamplingParams(
            temperature=request["temperature"],
            seed=request["seed"],
            max_tokens=request["max_tokens"],
            ignore_eos=True,
            logprobs=_NUM_LIKELIEST,
        )
        name = f"alone-{next(self._serial)}"
        adapter = self._adapters[request["adapter"]] if request["adapter"] else None
        return EngineRequest(name, tuple(prompt), sampling, cache_root=name.encode(), adapter=adapter)


def _take(found: dict[str, Any], update: Any) -> None:
    found["token_ids"] += update.token_ids
    found["gaps"] += [each.top[0][1] - each.top[1][1] for each in update.logprobs]


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
