"""Equal tokens: every way through a mesh of vLLM workers beside one vLLM alone, one request at a time.

The expected answers are those of one engine as pdmesh composes it; beside them stands stock vLLM, whose greedy tokens must be the
same. Its seeded draws would be another stream of random numbers, and vLLM 0.32 has none on a CPU: a request with a seed fails
with "CPU Generator does not use offset". Both are also asked the same in other batches, `VARIED`: what vLLM's own kernels make of
the same input. A way is measured once and kept, so that a run that was stopped goes on.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from benchmarks.engine_runs import GREEDY, SAMPLED, Draw
from benchmarks.harness import Figure, Kept, Options, say
from benchmarks.vllm.answers import STOCK, Alone, Answer, Answers, Settings, alone, compared, figures_of
from benchmarks.vllm.strikes import back, strike
from pdmesh.client.client import AsyncClient, Completed, Delta, Started
from pdmesh.launcher.mesh import LocalMesh
from pdmesh.text.tokenizer import Tokenizer
from tests.equality.prompts import encode_all


@dataclass(frozen=True)
class Varied:
    """How one vLLM is asked the same: all prompts in one batch, each a second time, or with the first tokens of its answer."""

    together: bool = False
    again: bool = False
    continued: bool = False


DTYPES = ("bfloat16", "float32")
DRAWS: Mapping[str, Draw] = {"greedy": GREEDY, "seeded": SAMPLED}
NUM_TOKENS = 64
STRUCK_EVERY = 3
"""Ways in which a process dies ask a third of the prompts: each waits until the dead one is back, later each time."""
STRIKE_AFTER = 8
"""Tokens of an answer after which a process dies in the middle of it."""
ANSWER_S, RESUME_S = 300.0, 120.0
ALONE = "engine alone"
VARIED = {
    "all prompts at once": Varied(together=True),
    "asked again": Varied(again=True),
    "continued behind its own tokens": Varied(continued=True),
}
"""What a vLLM alone makes of the same input in other batches: beside it the ways through the mesh have to be seen."""
PEERS = {"composed": ALONE, "stock": STOCK}
Prompts = Mapping[int, Sequence[int]]


@dataclass
class Seen:
    """What a stream has shown so far."""

    token_ids: list[int] = field(default_factory=list)
    completed: Completed | None = None


@dataclass(frozen=True)
class Way:
    """A way through the mesh. `salt`: ways of the same salt find each other's prefixes. `evidence`: what a completed answer shows
    of it. `dies`: the kind of process that is killed; `after`: so many tokens, or 0: once the request has been taken in.
    `struck`: it asks a third of the prompts."""

    name: str
    salt: str
    evidence: Callable[[Completed], int]
    mode: str = "remote"
    dies: str = ""
    after: int = STRIKE_AFTER

    @property
    def struck(self) -> bool:
        return bool(self.dies)


WAYS = (
    Way("remote", "a", lambda done: done.timings.kv_bytes),
    Way("local", "b", lambda done: int(not done.timings.kv_bytes), mode="local"),
    Way("prefix hit", "a", lambda done: done.usage.cached_tokens),
    Way("router killed and resumed", "c", lambda done: done.num_resumes, dies="router"),
    Way("decode killed", "d", lambda done: done.timings.num_resubmissions, dies="decode"),
    Way("prefill killed", "e", lambda done: done.timings.num_retries, dies="prefill", after=0),
)


@dataclass(frozen=True)
class Task:
    """What every way is asked."""

    settings: Settings
    prompts: Prompts
    kept: Kept

    def of(self, way: Way) -> Prompts:
        """Return the prompts that the way asks; those of a killed prefill are the longest: it must die while it computes."""
        if not way.struck:
            return self.prompts
        numbers = list(self.prompts)[::-1] if way.dies == "prefill" else list(self.prompts)[::STRUCK_EVERY]
        return {number: self.prompts[number] for number in numbers[: -(-len(self.prompts) // STRUCK_EVERY)]}

    def known(self, what: str, draw: str) -> dict[int, Answer] | None:
        """Return the answers that an earlier run measured."""
        found = self.kept.get(self._key(what, draw))
        return None if found is None else {number: Answer(tuple(ids), tuple(gaps), count) for number, ids, gaps, count in found}

    def keep(self, what: str, draw: str, answers: Answers) -> None:
        """Keep answers until the part is whole."""
        listed = [[number, each.token_ids, each.gaps, each.evidence] for number, each in answers.items()]
        self.kept.put(self._key(what, draw), listed)

    def _key(self, what: str, draw: str) -> str:
        return f"{self.settings.dtype}-{draw}-{what}".replace(" ", "-").replace(",", "")


# The mesh.


class Asked:
    """A mesh that is asked one request at a time, and whose processes die on the way."""

    def __init__(self, mesh: LocalMesh, client: AsyncClient, draw: Draw) -> None:
        self._mesh = mesh
        self._client = client
        self._draw = draw

    async def answers(self, way: Way, prompts: Prompts, salt: str) -> dict[int, Answer]:
        """Return the answers. Raises TimeoutError where one, or a killed process, does not come back."""
        found = {}
        for number, prompt in prompts.items():
            async with asyncio.timeout(ANSWER_S):
                seen = await self._streamed(way, prompt, salt)
            assert seen.completed is not None
            found[number] = Answer(tuple(seen.token_ids), evidence=way.evidence(seen.completed))
        return found

    async def _streamed(self, way: Way, prompt: Sequence[int], salt: str) -> Seen:
        seen, struck = Seen(), None
        options = {"temperature": self._draw.temperature, "seed": self._draw.seed, "max_tokens": NUM_TOKENS, "ignore_eos": True}
        stream = self._client.generate_stream(list(prompt), timeout=ANSWER_S, mode=way.mode, cache_salt=salt, **options)  # type: ignore[arg-type]
        async with stream:
            async for event in stream:
                _take(seen, event)
                if way.dies and struck is None and isinstance(event, Started | Delta) and len(seen.token_ids) >= way.after:
                    struck = await strike(self._mesh, self._client, way.dies)
        if struck is not None:
            await back(self._mesh, struck)
        return seen


def _take(seen: Seen, event: object) -> None:
    if isinstance(event, Completed):
        seen.completed = event
    elif isinstance(event, Delta) and event.token_ids:
        if event.first_index != len(seen.token_ids):
            raise AssertionError(f"index {event.first_index} follows {len(seen.token_ids)} tokens: lost or repeated")
        seen.token_ids += event.token_ids


async def by_mesh(task: Task, ways: Sequence[Way]) -> None:
    """Measure what is not known yet of all ways and draws, in one mesh. Raises StartFailed, MeshError or TimeoutError."""
    left = [(way, name) for name in DRAWS for way in ways if task.known(way.name, name) is None]
    if not left:
        return
    config = task.settings.mesh(num_decode=2)
    async with LocalMesh(config, on_event=say) as mesh, AsyncClient(mesh.router_addresses, resume_timeout_s=RESUME_S) as client:
        say(f"{task.settings.dtype}: mesh is ready; logs in {mesh.log_dir}")
        for way, name in left:
            if (
                way.name == "prefix hit" and (WAYS[0], name) not in left
            ):  # after an interruption the prefixes are not there any more
                await Asked(mesh, client, DRAWS[name]).answers(WAYS[0], task.of(way), f"{way.salt}-{name}")
            answers = await Asked(mesh, client, DRAWS[name]).answers(way, task.of(way), f"{way.salt}-{name}")
            task.keep(way.name, name, answers)
            say(f"{task.settings.dtype}, {name}, {way.name}: evidence {[each.evidence for each in answers.values()]}")


# One vLLM alone.


def by_one(task: Task) -> None:
    """Measure what is not known yet of one engine and of stock vLLM. Raises PeerError."""
    for kind, peer in PEERS.items():
        draws = DRAWS if kind == "composed" else ("greedy",)
        asked = {peer: Varied(), **{varied_name(peer, how): varied for how, varied in VARIED.items()}}
        left = [(what, name) for name in draws for what in asked if task.known(what, name) is None]
        if left:
            with alone(kind, task.settings) as one:
                for what, name in left:
                    _ask_one(task, one, what, name, asked[what], peer)


def _ask_one(task: Task, one: Alone, what: str, name: str, varied: Varied, peer: str) -> None:
    begun = {}
    if varied.continued:
        begun = {number: each.token_ids[:STRIKE_AFTER] for number, each in (task.known(peer, name) or {}).items()}
    count = NUM_TOKENS - (STRIKE_AFTER if varied.continued else 0)
    found = one.ask(task.prompts, count, DRAWS[name], together=varied.together, again=varied.again, emitted=begun)
    task.keep(what, name, {number: behind(begun.get(number, ()), each) for number, each in found.items()})
    say(f"{task.settings.dtype}, {name}, {what}: done")


def behind(begun: Sequence[int], answer: Answer) -> Answer:
    """Return the answer with the tokens that it continued, which were not drawn again. Pure."""
    return Answer((*begun, *answer.token_ids), (*(math.inf for _ in begun), *answer.gaps))


def varied_name(peer: str, how: str) -> str:
    """Return what a variation of one vLLM's answers is called. Pure."""
    return f"{peer}, {how}"


