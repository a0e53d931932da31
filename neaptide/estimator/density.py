"""Compute density, from the costs of a step."""

from typing import NamedTuple

from neaptide.engine.offline.density import DensityModel
from neaptide.estimator.cost.iteration_time import Regime
from neaptide.estimator.cost.step_cost import StepCost, gemm_knot
from neaptide.estimator.device_profile import DeviceProfile

LEAST_S = 1e-12
"""Lower bound of a cost: a free operation would make every density infinite."""


class MarginalCosts(NamedTuple):
    """Seconds that one more of each adds to a large step."""

    token_s: float
    """A token's matrix products."""
    kv_token_s: float
    """Reading a cached token."""
    pair_s: float
    """Prefill attention of a (query, key) pair."""


def marginal_costs(cost: StepCost) -> MarginalCosts:
    """The marginal costs of a regime. A token costs what the last part of the curve says."""
    last = len(cost.gemm_curve_s) - 1
    width = gemm_knot(last) - gemm_knot(last - 1)
    token_s = (cost.gemm_curve_s[last] - cost.gemm_curve_s[last - 1]) / width + cost.token_s
    return MarginalCosts(max(token_s, LEAST_S), max(cost.kv_token_s, LEAST_S), cost.pair_s)


def density_model(profile: DeviceProfile) -> DensityModel:
    """The density model of a profile's mixed steps."""
    return DensityModel.in_seconds(*marginal_costs(profile.costs[Regime.MIXED.value]), profile.tile_tokens)
