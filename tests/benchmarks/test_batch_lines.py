"""The lines of the benchmark, and the figures of one length."""

import json

import pytest

from benchmarks.batch_lines import NUM_LINES, Measured, batch_file, figures_of


@pytest.mark.parametrize("line_bytes", [500, 8000])
def test_lines_have_the_length_that_is_asked_for(line_bytes: int) -> None:
    lines = batch_file(line_bytes, seed=1).splitlines(keepends=True)
    assert {len(line) for line in lines} == {line_bytes}
    assert len({json.loads(line)["custom_id"] for line in lines}) == NUM_LINES


def test_figures_are_medians_of_the_batches_of_one_length() -> None:
    runs = [Measured(500, api_ms, 2.0, 1.0, 10.0, []) for api_ms in (1.0, 9.0, 3.0)]
    assert figures_of(runs) == {
        "line_bytes": 500,
        "api_ms_per_line": 3.0,
        "engine_ms_per_line": 2.0,
        "steps_per_line": 1.0,
        "lines_per_s": NUM_LINES / 10.0,
        "chats_beside": None,
    }
