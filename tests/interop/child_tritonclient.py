"""Triton's own client over ModelStreamInfer. Runs in an environment with `tritonclient[grpc]` only."""

import json
import queue
from typing import Any

import numpy as np
import tritonclient.grpc as triton  # type: ignore[import-not-found]

from tests.interop.cases import Case, Outcome, Stopwatch, serve

_PATIENCE_S = 120.0


def _tensor(name: str, text: str) -> triton.InferInput:
    tensor = triton.InferInput(name, [1], "BYTES")
    tensor.set_data_from_numpy(np.array([text.encode()], dtype=object))
    return tensor


class _Asking:
    """Keeps its connection and its stream."""

    def __init__(self) -> None:
        self._responses: queue.Queue[tuple[Any, Exception | None]] = queue.Queue()
        self._client: Any = None

    def __call__(self, address: str, model: str, case: Case) -> Outcome:
        if self._client is None:
            self._client = triton.InferenceServerClient(address)
            self._client.start_stream(lambda result, error: self._responses.put((result, error)))
        sampling = {"max_tokens": case.max_tokens, "seed": case.seed, "temperature": case.temperature, "ignore_eos": True}
        inputs = [
            _tensor("messages", json.dumps([{"role": "user", "content": case.content}])),
            _tensor("sampling_parameters", json.dumps(sampling)),
        ]
        watch = Stopwatch(case)
        self._client.async_stream_infer(model, inputs, enable_empty_final_response=True)
        text, num_tokens = b"", 0
        while True:
            result, error = self._responses.get(timeout=_PATIENCE_S)
            if error is not None:
                raise error
            if result.get_response().parameters["triton_final_response"].bool_param:
                return watch.outcome(text.decode(), num_tokens)
            watch.piece()
            text += result.as_numpy("text_output")[0]
            num_tokens += len(result.as_numpy("output_ids"))

    def close(self) -> None:
        if self._client is not None:
            self._client.stop_stream()
            self._client.close()


if __name__ == "__main__":
    asking = _Asking()
    try:
        serve(asking)
    finally:
        asking.close()
