"""Every token and every index counts."""

from tests.chaos.record import Answer

EXPECTED = [[10, 11, 12, 13], [20, 21]]


def counts(answer: Answer) -> tuple[int, int, int]:
    return answer.num_wrong, answer.num_lost, answer.num_duplicated


def test_the_right_answer_in_pieces() -> None:
    answer = Answer(EXPECTED)
    answer.take(0, 0, [10])
    answer.take(1, 0, [20, 21])
    answer.take(0, 1, [11, 12, 13])
    answer.take(0, 4, [])
    answer.end()
    assert (answer.num_tokens, *counts(answer)) == (6, 0, 0, 0)


def test_a_wrong_token() -> None:
    answer = Answer(EXPECTED)
    answer.take(0, 0, [10, 99, 12, 13])
    assert counts(answer) == (1, 0, 0)


def test_a_gap_is_lost() -> None:
    answer = Answer(EXPECTED)
    answer.take(0, 2, [12, 13])
    assert counts(answer) == (0, 2, 0)


def test_a_repeated_index_is_duplicated() -> None:
    answer = Answer(EXPECTED)
    answer.take(0, 0, [10, 11])
    answer.take(0, 1, [11, 12])
    assert counts(answer) == (0, 0, 1)


def test_an_end_that_comes_too_early_loses_tokens() -> None:
    answer = Answer(EXPECTED)
    answer.take(0, 0, [10, 11, 12, 13])
    answer.end()
    assert counts(answer) == (0, 2, 0)


def test_tokens_behind_the_end_are_wrong() -> None:
    answer = Answer(EXPECTED)
    answer.take(1, 0, [20, 21, 22])
    assert counts(answer) == (1, 0, 0)
