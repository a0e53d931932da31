"""Cost models and headroom predictors as plain data, so that a step log can say how to make them again."""

from typing import Any

import msgspec

from neaptide.engine.interfaces import CostModel, HeadroomPredictor
from neaptide.engine.kv.headroom import FixedHeadroom
from neaptide.estimator.cost.iteration_time import ConstantCostModel, Regime
from neaptide.estimator.cost.online_fit import OnlineCostModel
from neaptide.estimator.cost.roofline import RooflineModel
from neaptide.estimator.cost.step_cost import StepCost
from neaptide.estimator.device_profile import DeviceProfile
from neaptide.estimator.forecast import ConformalForecast, MuSigmaForecast, QuantileForecast

Recipe = dict[str, Any]
HEADROOM_RATIO = 0.1
DEFAULT_HEADROOM = "conformal"
"""What the server and the simulator take: see docs/forecast.md."""
HEADROOM_KINDS = ("fixed", "mu-sigma", "quantile", "conformal")


def roofline_recipe(profile: DeviceProfile, overlap_kappa: float, *, learns: bool = True) -> Recipe:
    """The profile's own model, corrected online if it ``learns``. Holds the coefficients, not the profile's name: a
    profile that is measured again does not change what an old log means."""
    return {
        "kind": "online" if learns else "roofline",
        "costs": msgspec.to_builtins(profile.costs),
        "overlap_kappa": overlap_kappa,
    }


def recipe_of(model: OnlineCostModel) -> Recipe:
    """The model before it has seen any step: what it has learnt is not in the recipe."""
    return _recipe("online", model.base)


def recipe_as_it_is(model: OnlineCostModel) -> Recipe:
    """The model with what it has learnt by now, and no more to learn."""
    return _recipe("roofline", model.as_it_is())


def _recipe(kind: str, model: RooflineModel) -> Recipe:
    costs = {regime.value: msgspec.to_builtins(cost) for regime, cost in model.costs.items()}
    return {"kind": kind, "costs": costs, "overlap_kappa": model.overlap_kappa}


def constant_recipe(seconds: float) -> Recipe:
    return {"kind": "constant", "seconds": seconds}


def build_cost_model(recipe: Recipe) -> CostModel:
    """
    Raises:
        ValueError: no such kind, or coefficients are missing.
    """
    try:
        if recipe["kind"] == "constant":
            return ConstantCostModel(recipe["seconds"])
        if recipe["kind"] not in ("roofline", "online"):
            raise ValueError(f"no cost model of kind {recipe['kind']!r}")
        costs = None
        if "costs" in recipe:
            costs = {Regime(name): msgspec.convert(cost, StepCost) for name, cost in recipe["costs"].items()}
        base = RooflineModel(costs, recipe.get("overlap_kappa", 1.0))
    except (KeyError, msgspec.ValidationError) as error:
        raise ValueError(f"an incomplete cost model: {error}") from error
    return OnlineCostModel(base) if recipe["kind"] == "online" else base


def build_headroom(kind: str, num_blocks: int) -> HeadroomPredictor:
    """
    Raises:
        ValueError: no such kind.
    """
    if kind == "fixed":
        return FixedHeadroom(num_blocks, HEADROOM_RATIO)
    if kind == "mu-sigma":
        return MuSigmaForecast(num_blocks)
    if kind == "quantile":
        return QuantileForecast(num_blocks)
    if kind == "conformal":
        return ConformalForecast(num_blocks)
    raise ValueError(f"no headroom predictor {kind!r}; there are: {', '.join(HEADROOM_KINDS)}")
