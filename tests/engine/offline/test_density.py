"""BlendServe's densities and bounds (ASPLOS'26, section 4)."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from neaptide.engine.offline.density import DensityModel, chunk_budget, kv_bytes_per_token, optimal_time_s

A100 = {"flops_per_s": 312e12, "bytes_per_s": 2.039e12, "kv_bytes_per_token": 131_072}
LLAMA_8B = DensityModel(8.03e9, **A100)
LENGTHS = st.integers(1, 20_000)


@pytest.mark.parametrize(
    ("parameters", "lengths", "printed"),
    [
        (8.03e9, (512, 256), "3.754"),
        (8.0e9, (512, 256), "3.740"),
        (8.03e9, (256, 16384), "0.0963"),
        (8.0e9, (256, 16384), "0.0959"),
    ],
)
def test_density_of_the_papers_two_requests(parameters: float, lengths: tuple[int, int], printed: str) -> None:
    density = DensityModel(parameters, **A100).density(*lengths)
    assert f"{density:.{len(printed) - 2}f}" == printed


def test_compute_and_memory_seconds_by_hand() -> None:
    model = DensityModel(parameters=10.0, flops_per_s=100.0, bytes_per_s=50.0, kv_bytes_per_token=4.0)
    assert model.compute_s(3, 2) == 2 * (3 + 2) * 10 / 100
    assert model.memory_s(3, 2) == (3 * 2 + 2**2 / 2) * 4 / 50


def test_prefill_attention_adds_4_h_l_for_each_pair() -> None:
    model = DensityModel(10.0, 100.0, 50.0, 4.0, attention_flops_per_pair=7.0)
    assert model.compute_s(3, 2) == (2 * (3 + 2) * 10 + 7 * 9) / 100


def test_prefill_attention_matters_for_long_prompts_only() -> None:
    with_attention = DensityModel(8.03e9, **A100, attention_flops_per_pair=4 * 4096 * 32)
    short, long = ((with_attention.density(p, 256) / LLAMA_8B.density(p, 256)) for p in (512, 16384))
    assert f"{short:.3f} {long:.3f}" == "1.011 1.527"


def test_a_request_without_output_reads_no_cache() -> None:
    assert LLAMA_8B.density(100, 0) == math.inf


@given(LENGTHS, LENGTHS, st.floats(1e6, 1e12))
def test_a_batch_of_equal_requests_has_their_density(input_tokens: int, output_tokens: int, memory: float) -> None:
    batch = LLAMA_8B.batch_density(input_tokens, output_tokens, memory)
    assert batch == pytest.approx(LLAMA_8B.density(input_tokens, output_tokens), rel=1e-9)


@given(st.lists(st.tuples(LENGTHS, LENGTHS), min_size=1, max_size=8))
def test_a_set_lies_between_its_requests(lengths: list[tuple[int, int]]) -> None:
    densities = [LLAMA_8B.density(*pair) for pair in lengths]
    assert min(densities) * (1 - 1e-9) <= LLAMA_8B.set_density(lengths) <= max(densities) * (1 + 1e-9)


def test_sharing_saves_compute_and_no_memory_traffic() -> None:
    lengths = [(512, 256), (256, 1024)]
    assert LLAMA_8B.set_density(lengths, 0.25) == pytest.approx(0.75 * LLAMA_8B.set_density(lengths))


def test_chunk_budget_by_hand() -> None:
    assert chunk_budget(1200.0, input_tokens=6, output_tokens=4, kv_bytes_per_token=10.0) == (15.0, 22.5)


@pytest.mark.parametrize(
    ("kappa", "expected_s"),
    [(0.0, 4.0), (0.2, 4.6), (1.0, 7.0)],
)
def test_optimal_time_with_overlap(kappa: float, expected_s: float) -> None:
    assert optimal_time_s(8.0, 3.0, sharing=0.5, overlap_kappa=kappa) == pytest.approx(expected_s)


def test_optimal_time_is_bound_by_memory_once_enough_compute_is_shared() -> None:
    assert optimal_time_s(8.0, 3.0, sharing=0.75) == 3.0


@pytest.mark.parametrize(
    ("kv_heads", "latent_dim", "expected"),
    [
        (32, 0, 524_288),  # multi-head, as Llama-2-7B
        (8, 0, 131_072),  # grouped-query, as Llama-3.1-8B
        (1, 0, 16_384),  # multi-query
        (32, 576, 36_864),  # latent: 512 values and 64 of the position, as DeepSeek-V2's layers
    ],
)
def test_bytes_of_a_token_by_kind_of_attention(kv_heads: int, latent_dim: int, expected: int) -> None:
    assert kv_bytes_per_token(32, kv_heads, 128, latent_dim) == expected


def test_densities_of_many_requests_at_once() -> None:
    model = DensityModel.in_seconds(2.0, 0.5, 0.1)
    compute_s = model.compute_s(np.array([3.0, 4.0]), np.array([2.0, 1.0]))
    assert compute_s.tolist() == [pytest.approx(10 + 0.05 * 9), pytest.approx(10 + 0.05 * 16)]
    assert model.memory_s(np.array([3.0, 4.0]), np.array([2.0, 1.0])).tolist() == [4.0, 2.25]
