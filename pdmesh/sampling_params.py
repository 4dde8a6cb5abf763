"""The sampling parameters of a request, each described once.

    SamplingParams                      the parameters that the engine computes with; the metadata of a field are its Rules
    SamplingOptions                     the same parameters as keyword arguments of the client
    PARAMETERS                          the description of the parameters, which these modules read:

    router/api/validation.py            the values that a client may request, and the errors for others
    pdmesh/text/generation_config.py    the parameters that a model's folder may set for requests that leave them out
    router/api/openai, kserve, vllm     the parameter under its name in each protocol that has it
    router/api/openai/bodies.py         the same for OpenAI's bodies, whose fields a test compares with these
    pdmesh/worker/token_request.py      from the wire to SamplingParams
    pdmesh/engine/sampling/sampler.py   the record that the samplers in C++ and in Triton get (`DRAWN`)

A new parameter is a field of both classes and of `SamplingParams` in protos/pdmesh/v1/common.proto (then `make stubs`), and its
rule in each of the three samplers. This module imports nothing that client, router or engine may not import.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from enum import Enum
from typing import Any, TypedDict, get_type_hints

MAX_CHOICES = 16
MAX_LOGPROBS = 20
MAX_BIASES = 1024
# Between zero and this, logits / temperature leaves the range of float32.
MIN_TEMPERATURE = 1e-4
# For protocols that allow 0: the likeliest token always stays.
LEAST_TOP_P = 1e-6


class Kind(Enum):
    """Name the kind of a parameter's values, in Python and on the wire."""

    NUMBER = "number"  # double
    COUNT = "count"  # an unsigned integer
    FLAG = "flag"
    TOKENS = "tokens"  # a list of token ids
    BIASES = "biases"  # token ids, each with a number (a message TokenBias on the wire)


@dataclass(frozen=True)
class Range:
    """Hold the numbers from `low` to `high`, both included; `is_open`: `low` itself is excluded."""

    low: float = -math.inf
    high: float = math.inf
    is_open: bool = False

    def __contains__(self, value: float) -> bool:
        return self.low <= value <= self.high and not (self.is_open and value == self.low)

    def __str__(self) -> str:
        if self.high == math.inf:
            return f"{'more than' if self.is_open else 'at least'} {self.low:g}"
        return f"in {'(' if self.is_open else '['}{self.low:g}, {self.high:g}]"


@dataclass(frozen=True, kw_only=True)
class Rules:
    """Hold the rules of a parameter, besides its name, type and default.

    `computed`: the values that the samplers can compute with; `meaning`: how an error names them, if not by the range. `served`:
    the values that a client may request, where they are fewer; `zero`: the meaning of 0, where 0 is served too; `hint`: follows
    the range in errors. `bits`: of a count on the wire. `is_minus_one_all`: other protocols write -1 for 0 (all). `is_drawn`: the
    samplers' records hold it.
    `is_model_default`: a model's generation_config.json may set it for requests that leave it out.
    """

    computed: Range | None = None
    meaning: str = ""
    served: Range | None = None
    zero: str = ""
    hint: str = ""
    bits: int = 32
    is_minus_one_all: bool = False
    is_drawn: bool = False
    is_model_default: bool = False


