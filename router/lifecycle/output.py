"""Conversion of tokens to the client's messages: ids at once, text when it is safe, stop strings, logprobs as text, usage."""

import asyncio
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Generic, TypeVar

from pdmesh.runtime.errors import MeshError, ResourceExhausted
from pdmesh.text.detokenizer import ChoiceText
from pdmesh.v1 import common_pb2, mesh_pb2
from router.lifecycle.parsed_text import ParsedText
from router.tokenization.prepared_request import PreparedRequest

# The output tracker accepts each index of a request's output once and in order, however often and from wherever it arrives.
#
# Tokens come from two streams (the first from the prefill worker, the others from the decode worker), and after a loss again from
# another worker. The tracker keeps accepted tokens as history, holds back those ahead of a gap, and counts repeated indexes whose
# token differs.


MAX_EARLY_TOKENS = 4096
"""Tokens of one choice that may wait for a gap to close. A gap lasts for milliseconds; more means a broken worker."""

UNFINISHED = common_pb2.FINISH_REASON_UNSPECIFIED


@dataclass(slots=True)
class TokenChunk:
    """Hold new output of one choice: consecutive tokens from `first_index` on; `logprobs` is empty or one for each token.
    `prompt_logprobs`: of the prompt's tokens but the first, with the first tokens of one choice."""

    choice: int
    first_index: int
    token_ids: list[int]
    logprobs: Sequence[common_pb2.Logprobs] = ()
    finish_reason: common_pb2.FinishReason.ValueType = UNFINISHED
    prompt_logprobs: Sequence[common_pb2.Logprobs] = ()


@dataclass(slots=True)
class _ChoiceOutput:
    token_ids: list[int] = field(default_factory=list)
    finish_reason: common_pb2.FinishReason.ValueType = UNFINISHED
    early: list[TokenChunk] = field(default_factory=list)


class OutputError(Exception):
    """Report output that no worker may send."""


