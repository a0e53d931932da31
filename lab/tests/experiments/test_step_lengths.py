"""Offline work alone in steps of several lengths."""

import pytest

from neaptide_lab.experiments import step_lengths
from neaptide_lab.experiments.step_lengths import CLOSE, FREE, Size

PROFILE, SET = "a100-40g-llama-3.1-8b", "sharegpt_lengths"


def test_the_free_rate_is_held_against_that_of_the_best_length(monkeypatch: pytest.MonkeyPatch) -> None:
    size = Size((PROFILE,), (SET,), (0.02, 0.039), (20.0, 40.0), ("file",))
    monkeypatch.setattr(step_lengths, "QUICK", size)
    result = step_lengths.run(quick=True)
    row, least = result.rows
    rates = result.data["tokens_per_s"][f"{PROFILE}, {SET}, file"]
    assert rates["39 ms"] > rates["20 ms"]
    assert row.case == f"{PROFILE}, {SET}, file: free over 39 ms"
    assert least.ours == row.ours == rates[FREE] / rates["39 ms"]
    assert row.holds == (row.ours >= CLOSE)
