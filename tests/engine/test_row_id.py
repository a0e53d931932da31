"""Names of batch rows."""

import hypothesis.strategies as st
import pytest
from hypothesis import given

from neaptide.engine.row_id import RowId, is_row_of


@given(st.text(), st.integers(0, 10**9))
def test_a_row_is_read_back_as_it_was_written(batch_id: str, row: int) -> None:
    assert RowId.parse(str(RowId(batch_id, row))) == RowId(batch_id, row)


@pytest.mark.parametrize("request_id", ["", "chatcmpl-7", "batch_1", "batch_1:", "batch_1:x", "batch_1:-1"])
def test_other_requests_are_no_rows(request_id: str) -> None:
    assert RowId.parse(request_id) is None


def test_a_row_belongs_to_its_batch_only() -> None:
    assert str(RowId("batch_1", 7)) == "batch_1:7"
    assert is_row_of("batch_1:7", "batch_1")
    assert not is_row_of("batch_12:7", "batch_1")