# Figures. Pure, of answers by way and draw.


def figures(dtype: str, draw: str, found: Mapping[str, Answers]) -> Iterator[Figure]:
    """Yield the figures of one draw's answers by what gave them."""
    name, expected, stock = f"{dtype}, {draw}", found[ALONE], found.get(STOCK)
    for what in (way.name for way in WAYS if way.name in found):
        yield from _of_way(f"{name}, {what}", found[what], expected)
        if stock is not None:
            comparison = compared(found[what], stock)
            yield _answers_equal(f"{name}, {what}, beside {STOCK}", comparison.answers_equal, comparison.num_answers)
    for peer in (ALONE, STOCK) if stock is not None else (ALONE,):
        for varied in (varied_name(peer, how) for how in VARIED):
            yield from figures_of(f"{name}, {varied}", compared(found[varied], found[peer]), peer, goal=None)
    if stock is not None:
        yield from figures_of(f"{name}, {ALONE}", compared(expected, stock), STOCK)


def _of_way(name: str, answers: Answers, expected: Answers) -> list[Figure]:
    comparison = compared(answers, expected)
    shown = sum(each.evidence > 0 for each in answers.values())
    evidence = Figure(f"{name}: answers to which it happened", shown, f"of {len(answers)} answers", "higher", goal=1)
    return [*figures_of(name, comparison, ALONE), evidence]


