"""OpenAI's own client on the gateway. Needs the package `openai`."""

import openai

from tests.interop.cases import Case, Outcome, Stopwatch, serve

_PATIENCE_S = 120.0


class _Asking:
    """Keeps its connection."""

    def __init__(self) -> None:
        self._client: openai.OpenAI | None = None

    def __call__(self, address: str, model: str, case: Case) -> Outcome:
        if self._client is None:
            self._client = openai.OpenAI(base_url=f"http://{address}/v1", api_key="none", timeout=_PATIENCE_S, max_retries=0)
        watch = Stopwatch(case)
        stream = self._client.chat.completions.create(
            model=model,
            messages=[{"role": "user", "content": case.content}],
            max_tokens=case.max_tokens,
            seed=case.seed,
            temperature=case.temperature,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"ignore_eos": True},
        )
        text, num_tokens = "", 0
        for chunk in stream:
            piece = "".join(choice.delta.content or "" for choice in chunk.choices)
            if piece:
                watch.piece()
                text += piece
            if chunk.usage:
                num_tokens = chunk.usage.completion_tokens
        return watch.outcome(text, num_tokens)


if __name__ == "__main__":
    serve(_Asking())
