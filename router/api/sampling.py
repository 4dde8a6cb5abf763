"""Sampling parameters of a client: checked, completed, and split into what workers get and what stays here (stop strings)."""

import math
from dataclasses import dataclass

from pdmesh.v1 import common_pb2
from router.api.validation import MAX_CHOICES, check_tokens, refuse

MAX_TEMPERATURE = 100.0
MIN_TEMPERATURE = 1e-4
MAX_REPETITION_PENALTY = 100.0
MIN_REPETITION_PENALTY = 0.01
MAX_STOP_STRINGS = 16
MAX_STOP_CHARS = 1000
MAX_STOP_TOKENS = 256
MAX_LOGPROBS = 20

_NUMBERS = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")


@dataclass(frozen=True)
class Limits:
    """What the model allows. `room`: tokens of context that the prompt leaves, at least 1."""

    vocab_size: int
    eos_token_ids: frozenset[int]
    room: int


def complete(sampling: common_pb2.SamplingParams, limits: Limits) -> common_pb2.SamplingParams:
    """A checked copy with n and max_tokens set and without stop strings; seed as it was. Raises InvalidArgument."""
    _check_numbers(sampling)
    _check_lengths(sampling, limits)
    _check_stops(sampling, limits)
    checked = common_pb2.SamplingParams()
    checked.CopyFrom(sampling)
    checked.ClearField("stop")
    checked.n = sampling.n or 1
    checked.max_tokens = sampling.max_tokens if sampling.HasField("max_tokens") else limits.room
    return checked


def _check_numbers(sampling: common_pb2.SamplingParams) -> None:
    for name in _NUMBERS:
        if not math.isfinite(getattr(sampling, name)):
            refuse(f"sampling.{name}", f"{getattr(sampling, name)} is not a finite number")
    _check_temperature(sampling.temperature)
    if sampling.HasField("top_p") and not 0 < sampling.top_p <= 1:
        refuse("sampling.top_p", f"{sampling.top_p} is not in (0, 1]")
    if not 0 <= sampling.min_p <= 1:
        refuse("sampling.min_p", f"{sampling.min_p} is not in [0, 1]")
    penalty = sampling.repetition_penalty
    if sampling.HasField("repetition_penalty") and not MIN_REPETITION_PENALTY <= penalty <= MAX_REPETITION_PENALTY:
        refuse(
            "sampling.repetition_penalty",
            f"{penalty} is not in [{MIN_REPETITION_PENALTY}, {MAX_REPETITION_PENALTY:.0f}]; 1 is none",
        )
    for name in ("presence_penalty", "frequency_penalty"):
        if not -2 <= getattr(sampling, name) <= 2:
            refuse(f"sampling.{name}", f"{getattr(sampling, name)} is not in [-2, 2]")


def _check_temperature(temperature: float) -> None:
    """Between zero and MIN_TEMPERATURE the quotient of logits leaves float32; 0 says greedy, and means it."""
    if temperature and not MIN_TEMPERATURE <= temperature <= MAX_TEMPERATURE:
        refuse("sampling.temperature", f"{temperature} is neither 0 (greedy) nor in [{MIN_TEMPERATURE}, {MAX_TEMPERATURE:.0f}]")


def _check_lengths(sampling: common_pb2.SamplingParams, limits: Limits) -> None:
    max_tokens = sampling.max_tokens if sampling.HasField("max_tokens") else limits.room
    if max_tokens < 1:
        refuse("sampling.max_tokens", "must be at least 1; leave it out for what is left of the context")
    if max_tokens > limits.room:
        refuse("sampling.max_tokens", f"{max_tokens} is more than the {limits.room} tokens that the prompt leaves of the context")
    if sampling.min_tokens > max_tokens:
        refuse("sampling.min_tokens", f"{sampling.min_tokens} is more than max_tokens, {max_tokens}")
    if sampling.n > MAX_CHOICES:
        refuse("sampling.n", f"{sampling.n} is more than {MAX_CHOICES}")
    if sampling.logprobs > MAX_LOGPROBS:
        refuse("sampling.logprobs", f"{sampling.logprobs} is more than {MAX_LOGPROBS}")


def _check_stops(sampling: common_pb2.SamplingParams, limits: Limits) -> None:
    if len(sampling.stop) > MAX_STOP_STRINGS:
        refuse("sampling.stop", f"{len(sampling.stop)} strings are more than {MAX_STOP_STRINGS}")
    for number, stop in enumerate(sampling.stop):
        if not 1 <= len(stop) <= MAX_STOP_CHARS:
            refuse(f"sampling.stop[{number}]", f"has {len(stop)} characters; 1 to {MAX_STOP_CHARS} are allowed")
    if len(sampling.stop_token_ids) > MAX_STOP_TOKENS:
        refuse("sampling.stop_token_ids", f"{len(sampling.stop_token_ids)} tokens are more than {MAX_STOP_TOKENS}")
    check_tokens("sampling.stop_token_ids", sampling.stop_token_ids, limits.vocab_size)
    contradiction = limits.eos_token_ids.intersection(sampling.stop_token_ids)
    if sampling.ignore_eos and contradiction:
        refuse(
            "sampling.stop_token_ids", f"{min(contradiction)} ends every sequence, which ignore_eos forbids; drop one of the two"
        )
