"""Parts of a scenario: what is left of it when requests, faults, members or tokens are taken away.

    --seed 17 --only-asks 2 --only-faults 0,3 --without router-1 --max-tokens 8 --world 5

A reduction is a value that a command line can name, so that a scenario that was made smaller is replayed as a whole one is.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace
from typing import TypeVar

from tests.simulation.scenario import Ask, Scenario

T = TypeVar("T")


@dataclass(frozen=True)
class Reduction:
    """What is left. `asks` and `faults` are numbers, from 0, None: all; `without`: members that are not there; `world`: the seed
    of latencies and turns, where it is not the scenario's."""

    asks: tuple[int, ...] | None = None
    faults: tuple[int, ...] | None = None
    without: tuple[str, ...] = ()
    max_tokens: int | None = None
    max_prompt: int | None = None
    world: int | None = None

    def of(self, scenario: Scenario) -> Scenario:
        """Return what is left of a scenario. Faults of members that are not there are not either."""
        asks = _chosen(scenario.asks, self.asks, "--only-asks")
        faults = _chosen(scenario.faults, self.faults, "--only-faults")
        return replace(
            scenario,
            seed=scenario.seed if self.world is None else self.world,
            asks=tuple(self._shorter(ask) for ask in asks),
            faults=tuple(fault for fault in faults if not set(fault.targets) & set(self.without)),
            decodes=self._left(scenario.decodes),
            prefills=self._left(scenario.prefills),
            boths=self._left(scenario.boths),
            routers=self._left(scenario.routers),
        )

    def arguments(self) -> list[str]:
        """Return it as options of a command line."""
        named: dict[str, object] = {
            "--only-asks": _joined(self.asks),
            "--only-faults": _joined(self.faults),
            "--without": _joined(self.without or None),
            "--max-tokens": self.max_tokens,
            "--max-prompt": self.max_prompt,
            "--world": self.world,
        }
        return [word for name, value in named.items() if value is not None for word in (name, str(value))]

    def _shorter(self, ask: Ask) -> Ask:
        max_tokens = ask.max_tokens if self.max_tokens is None else min(ask.max_tokens, self.max_tokens)
        return replace(ask, prompt=ask.prompt[: self.max_prompt], max_tokens=max_tokens)

    def _left(self, names: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(name for name in names if name not in self.without)


WHOLE = Reduction()


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that name a reduction."""
    parser.add_argument("--only-asks", type=_numbers, help="the requests that are sent, by number; -: none")
    parser.add_argument("--only-faults", type=_numbers, help="the faults that happen, by number; -: none")
    parser.add_argument("--without", type=lambda text: tuple(text.split(",")), default=(), help="members that are not there")
    parser.add_argument("--max-tokens", type=int, help="the most tokens that a request asks for")
    parser.add_argument("--max-prompt", type=int, help="the most tokens of a prompt that are left")
    parser.add_argument("--world", type=int, help="the seed of latencies and turns")


def reduction_of(options: argparse.Namespace) -> Reduction:
    """Return what the options name."""
    return Reduction(
        options.only_asks, options.only_faults, options.without, options.max_tokens, options.max_prompt, options.world
    )


def _numbers(text: str) -> tuple[int, ...]:
    try:
        return () if text == "-" else tuple(map(int, text.split(",")))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of numbers such as 0,3, and not -") from None


def _joined(items: tuple[object, ...] | None) -> str | None:
    return None if items is None else ",".join(map(str, items)) or "-"


def _chosen(items: tuple[T, ...], numbers: tuple[int, ...] | None, option: str) -> tuple[T, ...]:
    if numbers is None:
        return items
    if any(not 0 <= number < len(items) for number in numbers):
        raise ValueError(f"{option} {_joined(numbers)}: the scenario has numbers 0 to {len(items) - 1}")
    return tuple(items[number] for number in numbers)
