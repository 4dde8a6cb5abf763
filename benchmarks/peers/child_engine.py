"""Our own engine behind the same protocol as the peers, so that everybody is measured alike."""

from __future__ import annotations

import itertools
import time

from benchmarks.peers.child import Answer, Loaded, Options, Prompts, serve
from pdmesh.engine.config import EngineConfig
from pdmesh.engine.engine import Engine
from pdmesh.engine.kernels.cpu.model import NativeModel
from pdmesh.engine.loader.loader import load_model
from pdmesh.engine.request import EngineRequest
from pdmesh.sampling_params import SamplingParams
from pdmesh.text.block_hash import hash_block


class Runner:
    """Runs prompts through one engine, all at once."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._numbers = itertools.count()

    def generate(self, prompts: Prompts, max_tokens: int) -> Answer:
        started, first_seconds = time.perf_counter(), None
        outputs = self._add(prompts, SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True))
        num_without_token = len(outputs)
        while self._engine.has_work:
            result = self._engine.step()
            for update in result.updates if result else ():
                output = outputs[update.request_id]
                num_without_token -= not output
                output.extend(update.token_ids)
            if first_seconds is None and not num_without_token:
                first_seconds = time.perf_counter() - started
        return Answer(list(outputs.values()), first_seconds)

    def _add(self, prompts: Prompts, sampling: SamplingParams) -> dict[str, list[int]]:
        outputs: dict[str, list[int]] = {}
        for prompt in prompts:
            request = EngineRequest(request_id=f"r{next(self._numbers)}", prompt=tuple(prompt), sampling=sampling)
            if not self._engine.add(request):
                raise ValueError(f"the engine takes no more than {len(outputs)} requests: raise max_num_seqs")
            outputs[request.request_id] = []
        return outputs


def load(options: Options) -> Loaded:
    """`settings` are fields of EngineConfig; without them the engine is as a user gets it."""
    config = EngineConfig(model=options["model"], **options.get("settings", {}))
    loaded = load_model(config)
    engine = Engine(config, hash_block=hash_block, loaded=loaded)
    shape = engine.kv.shape
    about: Options = {"version": engine.numeric_mode, "kv_bytes_per_token": shape.bytes_per_block / shape.block_size}
    if isinstance(loaded.model, NativeModel):
        about["weight_bytes"] = loaded.model.weights.bytes_per_step
    return Loaded(Runner(engine).generate, about)


if __name__ == "__main__":
    serve(load)
