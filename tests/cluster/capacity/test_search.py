import pytest

from neaptide.cluster.capacity.search import smallest

MOST = 20


def asked_of(least: int, guess: int) -> tuple[int | None, list[int]]:
    asked: list[int] = []

    def holds(size: int) -> bool:
        asked.append(size)
        return size >= least

    return smallest(holds, guess, MOST), asked


def test_the_least_size_is_found_from_any_guess_and_its_neighbour_was_asked() -> None:
    for least in range(1, MOST + 1):
        for guess in range(MOST + 2):
            found, asked = asked_of(least, guess)
            assert found == least
            assert {least, least - 1} - {0} <= set(asked)
            assert len(asked) == len(set(asked)) <= 10
            assert set(asked) <= set(range(1, MOST + 1))


@pytest.mark.parametrize("guess", [0, 1, 7, MOST])
def test_nothing_is_found_where_the_most_fails(guess: int) -> None:
    assert smallest(lambda size: False, guess, MOST) is None


def test_the_answer_holds_and_the_size_below_it_fails_even_where_sizes_are_not_in_order() -> None:
    held = {3, 7, 8, 9, 11, 12}
    for guess in range(1, 13):
        found = smallest(lambda size: size in held, guess, 12)
        assert found in held
        assert found - 1 not in held
