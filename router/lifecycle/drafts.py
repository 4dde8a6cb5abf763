"""What workers guessed for one request, over all of its stays on decode workers. Pure."""


class DraftTotals:
    """Messages name totals of a stay, so that one which is lost, or sent again, changes nothing; the latest of each counts."""

    def __init__(self) -> None:
        self._totals: dict[tuple[str, int], tuple[int, int]] = {}

    def note(self, stay: str, choice: int, num_drafted: int, num_accepted: int) -> None:
        """So many tokens have been guessed for `choice` since `stay` began, and so many of them came true (per-token path)."""
        self._totals[stay, choice] = (num_drafted, num_accepted)

    def accepted_in(self, stay: str) -> int:
        """Of all choices, on one worker."""
        return sum(accepted for (where, _), (_, accepted) in self._totals.items() if where == stay)

    @property
    def num_drafted(self) -> int:
        """Tokens that were guessed and verified."""
        return sum(drafted for drafted, _ in self._totals.values())

    @property
    def num_accepted(self) -> int:
        """Of them, those that came true."""
        return sum(accepted for _, accepted in self._totals.values())
