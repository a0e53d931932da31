"""Costs of a token, from a profile and from a server's cost model."""

import msgspec

from neaptide.engine.offline.density import DensityModel
from neaptide.estimator.cost.iteration_time import Regime
from neaptide.estimator.cost.online_fit import OnlineCostModel
from neaptide.estimator.cost.roofline import RooflineModel
from neaptide.estimator.cost.step_cost import StepCost
from neaptide.estimator.density import LEAST_S, density_model, marginal_costs
from neaptide.estimator.device_profile import load_profile

A100 = load_profile("a100-80g-llama-3.1-8b")


def test_a_token_costs_what_the_end_of_the_curve_says() -> None:
    cost = StepCost(1.0, (1.0, 2.0, 3.5, 4.0), pair_s=0.25, kv_token_s=0.5, token_s=0.125)
    assert marginal_costs(cost) == (0.5 + 0.125, 0.5, 0.25)


def test_what_is_free_is_not_quite() -> None:
    assert marginal_costs(StepCost(1.0, (1.0, 1.0), pair_s=0.0, kv_token_s=0.0)) == (LEAST_S, LEAST_S, 0.0)


def test_a_server_and_a_simulation_plan_with_the_same_prices() -> None:
    """A server tells its planner the marginal costs of its cost model; a simulation has those of the profile."""
    server = OnlineCostModel(RooflineModel.from_profile(A100)).as_it_is()
    told = marginal_costs(server.costs[Regime.MIXED])
    assert DensityModel.in_seconds(*told, server.tile_tokens) == density_model(A100)
    assert density_model(A100).attention_flops_per_pair == A100.costs["mixed"].pair_s / 2.0


def test_the_tiles_of_a_profile_are_those_of_its_cost_model_and_of_its_plans() -> None:
    profile = msgspec.structs.replace(A100, tile_tokens=128)
    assert RooflineModel.from_profile(profile).tile_tokens == 128
    assert density_model(profile).tile_tokens == 128
