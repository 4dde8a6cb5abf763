"""A client's constraint on its output, compiled before any worker hears of the request. Each refusal names the field."""

import asyncio
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

from protos.v1 import common_pb2
from router.validation import refuse
from text.grammar import CompiledGrammar, GrammarCompiler

COMPILE_TIMEOUT_S = 5.0
_threads = ThreadPoolExecutor(2, thread_name_prefix="grammar")  # a hostile grammar takes one of these for a second, not all of us


async def compile_constraint(grammars: GrammarCompiler, sampling: common_pb2.SamplingParams) -> CompiledGrammar | None:
    """The grammar of a request; None if it has no constraint. Raises InvalidArgument."""
    if not sampling.HasField("constraint"):
        return None
    kind = sampling.constraint.WhichOneof("kind")
    if kind is None:
        refuse("sampling.constraint", "is empty; give one of json_schema, regex, choice and grammar")
    for name in ("min_tokens", "ignore_eos"):
        if getattr(sampling, name):
            refuse(f"sampling.{name}", "excludes a constraint, whose output ends when it is complete; drop one of the two")
    source = tuple(sampling.constraint.choice.values) if kind == "choice" else str(getattr(sampling.constraint, kind))
    field = f"sampling.constraint.{kind}"
    try:
        return grammars.known(kind, source) or await _compile(grammars, kind, source)
    except TimeoutError:
        refuse(field, f"takes more than {COMPILE_TIMEOUT_S:.0f} s to compile; make it simpler")
    except ValueError as error:
        refuse(field, str(error))


def check_history(grammar: CompiledGrammar | None, emitted: Iterable[common_pb2.EmittedChoice]) -> None:
    """What a client resumes from is the beginning of a sentence of the grammar. Raises InvalidArgument."""
    for number, choice in enumerate(emitted if grammar is not None else ()):
        assert grammar is not None
        if choice.finish_reason:
            continue
        matcher = grammar.matcher()
        for index, token_id in enumerate(choice.token_ids):
            matcher.take(token_id)
            if matcher.failed:
                refuse(f"resume.emitted[{number}].token_ids[{index}]", f"token {token_id} does not follow sampling.constraint")


async def _compile(grammars: GrammarCompiler, kind: str, source: str | tuple[str, ...]) -> CompiledGrammar:
    async with asyncio.timeout(COMPILE_TIMEOUT_S):
        return await asyncio.get_running_loop().run_in_executor(_threads, grammars.compile, kind, source)
