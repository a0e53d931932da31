"""BlendServe's densities and bounds (ASPLOS'26, section 4)."""

import math

import numpy as np
import pytest

from neaptide.engine.offline.density import DensityModel, kv_bytes_per_token

A100 = {"flops_per_s": 312e12, "bytes_per_s": 2.039e12, "kv_bytes_per_token": 131_072}
LLAMA_8B = DensityModel(8.03e9, **A100)


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
