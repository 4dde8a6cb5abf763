"""The "model" of the stub workers: each token is a function of prompt, seed, choice and index, as the real one's draws are."""

from pdmesh.v1 import common_pb2

VOCAB_SIZE = 320
MAX_CONTEXT = 2048
BLOCK_SIZE = 16
LENGTH = common_pb2.FINISH_REASON_LENGTH
UNFINISHED = common_pb2.FINISH_REASON_UNSPECIFIED


def token(request: common_pb2.TokenRequest, choice: int, index: int) -> int:
    """A lower-case letter's byte token (the byte tokenizer's ids are positions in its sorted alphabet: see `letter_ids`)."""
    return LETTERS[(sum(request.prompt_token_ids) + request.sampling.seed + 7 * choice + 3 * index) % len(LETTERS)]


def output(prompt: list[int], seed: int, choice: int, num_tokens: int) -> list[int]:
    """All tokens of a choice."""
    request = common_pb2.TokenRequest(prompt_token_ids=prompt, sampling=common_pb2.SamplingParams(seed=seed))
    return [token(request, choice, index) for index in range(num_tokens)]


def finish_reason(request: common_pb2.TokenRequest, index: int) -> common_pb2.FinishReason.ValueType:
    """LENGTH with the last token."""
    return LENGTH if index + 1 >= request.sampling.max_tokens else UNFINISHED


def text_of(token_ids: list[int]) -> str:
    """What the byte tokenizer decodes them to."""
    return "".join(chr(ord("a") + LETTERS.index(token_id)) for token_id in token_ids)


def logprobs(request: common_pb2.TokenRequest, token_id: int) -> list[common_pb2.Logprobs]:
    """One entry, if asked for."""
    if not request.sampling.HasField("logprobs"):
        return []
    top = [common_pb2.TokenLogprob(token_id=token_id, logprob=-0.5)] * request.sampling.logprobs
    return [common_pb2.Logprobs(chosen=common_pb2.TokenLogprob(token_id=token_id, logprob=-0.5), top=top)]


def start_indexes(request: common_pb2.TokenRequest) -> dict[int, int]:
    """Next index of each choice that has not finished."""
    if not request.emitted:
        return dict.fromkeys(range(request.sampling.n), 0)
    return {choice.index: len(choice.token_ids) for choice in request.emitted if not choice.finish_reason}


LETTERS = list(range(64, 90))
