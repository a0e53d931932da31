"""Profiles: published limits reproduced, capacities and all-reduce by hand, files read back as they were written."""

import json
from pathlib import Path

import msgspec
import pytest

from neaptide.engine.steps.plan import BatchShape
from neaptide.estimator.analytic import ANALYTIC_NAMES, LLAMA_3_1_8B, QWEN2_5_7B, analytic_profile
from neaptide.estimator.cost.iteration_time import Regime
from neaptide.estimator.cost.roofline import RooflineModel
from neaptide.estimator.device_profile import Efficiencies, load_profile, profile_names, save_profile
from neaptide.simulation.scenario import Scenario
from tests.estimator.machines import decodes, prefills

LIMITS = Efficiencies(gemm=1.0, attention=1.0, bandwidth=1.0, link=1.0)


def predicted_ms(name: str, shape: BatchShape, efficiencies: Efficiencies = LIMITS) -> float:
    """At the device's limits, without host time."""
    model = RooflineModel.from_profile(analytic_profile(name, efficiencies, host_s=0.0))
    return 1e3 * model.predict(shape).seconds


@pytest.mark.parametrize(
    ("name", "batch", "milliseconds"),
    [
        ("h100-80g-llama-3.1-8b", 1, 5.05),
        ("h100-80g-llama-3.1-8b", 64, 7.87),
        ("h100-80g-llama-3.1-8b", 256, 16.46),
        ("h200-llama-3.1-8b", 1, 3.52),
        ("h200-llama-3.1-8b", 64, 5.49),
        ("h200-llama-3.1-8b", 256, 12.87),
    ],
)
def test_decode_at_the_limits_takes_the_known_time(name: str, batch: int, milliseconds: float) -> None:
    assert predicted_ms(name, decodes(batch, 1024)) == pytest.approx(milliseconds, abs=0.005)


@pytest.mark.parametrize(
    ("name", "attention", "milliseconds"),
    [
        ("h100-80g-llama-3.1-8b", 1.0, 165),
        ("h100-80g-llama-3.1-8b", 0.55, 183),
        ("h200-llama-3.1-8b", 1.0, 167),
        ("h200-llama-3.1-8b", 0.55, 186),
    ],
)
def test_prefill_of_8k_at_the_limits_takes_the_known_time(name: str, attention: float, milliseconds: float) -> None:
    efficiencies = Efficiencies(gemm=1.0, attention=attention, bandwidth=1.0, link=1.0)
    assert predicted_ms(name, prefills(1, 8192), efficiencies) == pytest.approx(milliseconds, abs=0.5)


@pytest.mark.parametrize(("name", "milliseconds"), [("h100-80g-llama-3.1-8b", 148), ("h200-llama-3.1-8b", 150)])
def test_prefill_of_eight_prompts_takes_the_known_time(name: str, milliseconds: float) -> None:
    efficiencies = Efficiencies(gemm=1.0, attention=0.55, bandwidth=1.0, link=1.0)
    assert predicted_ms(name, prefills(8, 1024), efficiencies) == pytest.approx(milliseconds, abs=0.5)


def test_model_shapes_have_the_known_sizes() -> None:
    assert LLAMA_3_1_8B.body_parameters == pytest.approx(6.98e9, rel=1e-3)
    assert LLAMA_3_1_8B.weight_bytes == pytest.approx(2 * 8.03e9, rel=1e-3)
    assert LLAMA_3_1_8B.kv_bytes_per_token == 128 * 1024
    assert 2 * (QWEN2_5_7B.body_parameters + QWEN2_5_7B.head_parameters) == pytest.approx(14.1e9, rel=5e-3)
    assert QWEN2_5_7B.kv_bytes_per_token == 56 * 1024


def test_the_stated_efficiencies_give_the_stated_times() -> None:
    model = RooflineModel.from_profile(load_profile("h100-80g-llama-3.1-8b"))
    milliseconds = [round(1e3 * model.predict(decodes(batch, 1024)).seconds, 1) for batch in (1, 64, 256)]
    assert milliseconds == [6.4, 9.6, 19.4]


