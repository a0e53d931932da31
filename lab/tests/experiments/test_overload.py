"""Goodput above capacity, and what the capacity is."""

import pytest

from neaptide.estimator.device_profile import load_profile
from neaptide_lab.experiments import overload
from neaptide_lab.experiments.overload import Lengths, Size, capacity_rps, possible_rps


def test_the_capacity_counts_a_prefill_and_what_decodes_add() -> None:
    # Alone 6.9 prompts a second; a token of output reads 0.23 ms of keys and values, and adds 0.07 ms of products.
    profile = load_profile("a100-40g-llama-3.1-8b")
    assert capacity_rps(profile, Lengths(2000, 1)) == pytest.approx(6.89, abs=0.01)
    assert capacity_rps(profile, Lengths(2000, 150)) == pytest.approx(5.24, abs=0.01)


def test_what_is_possible_waits_for_nobody_who_cannot_be_in_time() -> None:
    # A prompt of 8,000 tokens takes 0.67 s of the TTFT target of 1 s: it has to begin 0.33 s after it came.
    profile, lengths = load_profile("a100-40g-llama-3.1-8b"), Lengths(8000, 100)
    assert possible_rps(profile, lengths, [0.0, 0.4, 9.0, 10.0]) == 4 / 10
    assert possible_rps(profile, lengths, [0.0, 0.3, 0.5, 10.0]) == 3 / 10  # the second could only be late
    crowd = [0.1 * k for k in range(101)]
    assert possible_rps(profile, lengths, crowd) == capacity_rps(profile, lengths)


@pytest.mark.full
def test_prompts_that_take_most_of_their_target_are_served_in_time_above_the_capacity(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(overload, "QUICK", Size((Lengths(8000, 100),), (1.0, 2.0), window_s=20.0))
    result = overload.run(quick=True)
    shares = {row.case: row.ratio for row in result.rows if "goodput" in row.case and row.ratio is not None}
    assert len(shares) == 4
    assert min(shares.values()) > 0.6  # without prompts counted in steps with decodes in them 0.03


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