class OutputTracker:
    """Track the output of `num_choices` choices, from what was emitted before (resume). What was emitted stays: repeated tokens
    that differ are counted, as mismatches, or as redrawn where an engine takes part that lacks reproducible tokens."""

    def __init__(self, num_choices: int, emitted: Sequence[common_pb2.EmittedChoice] = ()) -> None:
        self._choices = [_ChoiceOutput() for _ in range(num_choices)]
        self.num_mismatches = self.num_redrawn = 0
        self.may_redraw = False  # a worker takes part whose engine may draw other tokens when it computes a request again
        for choice in emitted:
            self._choices[choice.index] = _ChoiceOutput(list(choice.token_ids), choice.finish_reason)

    @property
    def all_finished(self) -> bool:
        """Return True if every choice has ended."""
        return all(state.finish_reason for state in self._choices)

    @property
    def num_tokens(self) -> int:
        """Return the number of accepted tokens of all choices, history included."""
        return sum(len(state.token_ids) for state in self._choices)

    @property
    def anything_emitted(self) -> bool:
        """Return True if there is any history."""
        return any(state.token_ids or state.finish_reason for state in self._choices)

    @property
    def finish_reasons(self) -> tuple[common_pb2.FinishReason.ValueType, ...]:
        """Return the finish reason of each choice; unspecified: it goes on."""
        return tuple(state.finish_reason for state in self._choices)

    @property
    def has_gap(self) -> bool:
        """Return True if some choice has tokens that wait for an earlier one."""
        return any(state.early for state in self._choices)

    def next_index(self, choice: int) -> int:
        """Return the output index that is needed next."""
        return len(self._choices[choice].token_ids)

    def is_finished(self, choice: int) -> bool:
        """Return True if this choice has ended."""
        return bool(self._choices[choice].finish_reason)

    def history(self) -> list[common_pb2.EmittedChoice]:
        """Return the output that the next attempt is forced to: empty, or one entry for each choice."""
        if not self.anything_emitted:
            return []
        return [
            common_pb2.EmittedChoice(index=index, token_ids=state.token_ids, finish_reason=state.finish_reason)
            for index, state in enumerate(self._choices)
        ]

    def accept(self, chunk: TokenChunk) -> list[TokenChunk]:
        """Return the new part of `chunk`, and of chunks held back before it, in order. Raises OutputError."""
        if not 0 <= chunk.choice < len(self._choices):
            raise OutputError(f"choice {chunk.choice} does not exist: the request has {len(self._choices)}")
        state = self._choices[chunk.choice]
        if state.finish_reason:
            self._compare(state, chunk)
            return []
        if chunk.first_index > len(state.token_ids):
            self._hold_back(state, chunk)
            return []
        new = self._append(state, chunk)
        return new if not state.early else new + self._release_early(state)

    def stop(self, choice: int, num_tokens: int) -> None:
        """End `choice` after `num_tokens` tokens, where a stop string was found: later ones are dropped and not counted."""
        state = self._choices[choice]
        del state.token_ids[num_tokens:]
        state.early.clear()
        state.finish_reason = common_pb2.FINISH_REASON_STOP

    def drop_early(self) -> None:
        """Drop tokens that wait behind gaps: another attempt repeats them."""
        for state in self._choices:
            state.early.clear()

    def _append(self, state: _ChoiceOutput, chunk: TokenChunk) -> list[TokenChunk]:
        num_known = len(state.token_ids) - chunk.first_index
        if num_known > 0:
            self._compare(state, chunk)
            if num_known > len(chunk.token_ids):
                return []
            logprobs = chunk.logprobs[num_known:]
            chunk = TokenChunk(chunk.choice, len(state.token_ids), chunk.token_ids[num_known:], logprobs, chunk.finish_reason)
        if not chunk.token_ids and not chunk.finish_reason:
            return []
        state.token_ids += chunk.token_ids
        state.finish_reason = chunk.finish_reason
        return [chunk]

    def _compare(self, state: _ChoiceOutput, chunk: TokenChunk) -> None:
        known = state.token_ids[chunk.first_index : chunk.first_index + len(chunk.token_ids)]
        num_others = sum(ours != theirs for ours, theirs in zip(known, chunk.token_ids, strict=False))
        if self.may_redraw:
            self.num_redrawn += num_others
        else:
            self.num_mismatches += num_others

    def _hold_back(self, state: _ChoiceOutput, chunk: TokenChunk) -> None:
        if sum(len(early.token_ids) for early in state.early) + len(chunk.token_ids) > MAX_EARLY_TOKENS:
            raise OutputError(f"index {len(state.token_ids)} of choice {chunk.choice} is missing, later ones keep coming")
        state.early.append(chunk)
        state.early.sort(key=lambda early: early.first_index)

    def _release_early(self, state: _ChoiceOutput) -> list[TokenChunk]:
        released: list[TokenChunk] = []
        while state.early and not state.finish_reason and state.early[0].first_index <= len(state.token_ids):
            released += self._append(state, state.early.pop(0))
        if state.finish_reason:
            state.early.clear()
        return released


class ResumeMismatch(Exception):
    """Report that the history of a resumed stream has tokens after its own end; `choice` says where."""

    def __init__(self, choice: int, message: str) -> None:
        super().__init__(message)
        self.choice = choice


