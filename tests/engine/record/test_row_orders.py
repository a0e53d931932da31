"""Where the rows of a batch stand that sorts its rows, whatever messages they come with."""

from pathlib import Path

from neaptide.engine.offline.token_file import TokenFile
from neaptide.engine.record.row_orders import OrderPlace, RowOrders
from tests.engine.harness import batch


def by_prompt(tokens: TokenFile, row: int) -> bytes:
    return tokens.sort_key(row)


def file_of(directory: Path, name: str, first_tokens: list[int]) -> TokenFile:
    return TokenFile(batch(directory, name, [[token] for token in first_tokens]).path)


def test_rows_of_a_later_message_name_the_row_that_they_stand_behind(tmp_path: Path) -> None:
    orders = RowOrders(by_prompt)
    first, second = file_of(tmp_path, "a", [5, 9, 7]), file_of(tmp_path, "b", [9, 8, 4, 7, 6])
    assert orders.add("job", first, [0, 1, 2], 10) == OrderPlace([0, 2, 1], [])
    # 4 before all; 6 behind the 5; both 7 and 8 behind the 7 of before; 9 behind its equal.
    assert orders.add("job", second, [0, 1, 2, 3, 4], 20) == OrderPlace([2, 4, 3, 1, 0], [-1, 10, 12, 12, 11])
    third = file_of(tmp_path, "c", [7])
    assert orders.add("job", third, [0], 30) == OrderPlace([0], [23])


def test_batches_know_nothing_of_each_other(tmp_path: Path) -> None:
    orders = RowOrders(by_prompt)
    orders.add("a", file_of(tmp_path, "a", [5]), [0], 0)
    assert orders.add("b", file_of(tmp_path, "b", [6]), [0], 1) == OrderPlace([0], [])


def test_a_batch_without_open_rows_is_forgotten(tmp_path: Path) -> None:
    orders = RowOrders(by_prompt)
    tokens = file_of(tmp_path, "a", [5, 6])
    orders.add("job", tokens, [0, 1], 0)
    orders.row_ended("job")
    assert len(orders) == 1
    orders.row_ended("job")
    assert len(orders) == 0
    assert orders.add("job", tokens, [1], 2) == OrderPlace([0], [])


def test_a_cancelled_batch_is_forgotten(tmp_path: Path) -> None:
    orders = RowOrders(by_prompt)
    orders.add("job", file_of(tmp_path, "a", [5]), [0], 0)
    orders.forget("job")
    assert len(orders) == 0
    orders.row_ended("job")  # of a row that ran when the batch was cancelled
