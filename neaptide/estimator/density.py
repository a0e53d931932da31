"""Compute density, from a device profile or a cost model."""

from neaptide.engine.interfaces import CostModel
from neaptide.engine.offline.density import DensityModel
from neaptide.engine.steps.plan import BatchShape
from neaptide.estimator.cost.iteration_time import Regime
from neaptide.estimator.cost.step_cost import gemm_knot
from neaptide.estimator.device_profile import DeviceProfile

DECODES = 64
"""Decodes in the step that reads cached tokens, because the cost model counts requests as well."""
LEAST_S = 1e-12
"""Lower bound of a cost: a free operation would make every density infinite."""


def density_model(profile: DeviceProfile) -> DensityModel:
    """The density model of mixed steps: cost of one more token in a large step, and of reading one more cached
    token."""
    cost = profile.costs[Regime.MIXED.value]
    last = len(cost.gemm_curve_s) - 1
    width = gemm_knot(last) - gemm_knot(last - 1)
    token_s = (cost.gemm_curve_s[last] - cost.gemm_curve_s[last - 1]) / width
    return DensityModel.in_seconds(token_s + cost.token_s, cost.kv_token_s, cost.pair_s, profile.tile_tokens)


def marginal_seconds(cost_model: CostModel, step_tokens: int, kv_tokens: int) -> tuple[float, float]:
    """Seconds for one more token of a full step, and for one more cached token.

    They are slopes: between steps with half and all of the tokens, and between decodes over half and all of the memory.
    """

    def prompt_s(num_tokens: int) -> float:
        return cost_model.predict(BatchShape(prefill_tokens=num_tokens, prefill_requests=1)).seconds

    def decode_s(num_tokens: int) -> float:
        shape = BatchShape()
        shape.add_decodes(DECODES, num_tokens, num_tokens // DECODES)
        return cost_model.predict(shape).seconds

    half_tokens, half_kv = step_tokens // 2, kv_tokens // 2
    token_s = (prompt_s(step_tokens) - prompt_s(half_tokens)) / max(step_tokens - half_tokens, 1)
    kv_token_s = (decode_s(kv_tokens) - decode_s(half_kv)) / max(kv_tokens - half_kv, 1)
    return max(token_s, LEAST_S), max(kv_token_s, LEAST_S)
