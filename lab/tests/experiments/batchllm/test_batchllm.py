"""The experiments on BatchLLM's figures, on small pools."""

import numpy as np
import pytest

from neaptide.estimator.device_profile import load_profile
from neaptide.loadgen.workloads.offline_sets import load_offline
from neaptide.simulation.pools.planned import pool_of
from neaptide_lab.experiments.batchllm import cache_bound, industry, micro, saving, sweep, valleys
from neaptide_lab.experiments.batchllm.runs import Engine, Outcome, run_to_the_end, slots_by_memory
from neaptide_lab.experiments.batchllm.saving import scaled
from neaptide_lab.experiments.result import ExperimentResult


def drawn(result: ExperimentResult) -> None:
    from matplotlib.figure import Figure

    assert result.plot is not None
    result.plot(Figure())


@pytest.mark.full
def test_groups_save_the_bound_and_an_lru_cache_far_less(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saving, "QUICK", ((512, 64, 8),))
    monkeypatch.setattr(saving, "QUICK_SCALE", 64)
    result = saving.run(quick=True)
    found = result.data["savings"]["batchllm-512-64-s8"]
    assert found["bound"] == pytest.approx(7 / 8 * 512 / 576)
    assert found["batchllm"] == found["neaptide"] == pytest.approx(found["bound"])
    assert not result.failed
    drawn(result)


@pytest.mark.full
def test_rates_are_compared_with_the_best_that_is_not_sorted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(micro, "QUICK", ((256, 32, 4),))
    monkeypatch.setattr(micro, "QUICK_SCALE", 200)
    result = micro.run(quick=True)
    rates = result.data["requests_per_s"]["batchllm-256-32-s4"]
    gain = next(row.ours for row in result.rows if row.case.endswith("batchllm against the best unsorted"))
    assert gain == rates["batchllm"] / max(rates[name] for name in ("fcfs", "fcfs, all seats", "lpm"))
    drawn(result)


@pytest.mark.full
def test_the_industrial_mix_saves_within_a_point_of_its_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(industry, "QUICK_SCALE", 160)
    kept = ("fcfs", "batchllm", "neaptide")
    monkeypatch.setattr(industry, "RUNS", {name: industry.RUNS[name] for name in kept})
    monkeypatch.setattr(industry, "UNSORTED", ("fcfs",))
    result = industry.run(quick=True)
    planned = result.data["planned"]
    assert planned["Alg. 1"] <= planned["exact single level"] <= planned["multi-level"]
    assert not result.failed
    drawn(result)


def test_no_eviction_beats_the_planned_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_bound, "QUICK", {"batchllm-industry": 120})
    result = cache_bound.run(quick=True)
    assert not result.failed
    curves = result.data["curves"]["batchllm-industry"]
    assert curves["neaptide's order, LRU"] == sorted(curves["neaptide's order, LRU"])
    assert curves["shuffled, ours"][-1] == curves["shuffled, Belady"][-1] > curves["shuffled, Belady"][0]
    assert curves["shuffled, ours"][0] is None  # no prompt fits into 1%
    drawn(result)


def test_a_run_computes_every_prompt_token_once_without_a_cache_to_share() -> None:
    profile = scaled(load_profile(saving.PROFILE), 64)
    set_ = load_offline("bros-be-16", seed=0, limit=32)
    pool = pool_of(set_.requests, profile)
    outcome = run_to_the_end("be", set_.requests, pool.tree.rows, profile, Engine(seats=4))
    assert outcome.saving == 0.0
    tokens = sum(request.input_tokens + request.output_tokens for request in set_.requests)
    assert outcome.tokens_per_s == pytest.approx(tokens / outcome.seconds)
    assert outcome.requests_per_s == pytest.approx(32 / outcome.seconds)
    assert 0 < outcome.share_of_bound < 1


def test_seats_are_what_memory_holds_with_answers() -> None:
    profile = scaled(load_profile(saving.PROFILE), 64)
    set_ = load_offline("batchllm-512-64-s8", seed=0, limit=80)
    pool = pool_of(set_.requests, profile)
    held_tokens = 512 / 8 + 64 + 100
    assert slots_by_memory(pool) == int(0.9 * profile.kv_capacity_tokens / held_tokens)


@pytest.mark.full
def test_groups_gain_more_the_more_prompts_share(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweep, "QUICK", ((512, 2), (512, 8)))
    monkeypatch.setattr(sweep, "QUICK_SCALE", 100)
    result = sweep.run(quick=True)
    rates = result.data["requests_per_s"]
    few, many = (rates[case]["batchllm"] / rates[case]["fcfs"] for case in ("512 s2", "512 s8"))
    assert 1 < few < many
    drawn(result)


@pytest.mark.full
def test_valleys_are_steps_below_half_without_the_ends_of_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(valleys, "QUICK_SCALE", 160)
    result = valleys.run(quick=True)
    assert set(result.data) == set(valleys.RUNS)
    assert all(0.0 <= one["valleys"] <= 1.0 for one in result.data.values())
    drawn(result)


def test_the_fill_of_steps_is_of_the_middle_of_a_run() -> None:
    tokens = np.array([0.0, *[1024.0] * 8, 2048.0])
    outcome = Outcome(1.0, 1.0, 1.0, 0.0, 1.0, tokens)
    assert valleys._fill(outcome, Engine()).tolist() == [0.5] * 8
    assert valleys._valleys(np.array([0.4, 0.5, 0.6, 0.1])) == 0.5
