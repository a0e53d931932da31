"""Offline work alone in steps of several lengths."""

import pytest

from neaptide_lab.experiments import step_lengths
from neaptide_lab.experiments.step_lengths import FREE, Size

PROFILE, SET = "a100-40g-llama-3.1-8b", "sharegpt_lengths"


def test_steps_of_the_policys_own_length_do_as_much_as_those_of_the_best_one(monkeypatch: pytest.MonkeyPatch) -> None:
    size = Size((PROFILE,), (SET,), (0.02, 0.039), (20.0, 40.0), ("file",))
    monkeypatch.setattr(step_lengths, "QUICK", size)
    result = step_lengths.run(quick=True)
    row, least = result.rows
    assert row.case == f"{PROFILE}, {SET}, file: free over 39 ms"
    assert least.ours == row.ours > 0.95  # 0.88 where prompts take as few steps as possible
    rates = result.data["tokens_per_s"][f"{PROFILE}, {SET}, file"]
    assert row.ours == rates[FREE] / rates["39 ms"]
