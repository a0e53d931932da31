"""Goodput above capacity, and what the capacity is."""

import pytest

from neaptide.estimator.device_profile import load_profile
from neaptide.experiments import overload
from neaptide.experiments.overload import Lengths, Size, capacity_rps


def test_the_capacity_counts_a_prefill_and_what_decodes_add() -> None:
    # Alone 6.9 prompts a second; a token of output reads 0.23 ms of keys and values, and adds 0.07 ms of products.
    profile = load_profile("a100-40g-llama-3.1-8b")
    assert capacity_rps(profile, Lengths(2000, 1)) == pytest.approx(6.89, abs=0.01)
    assert capacity_rps(profile, Lengths(2000, 150)) == pytest.approx(5.24, abs=0.01)


def test_goodput_holds_at_one_and_a_half_times_the_capacity(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overload, "QUICK", Size((Lengths(2000, 150),), (1.5,), window_s=10.0))
    result = overload.run(quick=True)
    goodput = {row.case: row.ratio for row in result.rows if row.ratio is not None}
    assert len(goodput) == 2
    assert min(goodput.values()) > 0.85
    prices = [note for note in result.notes if "longest wait" in note]
    assert [note.split(":")[0] for note in prices] == ["2000/150 alone at 1.5x", "2000/150 beside a flood at 1.5x"]
    assert all(
        set(found) >= {"itl_s", "longest_wait_s", "wasted_tokens"} for found in result.data["curves"]["2000/150 alone"]
    )
