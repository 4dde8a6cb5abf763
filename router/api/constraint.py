"""A client's constraint on its output, compiled before any worker hears of the request. Each refusal names the field."""

from collections.abc import Sequence
from functools import partial

from pdmesh.runtime.work_threads import WorkThreads
from pdmesh.text.grammar import CompiledGrammar, GrammarCompiler
from pdmesh.v1 import common_pb2
from router.api.validation import refuse

# A hostile grammar takes one of these for a second, not all of us.
threads = WorkThreads("grammar", num_threads=2, max_waiting=64, timeout_s=5.0)


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
        return grammars.known(kind, source) or await threads.run(partial(grammars.compile, kind, source))
    except TimeoutError:
        refuse(field, f"takes more than {threads.timeout_s:.0f} s to compile; make it simpler")
    except ValueError as error:
        refuse(field, str(error))


async def check_history(grammar: CompiledGrammar, emitted: Sequence[common_pb2.EmittedChoice]) -> None:
    """What a client resumes from is the beginning of a sentence of the grammar. Raises InvalidArgument."""
    open_choices = [(number, choice) for number, choice in enumerate(emitted) if not choice.finish_reason]

    def find() -> tuple[int, int] | None:
        strays = ((number, grammar.first_stray(choice.token_ids)) for number, choice in open_choices)
        return next(((number, index) for number, index in strays if index is not None), None)

    try:
        stray = await threads.run(find)
    except TimeoutError:
        refuse("resume.emitted", f"takes more than {threads.timeout_s:.0f} s to compare with sampling.constraint")
    if stray is not None:
        number, index = stray
        token_id = emitted[number].token_ids[index]
        refuse(f"resume.emitted[{number}].token_ids[{index}]", f"token {token_id} does not follow sampling.constraint")
