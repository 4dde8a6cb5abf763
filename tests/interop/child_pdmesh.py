"""pdmesh's own client: the reference."""

from pdmesh.client.client import Client, Delta
from tests.interop.cases import Case, Outcome, Stopwatch, serve


class _Asking:
    """Keeps its connection."""

    def __init__(self) -> None:
        self._client: Client | None = None

    def __call__(self, address: str, model: str, case: Case) -> Outcome:
        client = self._client = self._client or Client(address)
        watch = Stopwatch(case)
        text, num_tokens = "", 0
        options = {"max_tokens": case.max_tokens, "seed": case.seed, "temperature": case.temperature, "ignore_eos": True}
        for event in client.chat_stream([("user", case.content)], model=model, timeout=120, **options):  # type: ignore[arg-type]
            if isinstance(event, Delta) and event.token_ids:
                watch.piece()
                num_tokens += len(event.token_ids)
            text += event.text if isinstance(event, Delta) else ""
        return watch.outcome(text, num_tokens)


if __name__ == "__main__":
    serve(_Asking())
