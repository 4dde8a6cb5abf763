"""A prepared request, which is the result of checking and tokenizing a client's message, and the models that a router serves."""

import contextlib
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache, partial
from typing import NamedTuple

from pdmesh.adapter_id import AdapterId
from pdmesh.runtime.config import ConfigError
from pdmesh.runtime.files import cache_root_of
from pdmesh.text.block_hash import hash_prompt, short_names
from pdmesh.text.fill_in_middle import Gap, gap_of
from pdmesh.text.generation_config import GenerationConfig
from pdmesh.text.grammar import GrammarCompiler
from pdmesh.text.parsers.machine import OutputParser, Schemas
from pdmesh.text.parsers.reasoning import ThinkMarks
from pdmesh.text.parsers.registry import NONE, REASONING_FORMATS, TOOL_FORMATS, begins_inside, make_parser, marks_of, may_think
from pdmesh.text.tokenizer import Tokenizer
from pdmesh.v1 import common_pb2
from router.routing.worker_snapshot import Mode

# A model as the router knows it: its name, tokenizer and grammar compiler, without weights.


@dataclass(frozen=True, eq=False)
class ServedModel:
    """Hold one model that clients may name."""

    name: str
    tokenizer: Tokenizer
    grammars: GrammarCompiler
    sampling_defaults: Mapping[str, float] = field(default_factory=dict)  # of requests that leave parameters out

    @cached_property
    def gap(self) -> Gap | None:
        """Return how the model is asked to fill a gap; None where it has no tokens for that."""
        return gap_of(self.tokenizer)

    @property
    def max_context(self) -> int:
        """Return the maximum of prompt and output tokens together."""
        return self.tokenizer.max_context

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """Return the tokens that end an output."""
        return self.tokenizer.eos_token_ids


def load(folders: dict[str, str], generation_config: GenerationConfig = "auto") -> dict[str, ServedModel]:
    """Return models by name from NAME → folder; a folder that two names share is read once. With "none", what its
    generation_config.json says of sampling is ignored. Raises ConfigError."""
    read = lru_cache(maxsize=None)(partial(_read, generation_config=generation_config))
    return {name: ServedModel(name, *read(folder)) for name, folder in folders.items()}


def _read(folder: str, generation_config: GenerationConfig) -> tuple[Tokenizer, GrammarCompiler, Mapping[str, float]]:
    try:
        tokenizer = Tokenizer.load(folder)
        defaults = {} if generation_config == "none" else tokenizer.settings.sampling_defaults()
    except (OSError, ValueError) as error:
        raise ConfigError("--models", str(error)) from error
    if not tokenizer.max_context:
        raise ConfigError("--models", f"{folder}/config.json names no max_position_embeddings", "add the model's config.json")
    grammars = GrammarCompiler(tokenizer.to_json(), tokenizer.vocab_size, tokenizer.eos_token_ids)
    with contextlib.suppress(ValueError):  # a request with a constraint gets the error
        grammars.warm()
    return tokenizer, grammars, defaults


# How the output of a chat is read: the formats of calls and thoughts, and their marks.

AUTO = "auto"
ID_CHARS = 24
SHORT_ID_CHARS = 9
"""Mistral's templates refuse ids of other lengths."""


@dataclass(frozen=True)
class OutputFormat:
    """Hold how an output is read. `tools`, `reasoning`: names of formats, or "none". `has_begun`: the prompt ends within
    thoughts. `thoughts`: the marks of those that may come first; None where there are none, or the prompt has ended them.
    `marks`: texts of the special tokens that the parser has to see, by id. `max_calls`: None for any number. `origin`: what
    determines the output, for ids of calls. `is_constrained`: the answer behind thoughts is held by a constraint."""

    tools: str
    reasoning: str
    schemas: Schemas = field(default_factory=dict)
    has_begun: bool = False
    thoughts: ThinkMarks | None = None
    marks: Mapping[int, str] = field(default_factory=dict)
    max_calls: int | None = None
    origin: bytes = b""
    is_constrained: bool = False

    def parser(self) -> OutputParser:
        """Return a parser of one choice."""
        return make_parser(self.tools, self.reasoning, self.schemas, has_begun=self.has_begun, is_constrained=self.is_constrained)

    def call_id(self, seed: int, choice: int, call: int) -> str:
        """Return the id of a call, the same wherever the output is read again."""
        said = hashlib.sha256(self.origin + f"{seed}:{choice}:{call}".encode()).hexdigest()
        return said[:SHORT_ID_CHARS] if self.tools == "mistral" else f"call_{said[:ID_CHARS]}"


@dataclass(frozen=True)
class FormatNames:
    """Hold the configured names of formats: "auto" takes that of the model's chat template."""

    tools: str = AUTO
    reasoning: str = AUTO


def format_of(
    tokenizer: Tokenizer, names: FormatNames, schemas: Schemas, prompt: str, *, max_calls: int | None = None
) -> OutputFormat | None:
    """Return how an output to a rendered `prompt` is read; None: all of it is text. `schemas` of the tools that may be called."""
    tools = tokenizer.tool_format if names.tools == AUTO else names.tools
    reasoning = tokenizer.reasoning_format if names.reasoning == AUTO else names.reasoning
    own_thoughts = TOOL_FORMATS[tools].thoughts if tools != NONE else None
    if own_thoughts is not None:
        reasoning = NONE
    elif not schemas:
        tools = NONE
    if tools == reasoning == NONE:
        return None
    marks = set(marks_of(tools, reasoning))
    return OutputFormat(
        tools,
        reasoning,
        schemas,
        begins_inside(prompt, reasoning),
        marks={token_id: text for text, token_id in tokenizer.special_tokens.items() if text in marks},
        thoughts=REASONING_FORMATS[reasoning] if may_think(prompt, reasoning) else own_thoughts,
        max_calls=max_calls,
        origin=hashlib.sha256(prompt.encode()).digest(),
    )