def _answers_equal(name: str, value: float, num_answers: int) -> Figure:
    return Figure(f"{name}: answers equal", value, f"share of {num_answers} answers", "higher", goal=1.0, peer=STOCK)


# The part.


def _measured() -> list[str]:
    varied = [varied_name(peer, how) for peer in PEERS.values() for how in VARIED]
    return [*PEERS.values(), *varied, *(way.name for way in WAYS)]


def task_of(options: Options, dtype: str) -> Task:
    """Return what is asked in these numbers."""
    every = encode_all(Tokenizer.load(options.model).encode)
    chosen = [1, 18, 22] if options.quick else range(len(every))
    settings = Settings(options.model, dtype)
    return Task(settings, {number: every[number] for number in chosen}, Kept(options.folder / "equality"))


async def measure(options: Options) -> list[Figure]:
    """Measure all of it."""
    listed = list[Figure]()
    for dtype in DTYPES[:1] if options.quick else DTYPES:
        task = task_of(options, dtype)
        await asyncio.to_thread(by_one, task)
        await by_mesh(task, WAYS)
        for draw in DRAWS:
            known = {what: task.known(what, draw) for what in _measured()}
            listed += figures(dtype, draw, {what: answers for what, answers in known.items() if answers is not None})
    Kept(options.folder / "equality").forget()
    return listed
