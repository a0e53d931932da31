"""How long a quote takes: the verdict, and once the real server."""

import pytest

from lab.benchmarks.quote_time import BAR_S, measure, summary

QUOTE = {"lines": 3, "basis": {"recorded_seconds": 600.0}}


@pytest.mark.parametrize(("slowest_s", "holds"), [(BAR_S, True), (BAR_S + 0.01, False)])
def test_it_holds_if_the_slowest_quote_is_within_two_seconds(slowest_s: float, holds: bool) -> None:
    result = summary([0.5, slowest_s, 0.4], QUOTE, num_periods=1, num_bytes=9)
    assert (result["first_s"], result["slowest_s"], result["holds"]) == (0.5, slowest_s, holds)


async def test_the_server_that_is_asked_has_the_record() -> None:
    result = await measure(lines=20, quotes=1, days=0.5)
    assert (result["lines"], result["periods"]) == (20, 72)
    assert result["recorded_s"] >= 72 * 600