class Output:
    """Render the output of one request for its client. It ends choices at stop strings, and stops them in the tracker, too."""

    def __init__(self, prepared: PreparedRequest, tracker: OutputTracker) -> None:
        self._prepared = prepared
        self._tracker = tracker
        self._tokenizer = prepared.model.tokenizer
        self._ending = prepared.ending_token_ids
        self._parsed = self._parsed_texts(prepared)  # of a chat whose output is more than text
        self._texts: Sequence[ChoiceText] = self._parsed or [
            ChoiceText(self._tokenizer, prepared.stop, self._ending) for _ in range(prepared.num_choices)
        ]
        self._owes_prompt_logprobs = prepared.sampling.HasField("prompt_logprobs")
        self._counts = [0] * prepared.num_choices
        self._finished = [False] * prepared.num_choices
        self._num_unfinished = prepared.num_choices

    def _parsed_texts(self, prepared: PreparedRequest) -> list[ParsedText]:
        output_format, seed = prepared.output_format, prepared.sampling.seed
        if output_format is None:
            return []
        return [
            ParsedText(self._tokenizer, output_format, partial(output_format.call_id, seed, choice), prepared.stop, self._ending)
            for choice in range(prepared.num_choices)
        ]

    @property
    def done(self) -> bool:
        """Return True if every choice has had its last delta."""
        return not self._num_unfinished

    @property
    def num_tokens(self) -> int:
        """Return the number of tokens of all choices, history included, without those after a stop string."""
        return sum(self._counts)

    @property
    def num_reasoning_tokens(self) -> int:
        """Return the number of those with which the model thought."""
        return sum(text.num_reasoning_tokens for text in self._parsed)

    def replay(self, emitted: Sequence[common_pb2.EmittedChoice]) -> list[mesh_pb2.GenerateResponse]:
        """Take in the history of a resumed stream. Return messages only for choices whose end the client was not sent.

        Raises ResumeMismatch.
        """
        deltas = [self._replay_choice(choice) for choice in emitted]
        return [mesh_pb2.GenerateResponse(delta=delta) for delta in deltas if delta is not None]

    def render(self, chunk: TokenChunk) -> mesh_pb2.GenerateResponse | None:
        """Return the message with the delta of `chunk`; None when its choice has ended already. Per-token path."""
        choice = chunk.choice
        if self._finished[choice]:
            return None
        token_ids = chunk.token_ids
        text, num_pushed, matched = self._push(choice, token_ids)
        response = mesh_pb2.GenerateResponse()
        delta = response.delta
        delta.first_index, delta.text = chunk.first_index, text
        if choice:  # 0 is the default
            delta.choice = choice
        delta.token_ids.extend(token_ids if num_pushed == len(token_ids) else token_ids[:num_pushed])
        self._counts[choice] += num_pushed
        if matched is not None:
            self._end_by_string(delta, matched)
        elif chunk.finish_reason:
            self._end(delta, chunk.finish_reason, chunk.token_ids[-1] if chunk.token_ids else None)
        if chunk.logprobs:
            delta.logprobs.extend(self._with_texts(chunk.logprobs[:num_pushed]))
        if self._owes_prompt_logprobs and not chunk.first_index:
            self._add_prompt_logprobs(delta, chunk.prompt_logprobs)
        if self._parsed:
            self._parsed[choice].fill(delta)
        return response

    def _push(self, choice: int, token_ids: Sequence[int]) -> tuple[str, int, str | None]:
        """Return (text, number of tokens taken, stop string that the last of them completed)."""
        push = self._texts[choice].push
        if len(token_ids) == 1:
            piece, matched = push(token_ids[0])
            return piece, 1, matched
        pieces = []
        for number, token_id in enumerate(token_ids, start=1):
            piece, matched = push(token_id)
            pieces.append(piece)
            if matched is not None:
                return "".join(pieces), number, matched
        return "".join(pieces), len(token_ids), None

    def _end(self, delta: mesh_pb2.Delta, reason: common_pb2.FinishReason.ValueType, last: int | None) -> None:
        text = self._texts[delta.choice]
        delta.text += text.finish()
        if text.matched is not None:
            self._end_by_string(delta, text.matched)
            return
        delta.finish_reason = self._told(delta.choice, reason)
        if reason == common_pb2.FINISH_REASON_STOP and last in self._ending and last is not None:
            delta.stop_reason = self._tokenizer.token_text(last)
        self._finish(delta.choice)

    def _end_by_string(self, delta: mesh_pb2.Delta, matched: str) -> None:
        delta.finish_reason = self._told(delta.choice, common_pb2.FINISH_REASON_STOP)
        delta.stop_reason = matched
        self._finish(delta.choice)
        self._tracker.stop(delta.choice, self._counts[delta.choice])

    def _told(self, choice: int, reason: common_pb2.FinishReason.ValueType) -> common_pb2.FinishReason.ValueType:
        """Return the reason as a client is told it."""
        has_called = bool(self._parsed) and self._parsed[choice].has_called
        return common_pb2.FINISH_REASON_TOOL_CALLS if has_called and reason == common_pb2.FINISH_REASON_STOP else reason

    def _finish(self, choice: int) -> None:
        self._num_unfinished -= not self._finished[choice]
        self._finished[choice] = True

    def _add_prompt_logprobs(self, delta: mesh_pb2.Delta, logprobs: Sequence[common_pb2.Logprobs]) -> None:
        """Add those of the prompt to the first delta of the choice that brings them; a prompt of one token has none to bring."""
        prompt = self._prepared.prompt
        if logprobs or len(prompt) == 1:
            first = common_pb2.Logprobs(chosen=common_pb2.TokenLogprob(token_id=prompt[0], logprob=math.nan))
            delta.prompt_logprobs.extend(self._with_texts([first, *logprobs]))
            self._owes_prompt_logprobs = False

    def _with_texts(self, logprobs: Sequence[common_pb2.Logprobs]) -> Sequence[common_pb2.Logprobs]:
        token_text = self._tokenizer.token_text
        for entry in logprobs:
            entry.chosen.text = token_text(entry.chosen.token_id)
            for candidate in entry.top:
                candidate.text = token_text(candidate.token_id)
        return logprobs

    def _replay_choice(self, emitted: common_pb2.EmittedChoice) -> mesh_pb2.Delta | None:
        choice, tokens = emitted.index, emitted.token_ids
        _, num_pushed, matched = self._push(choice, tokens)
        if emitted.finish_reason:
            self._texts[choice].finish()
        if self._parsed:
            self._parsed[choice].fill(mesh_pb2.Delta())  # the client has it
        ends_at = next((number for number, token in enumerate(tokens, start=1) if self._ends(token, number)), None)
        if num_pushed < len(tokens) or (ends_at is not None and ends_at < len(tokens)):
            raise ResumeMismatch(
                choice, f"the output ends at index {min(num_pushed, ends_at or num_pushed) - 1}, yet tokens follow"
            )
        self._counts[choice] = len(tokens)
        if emitted.finish_reason:
            self._finish(choice)
            return None
        return self._replay_end(choice, tokens, matched, ends_at is not None)

    def _replay_end(self, choice: int, tokens: Sequence[int], matched: str | None, by_token: bool) -> mesh_pb2.Delta | None:
        """Return the last delta of a choice whose history is complete without a finish reason; None when it goes on."""
        delta = mesh_pb2.Delta(choice=choice, first_index=len(tokens))
        if matched is not None:
            self._end_by_string(delta, matched)
            return delta
        reason = common_pb2.FINISH_REASON_STOP if by_token else self._length_reason(len(tokens))
        if not reason:
            return None
        self._end(delta, reason, tokens[-1] if tokens else None)
        if self._parsed:
            self._parsed[choice].fill(delta)
        self._tracker.accept(TokenChunk(choice, len(tokens), [], (), reason))
        return delta

    def _ends(self, token_id: int, number: int) -> bool:
        """Return True if `token_id`, the `number`-th of an output, has ended it. Before min_tokens no such token is drawn."""
        return token_id in self._ending and number > self._prepared.sampling.min_tokens

    def _length_reason(self, num_tokens: int) -> common_pb2.FinishReason.ValueType:
        return common_pb2.FINISH_REASON_LENGTH if num_tokens >= self._prepared.sampling.max_tokens else UNFINISHED


