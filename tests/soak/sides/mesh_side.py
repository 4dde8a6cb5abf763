"""pdmesh's own protocol, through its client library."""

from __future__ import annotations

from pdmesh.client.client import AsyncClient, Completed, Delta
from pdmesh.client.stream import AsyncStream
from tests.soak.cases import Case
from tests.soak.sides.base import Answer, new_answer


class MeshSide:
    """Streams of Generate and Chat."""

    name = "pdmesh"

    def __init__(self, router: str) -> None:
        self._client = AsyncClient(router)

    def field_name(self, name: str) -> str:
        return name

    async def ask(self, case: Case, *, timeout_s: float, leave_after: int | None = None) -> Answer:
        answer = new_answer(case)
        async with self._stream(case, timeout_s) as stream:
            async for event in stream:
                if isinstance(event, Delta):
                    _take(answer, event)
                elif isinstance(event, Completed):
                    answer.ended = True
                    if event.num_resumes:
                        raise AssertionError(f"a router was lost {event.num_resumes} times, and none was hurt")
                if leave_after is not None and answer.num_pieces >= leave_after:
                    answer.left = True
                    break
        return answer

    def _stream(self, case: Case, timeout_s: float) -> AsyncStream:
        if case.messages:
            return self._client.chat_stream(case.messages, timeout=timeout_s, **case.options)
        return self._client.generate_stream(list(case.prompt), timeout=timeout_s, **case.options)

    async def close(self) -> None:
        await self._client.close()


def _take(answer: Answer, delta: Delta) -> None:
    choice = answer.choices[delta.choice]
    if delta.token_ids and delta.first_index != len(choice.tokens):
        raise AssertionError(f"index {delta.first_index} of choice {delta.choice} came after {len(choice.tokens)} tokens")
    choice.tokens += delta.token_ids
    choice.text += delta.text
    choice.num_logprobs += len(delta.logprobs)
    if delta.finish_reason is not None:
        choice.finish = delta.finish_reason.value