def test_the_stated_share_of_attention_gives_a_prompts_time() -> None:
    """8,192 tokens: matrix products at 0.85 and attention at 0.55 of 798 TFLOP/s, each by hand."""
    gemm_s = 2 * (6.98e9 * 8192 + 4096 * 128256) / (0.85 * 798e12)
    attention_s = 4 * 4096 * 32 * (8192 * 8193 / 2) / (0.55 * 798e12)
    seconds = RooflineModel.from_profile(load_profile("h100-80g-llama-3.1-8b")).predict(prefills(1, 8192)).seconds
    assert seconds == pytest.approx(7e-4 + gemm_s + attention_s, rel=1e-3)


@pytest.mark.parametrize(
    ("name", "bytes_s", "flops"),
    [
        ("a100-80g-llama-3.1-8b", 1.75e12, 270e12),
        ("a100-40g-llama-3.1-8b", 1.33e12, 240e12),
        ("h100-80g-llama-3.1-8b", 3.0e12, 798e12),
        ("h200-llama-3.1-8b", 4.3e12, 788e12),
    ],
)
def test_every_device_has_its_stated_bandwidth_and_throughput(name: str, bytes_s: float, flops: float) -> None:
    """One decode reads 15.0 GB of weights; 4,096 tokens are 2 operations for each parameter and token."""
    decode_s, prefill_s = predicted_ms(name, decodes(1, 1)) / 1e3, predicted_ms(name, prefills(64, 64)) / 1e3
    assert decode_s == pytest.approx(2 * (6.98e9 + 4096 * 128256) / bytes_s, rel=2e-3)
    pairs = 64 * 64 * 65 / 2
    operations = 2 * (6.98e9 * 4096 + 64 * 4096 * 128256) + 4 * 4096 * 32 * pairs
    assert prefill_s == pytest.approx(operations / flops, rel=2e-3)


def test_the_40g_sxm_card_has_its_stated_bandwidth() -> None:
    """OPT-13B on two of them: 25.7 GB of weights and 2 x 40 all-reduces, which the limits do not hide."""
    cost = analytic_profile("a100-40g-sxm-opt-13b-tp2", LIMITS, host_s=0.0).costs["decode"]
    weights_bytes = 2 * (40 * 12 * 5120**2 + 5120 * 50272)
    assert cost.weights_s == pytest.approx(weights_bytes / (2 * 1.33e12), rel=2e-3)
    assert cost.gemm_curve_s[0] == pytest.approx(2 * 40 * 12 * 5120**2 / (2 * 270e12), rel=2e-3)


def test_kv_capacity_is_what_weights_and_activations_leave() -> None:
    profile = load_profile("a100-40g-llama-3.1-8b")
    free_bytes = 0.9 * 40 * 2**30 - 2 * 2**30 - 2 * 8.03e9
    assert profile.kv_capacity_tokens == pytest.approx(free_bytes / 131072, rel=1e-3)
    assert profile.kv_capacity_tokens == 16 * profile.num_blocks


def test_tensor_parallel_profiles_pay_for_their_all_reduces() -> None:
    cost = load_profile("a100-40g-sxm-opt-13b-tp2").costs["decode"]
    all_reduces = 2 * 40
    assert cost.fixed_s == pytest.approx(7e-4 + all_reduces * 1e-5)
    assert cost.token_s == pytest.approx(all_reduces * (2 * 5120) * (2 * 1 / 2) / (0.75 * 300e9))
    assert load_profile("a100-80g-llama-3.1-8b").costs["decode"].token_s == 0.0


def test_every_profile_of_the_contracts_is_there() -> None:
    assert {
        "a100-40g-llama-3.1-8b",
        "a100-80g-llama-3.1-8b",
        "a100-80g-qwen2.5-7b",
        "a100-80g-llama-2-7b",
        "a100-40g-sxm-opt-13b-tp2",
        "a100-40g-sxm-opt-30b-tp4",
        "a100-80g-llama-3-70b-tp8",
        "a100-80g-qwen2.5-72b-tp8",
        "a100-80g-deepseek-67b-tp8",
        "h100-80g-llama-3.1-8b",
        "h200-llama-3.1-8b",
    } == ANALYTIC_NAMES
    assert set(profile_names()) >= ANALYTIC_NAMES


@pytest.mark.parametrize("name", profile_names())
def test_every_profile_loads_and_predicts(name: str) -> None:
    profile = load_profile(name)
    assert profile.name == name
    assert profile.kv_capacity_tokens > 8192
    seconds = RooflineModel.from_profile(profile).predict(decodes(8, 512)).seconds
    assert 1e-4 < seconds < 1.0


