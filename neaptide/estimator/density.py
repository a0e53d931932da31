"""What a device profile says of compute density."""

from neaptide.engine.offline.density import DensityModel
from neaptide.estimator.cost.iteration_time import Regime
from neaptide.estimator.cost.step_cost import gemm_knot
from neaptide.estimator.device_profile import DeviceProfile


def density_model(profile: DeviceProfile) -> DensityModel:
    """Of mixed steps: what one more token costs in a large step, and what reading one more cached token costs."""
    cost = profile.costs[Regime.MIXED.value]
    last = len(cost.gemm_curve_s) - 1
    width = gemm_knot(last) - gemm_knot(last - 1)
    token_s = (cost.gemm_curve_s[last] - cost.gemm_curve_s[last - 1]) / width
    return DensityModel.in_seconds(token_s + cost.token_s, cost.kv_token_s, cost.pair_s)
