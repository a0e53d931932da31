"""Our iteration-time model: roofline terms with coefficients per regime."""

from collections.abc import Mapping, Sequence

from neaptide.engine.interfaces import Prediction
from neaptide.engine.steps.plan import BatchShape
from neaptide.estimator.cost.iteration_time import Regime, StepSample, regime_of
from neaptide.estimator.cost.roofline_fit import fit_costs
from neaptide.estimator.cost.step_cost import StepCost, StepFormula, Terms
from neaptide.estimator.device_profile import DeviceProfile

GENERIC = StepCost(
    fixed_s=5e-3,
    gemm_curve_s=(1e-4, 2e-4),
    pair_s=1e-8,
    kv_token_s=1e-7,
    decode_request_s=1e-4,
    prefill_request_s=1e-4,
    swap_block_s=1e-4,
)
"""A guess for a CPU that was never measured."""


class RooflineModel:
    """Implements ``CostModel`` with roofline terms.

    Within a regime a longer chunk or another request never takes less time, unless a given profile's curve falls. Time
    may fall where the regime changes, or where decode lengths become more even.

    Args:
        costs: coefficients for each regime.
        overlap_kappa: fraction of the overlappable time that does not overlap; 1 means a serial engine.
        tile_tokens, overlaps_copies: see ``StepFormula``.
    """

    def __init__(
        self,
        costs: Mapping[Regime, StepCost] | None = None,
        overlap_kappa: float = 1.0,
        tile_tokens: int = 1,
        overlaps_copies: bool = False,
    ) -> None:
        self.costs = dict(costs or dict.fromkeys(Regime, GENERIC))
        self.overlap_kappa = overlap_kappa
        self.tile_tokens = tile_tokens
        self.overlaps_copies = overlaps_copies
        self._compile()

    @classmethod
    def generic(cls) -> "RooflineModel":
        """The model of an unknown machine, until it has been measured."""
        return cls()

    @classmethod
    def from_profile(cls, profile: DeviceProfile, overlap_kappa: float = 1.0) -> "RooflineModel":
        """The model of a profile.

        Raises:
            ValueError: overlap is requested for a measured profile, which cannot separate compute from memory time.
        """
        if not 0.0 <= overlap_kappa <= 1.0:
            raise ValueError(f"overlap_kappa is {overlap_kappa}, not in 0..1")
        if overlap_kappa != 1.0 and profile.source == "measured":
            raise ValueError(f"profile {profile.name} is measured: it does not support overlap, only overlap_kappa = 1")
        costs = {regime: profile.costs[regime.value] for regime in Regime}
        return cls(costs, overlap_kappa, profile.tile_tokens, profile.overlaps_copies)

    def terms(self, shape: BatchShape) -> Terms:
        """The parts of the predicted time, in seconds."""
        return self.formulas[regime_of(shape)].terms(shape)

    def predict(self, shape: BatchShape) -> Prediction:
        return Prediction(sum(self.terms(shape)), 0.0)

    def observe(self, shape: BatchShape, seconds: float) -> None:
        """Does nothing: ``OnlineCostModel`` learns."""

    def fit(self, samples: Sequence[StepSample]) -> None:
        """Sets the coefficients that fit the samples with the least relative error.

        Raises:
            ValueError: there are no samples.
        """
        self.costs = fit_costs(samples)
        self._compile()

    def _compile(self) -> None:
        self.formulas = {
            regime: StepFormula(cost, self.overlap_kappa, self.tile_tokens, self.overlaps_copies)
            for regime, cost in self.costs.items()
        }
