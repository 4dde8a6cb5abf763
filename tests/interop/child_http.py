"""A client of OpenAI's HTTP protocol from the standard library, for gateways that speak it: server-sent events."""

import http.client
import json

from tests.interop.cases import Case, Outcome, Stopwatch, serve

_PATIENCE_S = 120.0


class _Asking:
    """Keeps its connection."""

    def __init__(self) -> None:
        self._connection: http.client.HTTPConnection | None = None

    def __call__(self, address: str, model: str, case: Case) -> Outcome:
        connection = self._connection = self._connection or http.client.HTTPConnection(address, timeout=_PATIENCE_S)
        body = {
            "model": model,
            "messages": [{"role": "user", "content": case.content}],
            "max_tokens": case.max_tokens,
            "seed": case.seed,
            "temperature": case.temperature,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        watch = Stopwatch(case)
        connection.request("POST", "/v1/chat/completions", json.dumps(body), {"content-type": "application/json"})
        response = connection.getresponse()
        if response.status != 200:
            raise RuntimeError(f"{response.status}: {response.read().decode(errors='replace')}")
        return _read(response, watch)


def _read(response: http.client.HTTPResponse, watch: Stopwatch) -> Outcome:
    text, num_tokens, done = "", 0, False
    for line in response:
        if not line.startswith(b"data: "):
            continue
        data = line[len(b"data: ") :].strip()
        if data == b"[DONE]":
            done = True
            continue
        event = json.loads(data)
        if event.get("usage"):
            num_tokens = event["usage"]["completion_tokens"]
        piece = "".join(choice["delta"].get("content") or "" for choice in event["choices"])
        if piece:
            watch.piece()
            text += piece
    if not done:
        raise RuntimeError("the stream ended without [DONE]")
    return watch.outcome(text, num_tokens)


if __name__ == "__main__":
    serve(_Asking())