class DraftTotals:
    """Count the tokens that workers drafted for one request, over all of its decode sessions.

    Messages hold the totals of a session, and the latest of each session counts: a lost or repeated message changes nothing."""

    def __init__(self) -> None:
        self._totals: dict[tuple[str, int], tuple[int, int]] = {}

    def note(self, session: str, choice: int, num_drafted: int, num_accepted: int) -> None:
        """Set the totals of `choice` since `session` (its id on the wire) began. Per-token path."""
        self._totals[session, choice] = (num_drafted, num_accepted)

    def accepted_in(self, session: str) -> int:
        """Return the accepted tokens of all choices in one session."""
        return sum(accepted for (where, _), (_, accepted) in self._totals.items() if where == session)

    @property
    def num_drafted(self) -> int:
        """Return the number of drafted tokens that were verified."""
        return sum(drafted for drafted, _ in self._totals.values())

    @property
    def num_accepted(self) -> int:
        """Return the number of drafted tokens that the model accepted."""
        return sum(accepted for _, accepted in self._totals.values())


# The client stream buffers between the reader of frames, which never waits, and one client, which may be slow. Tokens bound it.


M = TypeVar("M")


class ClientStream(Generic[M]):
    """Buffer accepted output of one request for its client. It has one producer and one consumer, on one event loop.

    If the consumer waits, the producer renders the message: the reader of a frame does so for all of its requests in a row, and
    each request's task has nothing left to do but to write. Chunks of a choice that pile up for a slow client are merged before
    they are rendered, so it costs fewer messages, not more.
    """

    def __init__(self, max_tokens: int, render: Callable[[TokenChunk], M | None]) -> None:
        """`render` returns the message of a chunk, or None if the client needs none."""
        self._max_tokens = max_tokens
        self._render = render
        self._num_tokens = 0
        self._chunks: list[TokenChunk] = []
        self._error: BaseException | None = None
        self._waiter: asyncio.Future[M | None] | None = None  # the task that waits here takes everything in its next turn

    @property
    def failed(self) -> bool:
        """Return True if an error waits behind the chunks, or was raised already."""
        return self._error is not None

    def put(self, chunk: TokenChunk) -> None:
        """Queue `chunk`, or hand its message to the task that waits. When the client is too far behind, everything is dropped and
        the stream fails. The limit applies to what was queued before: a grammar may force thousands of tokens at once."""
        if self._error is not None:
            return
        waiter = self._waiter
        if waiter is None:
            self._pile_up(chunk)
        elif waiter.done():
            self._queue(chunk)
        else:
            try:
                message = self._render(chunk)
            except Exception as error:  # noqa: BLE001 - the producer serves other requests, too
                self.fail(error)
                return
            if message is not None:
                waiter.set_result(message)

    def fail(self, error: MeshError | BaseException) -> None:
        """End the stream with `error` once what is queued has been taken. The first error stays."""
        if self._error is None:
            self._error = error
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def take(self) -> list[M]:
        """Wait until a chunk is queued; return the messages of everything queued. Raises the error once nothing is left."""
        while not self._chunks:
            if self._error is not None:
                raise self._error
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                message = await self._waiter
            finally:
                self._waiter = None
            if message is not None:
                return [message, *self._rendered()] if self._chunks else [message]
        return self._rendered()

    def _pile_up(self, chunk: TokenChunk) -> None:
        if self._num_tokens >= self._max_tokens:
            self._overflow()
        else:
            self._queue(chunk)

    def _queue(self, chunk: TokenChunk) -> None:
        self._num_tokens += len(chunk.token_ids)
        if not self._merge(chunk):
            self._chunks.append(chunk)

    def _rendered(self) -> list[M]:
        chunks, self._chunks, self._num_tokens = self._chunks, [], 0
        return [message for chunk in chunks if (message := self._render(chunk)) is not None]

    def _merge(self, chunk: TokenChunk) -> bool:
        if not self._chunks:
            return False
        last = self._chunks[-1]
        if last.choice != chunk.choice or last.finish_reason or last.first_index + len(last.token_ids) != chunk.first_index:
            return False
        last.token_ids += chunk.token_ids
        last.logprobs = [*last.logprobs, *chunk.logprobs]
        last.finish_reason = chunk.finish_reason
        return True

    def _overflow(self) -> None:
        self._chunks.clear()
        self.fail(
            ResourceExhausted(
                f"the client reads too slowly: {self._num_tokens} tokens wait for it (max_buffered_tokens); "
                "the request was cancelled, read faster or resume it"
            )
        )