def _as(rules: Rules) -> Mapping[str, Rules]:
    return {"rules": rules}


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Hold the sampling parameters of one request. The defaults change nothing; temperature 0 is greedy.

    `seed` is an unsigned 64-bit number; with the choice and the index of a token it fixes the token's noise. `logprobs` None:
    none; k: those of the drawn token and of the k likeliest ones. `prompt_logprobs`: the same of the tokens of the prompt.
    """

    temperature: float = field(
        default=1.0,
        metadata=_as(
            Rules(
                computed=Range(0),
                meaning="at least 0 (0 is greedy)",
                served=Range(MIN_TEMPERATURE, 100),
                zero="greedy",
                is_drawn=True,
                is_model_default=True,
            )
        ),
    )
    top_k: int = field(  # 0: all tokens
        default=0,
        metadata=_as(
            Rules(
                computed=Range(0),
                meaning="at least 0 (0 is all tokens)",
                is_minus_one_all=True,
                is_drawn=True,
                is_model_default=True,
            )
        ),
    )
    top_p: float = field(
        default=1.0, metadata=_as(Rules(computed=Range(0, 1, is_open=True), is_drawn=True, is_model_default=True))
    )
    min_p: float = field(default=0.0, metadata=_as(Rules(computed=Range(0, 1), is_drawn=True, is_model_default=True)))
    repetition_penalty: float = field(
        default=1.0,
        metadata=_as(
            Rules(
                computed=Range(0, is_open=True), served=Range(0.01, 100), hint="; 1 is none", is_drawn=True, is_model_default=True
            )
        ),
    )
    presence_penalty: float = field(default=0.0, metadata=_as(Rules(served=Range(-2, 2), is_drawn=True, is_model_default=True)))
    frequency_penalty: float = field(default=0.0, metadata=_as(Rules(served=Range(-2, 2), is_drawn=True, is_model_default=True)))
    seed: int = field(
        default=0, metadata=_as(Rules(computed=Range(0, 2**64 - 1), meaning="an unsigned 64-bit number", bits=64, is_drawn=True))
    )
    max_tokens: int = field(metadata=_as(Rules(computed=Range(1))))
    min_tokens: int = field(default=0, metadata=_as(Rules()))
    ignore_eos: bool = field(default=False, metadata=_as(Rules()))
    stop_token_ids: tuple[int, ...] = field(default=(), metadata=_as(Rules(computed=Range(0), meaning="token ids, at least 0")))
    logit_bias: tuple[tuple[int, float], ...] = field(  # by token id, each once
        default=(), metadata=_as(Rules(computed=Range(-100, 100), meaning="different token ids with numbers in [-100, 100]"))
    )
    logprobs: int | None = field(default=None, metadata=_as(Rules(computed=Range(0), served=Range(0, MAX_LOGPROBS))))
    prompt_logprobs: int | None = field(default=None, metadata=_as(Rules(computed=Range(0), served=Range(0, MAX_LOGPROBS))))
    n: int = field(default=1, metadata=_as(Rules(computed=Range(1), served=Range(0, MAX_CHOICES))))

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def penalizes_prompt(self) -> bool:
        """Return whether a token's logit depends on whether prompt or output contain it."""
        return self.repetition_penalty != 1.0

    @property
    def penalizes_output(self) -> bool:
        """Return whether a token's logit depends on its occurrences in the output, besides `penalizes_prompt`."""
        return bool(self.presence_penalty or self.frequency_penalty)

    def validate(self) -> None:
        """Raise ValueError naming the field, the problem and the allowed values."""
        for parameter in NUMBERS:
            if not math.isfinite(getattr(self, parameter.name)):
                raise ValueError(f"{parameter.name}: {getattr(self, parameter.name)} is not a finite number")
        for parameter in PARAMETERS:
            _require(parameter.is_computed(getattr(self, parameter.name)), parameter, self)
        if not 0 <= self.min_tokens <= self.max_tokens:
            expected = f"in [0, max_tokens={self.max_tokens}]"
            raise ValueError(f"min_tokens: {self.min_tokens} is not allowed; it must be {expected}")


class SamplingOptions(TypedDict, total=False):
    """Hold the parameters as keyword arguments; absent ones take the mesh's defaults."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    seed: int
    max_tokens: int
    min_tokens: int
    ignore_eos: bool
    stop_token_ids: Sequence[int]
    logit_bias: Mapping[int, float]
    logprobs: int
    prompt_logprobs: int
    n: int


@dataclass(frozen=True)
class Parameter:
    """Describe one field of SamplingParams, under the same name on the wire. `default` is None also where a request must set the
    field."""

    name: str
    kind: Kind
    default: Any
    rules: Rules

    def is_computed(self, value: Any) -> bool:
        """Return whether the samplers can compute with a finite value."""
        computed = self.rules.computed
        if computed is None or (value is None and self.default is None):
            return True
        if self.kind is Kind.BIASES:
            are_different = len({token for token, _ in value}) == len(value)
            return are_different and all(token >= 0 and bias in computed for token, bias in value)
        return all(token in computed for token in value) if self.kind is Kind.TOKENS else value in computed

    def refusal(self, value: float) -> str | None:
        """Return the problem with a finite value that a client requests; None: it is allowed."""
        served = self.rules.served or self.rules.computed
        if served is None or value in served or (self.rules.zero and value == 0):
            return None
        if self.kind is Kind.COUNT and value > served.high:
            return f"{value} is more than {served.high:g}"
        if self.rules.zero:
            return f"{value} is neither 0 ({self.rules.zero}) nor {served}"
        return f"{value} is not {served}{self.rules.hint}"


def _require(allowed: bool, parameter: Parameter, params: SamplingParams) -> None:
    if not allowed:
        expected = parameter.rules.meaning or parameter.rules.computed
        raise ValueError(f"{parameter.name}: {getattr(params, parameter.name)} is not allowed; it must be {expected}")


_KINDS: dict[Any, Kind] = {
    float: Kind.NUMBER, int: Kind.COUNT, int | None: Kind.COUNT, bool: Kind.FLAG, tuple[int, ...]: Kind.TOKENS,
    tuple[tuple[int, float], ...]: Kind.BIASES,
}  # fmt: skip
_TYPES = get_type_hints(SamplingParams)
PARAMETERS = tuple(
    Parameter(each.name, _KINDS[_TYPES[each.name]], None if each.default is MISSING else each.default, each.metadata["rules"])
    for each in fields(SamplingParams)
)
NUMBERS = tuple(parameter for parameter in PARAMETERS if parameter.kind is Kind.NUMBER)
MODEL_DEFAULTS = tuple(parameter for parameter in PARAMETERS if parameter.rules.is_model_default)
# The parameters that the rules of a draw depend on, in the order of the samplers' records.
DRAWN = tuple(parameter for parameter in PARAMETERS if parameter.rules.is_drawn)