class _Chain(NamedTuple):
    """Hold the short hashes of a prompt's full blocks, and the whole hash of the last: the root where there are none."""

    names: list[int]
    last: bytes


@dataclass(eq=False)
class SessionState:
    """Tell whether the session of a request was released since the request came. All that is sent of the request looks it up."""

    tenant: str
    session_id: str
    model: str
    is_released: bool = False

    @property
    def key(self) -> tuple[str, str]:
        """Return what names the session in the mesh."""
        return self.tenant, self.session_id


@dataclass(frozen=True, eq=False)
class PreparedRequest:
    """Hold one request, ready for placement.

    `sampling` is what workers get: seed, max_tokens and n are set; stop strings stay in the router, in `stop`. `emitted` is
    empty, or holds one entry for each choice in order. `deadline` is monotonic seconds, None without one. `slo_ttft_ms` and
    `slo_tpot_ms` are the request's own objectives; 0: those of its model and priority. `attempt`: how often it was sent before.
    `output_format`: how the output of a chat is read; None: all of it is text. `kv_retention_s`: with the router's default filled
    in; 0: its KV is kept no longer than any other. `session_state`: of a request that is open in this router, with a session.
    `system_fingerprint`: of what has computed `emitted`; empty where the client does not say.
    """

    request_id: str
    model: ServedModel
    prompt: tuple[int, ...]
    sampling: common_pb2.SamplingParams
    stop: tuple[str, ...]
    emitted: tuple[common_pb2.EmittedChoice, ...] = ()
    system_fingerprint: str = ""
    tenant: str = ""
    priority: common_pb2.Priority.ValueType = common_pb2.PRIORITY_STANDARD
    cache_salt: str = ""
    mode: Mode | None = None
    deadline: float | None = None
    slo_ttft_ms: int = 0
    slo_tpot_ms: int = 0
    attempt: int = 0
    session_id: str = ""
    kv_retention_s: int = 0
    session_final: bool = False
    priority_hint: int = 0
    is_chat: bool = False
    adapter: AdapterId | None = None  # LoRA adapter that the request asked for in place of the model
    output_format: OutputFormat | None = None
    session_state: SessionState | None = None
    _chains: dict[tuple[bytes, int], _Chain] = field(default_factory=dict, repr=False)

    @property
    def served_name(self) -> str:
        """Return what the client asked for: the adapter's name, or the model's."""
        return self.model.name if self.adapter is None else self.adapter.name

    @property
    def is_released(self) -> bool:
        """Return whether the request's session was released while it was open: it retains nothing any more."""
        return self.session_state is not None and self.session_state.is_released

    @property
    def num_choices(self) -> int:
        """Return n of the request."""
        return self.sampling.n

    @property
    def ending_token_ids(self) -> frozenset[int]:
        """Return the tokens that end a choice: stop tokens, and end-of-sequence unless it is ignored."""
        stops = frozenset(self.sampling.stop_token_ids)
        return stops if self.sampling.ignore_eos else stops | self.model.eos_token_ids

    def block_names(self, identity: common_pb2.Identity, kv_dtype: str, block_size: int) -> list[int]:
        """Return the short block hashes of the prompt's full blocks, as workers of this kind compute them."""
        return self._chain(identity, kv_dtype, block_size).names

    def output_names(
        self, identity: common_pb2.Identity, kv_dtype: str, block_size: int, output: Sequence[int], at_once: int
    ) -> Iterator[list[int]]:
        """Yield the short hashes of the full blocks that come after the prompt's with `output`, `at_once` blocks at a time: each
        costs one or two microseconds."""
        names, parent = self._chain(identity, kv_dtype, block_size)
        tokens = (*self.prompt[len(names) * block_size :], *output)
        for start in range(0, len(tokens) - block_size + 1, at_once * block_size):
            hashes = hash_prompt(parent, tokens[start : start + at_once * block_size], block_size)
            parent = hashes[-1]
            yield short_names(hashes)

    def _chain(self, identity: common_pb2.Identity, kv_dtype: str, block_size: int) -> _Chain:
        root = cache_root_of(identity, kv_dtype, tenant=self.tenant, cache_salt=self.cache_salt)
        root = root if self.adapter is None else self.adapter.root(root)
        chain = self._chains.get((root, block_size))
        if chain is None:
            hashes = hash_prompt(root, self.prompt, block_size)
            chain = _Chain(short_names(hashes), hashes[-1] if hashes else root)
            self._chains[root, block_size] = chain
        return chain

    def token_request(self, emitted: list[common_pb2.EmittedChoice]) -> common_pb2.TokenRequest:
        """Return the message for workers, with `emitted` as forced tokens."""
        return common_pb2.TokenRequest(
            model=self.model.name,
            prompt_token_ids=self.prompt,
            sampling=self.sampling,
            emitted=emitted,
            cache_salt=self.cache_salt,
            tenant=self.tenant,
            priority=self.priority,
            adapter=self.adapter.name if self.adapter else "",
            adapter_digest=self.adapter.digest if self.adapter else "",
            session_id=self.session_id,
            kv_retention_s=0 if self.is_released else self.kv_retention_s,
            session_final=self.session_final,
        )


def scoped_salt(tenant: str, cache_salt: str) -> str:
    """Return the salt on the wire: prefix caches are shared within a tenant and, with a salt, within that salt. Empty if both
    are."""
    return f"{len(tenant)}:{tenant}:{cache_salt}" if tenant or cache_salt else ""
