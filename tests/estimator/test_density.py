"""What a token costs, from a profile and from a cost model."""

import msgspec
import pytest

from neaptide.estimator.cost.roofline import RooflineModel
from neaptide.estimator.density import LEAST_S, density_model, marginal_seconds
from neaptide.estimator.device_profile import load_profile


def test_a_cost_model_of_a_profile_tells_what_the_profile_does() -> None:
    profile = load_profile("a100-80g-llama-3.1-8b")
    token_s, kv_token_s = marginal_seconds(RooflineModel.from_profile(profile, 0.0), 8192, profile.kv_capacity_tokens)
    model = density_model(profile)
    assert token_s == pytest.approx(2 * model.parameters / model.flops_per_s, rel=0.05)
    assert kv_token_s == pytest.approx(model.kv_bytes_per_token / model.bytes_per_s, rel=0.05)


def test_what_is_free_is_not_quite() -> None:
    token_s, kv_token_s = marginal_seconds(RooflineModel.from_profile(load_profile("a100-80g-llama-3.1-8b")), 2, 64)
    assert min(token_s, kv_token_s) >= LEAST_S


def test_the_tiles_of_a_profile_are_those_of_its_cost_model_and_of_its_plans() -> None:
    profile = msgspec.structs.replace(load_profile("a100-80g-llama-3.1-8b"), tile_tokens=128)
    assert RooflineModel.from_profile(profile).tile_tokens == 128
    assert density_model(profile).tile_tokens == 128