def test_a_profile_is_read_back_as_it_was_written(tmp_path: Path) -> None:
    profile = load_profile("a100-80g-llama-3-70b-tp8")
    save_profile(profile, tmp_path / "mine.json")
    assert load_profile(tmp_path / "mine.json") == profile


def test_an_unknown_name_says_which_there_are() -> None:
    with pytest.raises(ValueError, match=r"no profile 'h100'.*h100-80g-llama-3\.1-8b"):
        load_profile("h100")


def test_a_file_that_is_no_profile_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    path.write_text('{"name": "x"}')
    with pytest.raises(ValueError, match="is not a device profile"):
        load_profile(path)


@pytest.mark.parametrize("field", ["kv_bytes_per_token", "num_blocks", "block_size", "tensor_parallel", "tile_tokens"])
def test_a_profile_of_nothing_is_refused(tmp_path: Path, field: str) -> None:
    path = tmp_path / "profile.json"
    save_profile(msgspec.structs.replace(load_profile("h100-80g-llama-3.1-8b"), **{field: 0}), path)
    with pytest.raises(ValueError, match=f"is not a device profile: {field} is 0, not at least 1"):
        load_profile(path)


def test_the_same_memory_in_larger_blocks_takes_as_long_to_copy() -> None:
    known = load_profile("h100-80g-llama-3.1-8b")
    larger = known.in_blocks_of(64)
    assert known.in_blocks_of(16) is known
    assert (larger.block_size, larger.num_blocks) == (64, known.num_blocks // 4)
    assert larger.costs["mixed"].swap_block_s == pytest.approx(4 * known.costs["mixed"].swap_block_s)
    assert larger.costs["mixed"].kv_token_s == known.costs["mixed"].kv_token_s
    scenario = Scenario(profile=known, block_size=64)
    assert scenario.num_blocks == larger.num_blocks
    assert scenario.recipe()["cost_model"] == Scenario(profile=larger, block_size=64).recipe()["cost_model"]


GOOD = {"fixed_s": 1e-3, "gemm_curve_s": [0.0, 1e-4, 5e-5, 1e-4], "pair_s": 0.0, "kv_token_s": 1e-7}
FREE = {"fixed_s": 0.0, "gemm_curve_s": [0.0, 0.0], "pair_s": 0.0, "kv_token_s": 0.0}


def write_costs(path: Path, costs: dict[str, object]) -> Path:
    profile = msgspec.to_builtins(load_profile("h100-80g-llama-3.1-8b")) | {"costs": costs}
    path.write_text(json.dumps(profile))
    return path


def test_a_curve_that_falls_is_taken(tmp_path: Path) -> None:
    path = write_costs(tmp_path / "profile.json", dict.fromkeys(Regime, GOOD))
    assert load_profile(path).costs["decode"].gemm_curve_s == (0.0, 1e-4, 5e-5, 1e-4)


@pytest.mark.parametrize(
    ("decode", "message"),
    [
        (None, "it lacks the costs of decode steps"),
        (GOOD | {"gemm_curve_s": [1e-4]}, "gemm_curve_s of decode steps needs at least the times of 1 and 2 tokens"),
        (GOOD | {"gemm_curve_s": []}, "gemm_curve_s of decode steps needs at least the times of 1 and 2 tokens"),
        (GOOD | {"fixed_s": -5.0}, r"fixed_s of decode steps is -5\.0 s"),
        (GOOD | {"gemm_curve_s": [-1e-4, 1e-4]}, r"gemm_curve_s\[0\] of decode steps is -0\.0001 s"),
        (GOOD | {"kv_token_s": 1e308}, r"kv_token_s of decode steps is 1e\+308 s"),
        (GOOD | {"gemm_curve_s": [0.0, 2e-4, 1e-4]}, "gemm_curve_s of decode steps falls at its end"),
        (FREE, "decode steps cost nothing"),
    ],
)
def test_a_profile_with_costs_that_no_machine_has_is_refused(tmp_path: Path, decode: object, message: str) -> None:
    costs: dict[str, object] = {"prefill": GOOD, "mixed": GOOD}
    path = write_costs(tmp_path / "profile.json", costs if decode is None else costs | {"decode": decode})
    with pytest.raises(ValueError, match=f"is not a device profile: {message}"):
        load_profile(path)
