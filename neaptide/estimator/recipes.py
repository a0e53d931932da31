"""Recipes of cost models and headroom predictors as plain data, so that a step log can rebuild them."""

import math
from collections.abc import Callable
from typing import Any

import msgspec

from neaptide.engine.interfaces import CostModel, HeadroomPredictor
from neaptide.engine.kv.headroom import FixedHeadroom
from neaptide.estimator.cost.iteration_time import ConstantCostModel, Regime
from neaptide.estimator.cost.online_fit import OnlineCostModel
from neaptide.estimator.cost.roofline import RooflineModel
from neaptide.estimator.cost.step_cost import StepCost
from neaptide.estimator.device_profile import DeviceProfile
from neaptide.estimator.forecast import ConformalForecast, MuSigmaForecast, QuantileForecast, TwoSpeedForecast

Recipe = dict[str, Any]
HEADROOM_RATIO = 0.1
DEFAULT_HEADROOM = "near"
"""Default of the server and the simulator: see docs/memory.md."""
COVERAGE = 0.95
NEAR_HORIZON_S = 5.0
"""Short, because later online demand finds memory of offline requests that have ended by then."""
COVERING: dict[str, Callable[[int, float], HeadroomPredictor]] = {
    "quantile": QuantileForecast,
    "conformal": lambda num_blocks, coverage: ConformalForecast(num_blocks, 1.0 - coverage),
    "two-speed": lambda num_blocks, coverage: TwoSpeedForecast(num_blocks, 1.0 - coverage),
    "near": lambda num_blocks, coverage: TwoSpeedForecast(num_blocks, 1.0 - coverage, horizon_s=NEAR_HORIZON_S),
}
"""Forecasts with a coverage: a fraction of the horizons for which they hold."""
HEADROOM_KINDS = ("fixed", "mu-sigma", *COVERING)
"""``fixed@20`` reserves 20% of the blocks instead of 10%. ``two-speed@50`` covers half of the horizons instead of 95%;
likewise for the others with a coverage."""


def roofline_recipe(profile: DeviceProfile, overlap_kappa: float, *, learns: bool = True) -> Recipe:
    """The recipe of the profile's model, corrected online if it ``learns``.

    It holds the coefficients, not the profile's name. So measuring a profile again does not change an old log's
    meaning.
    """
    model = RooflineModel.from_profile(profile, overlap_kappa)
    return _recipe("online" if learns else "roofline", model)


def recipe_of(model: OnlineCostModel) -> Recipe:
    """The recipe of the model before its first step, without what it has learned."""
    return _recipe("online", model.base)


def recipe_as_it_is(model: OnlineCostModel) -> Recipe:
    """The recipe of the model with what it has learned, which learns no more."""
    return _recipe("roofline", model.as_it_is())


def _recipe(kind: str, model: RooflineModel) -> Recipe:
    costs = {regime.value: msgspec.to_builtins(cost) for regime, cost in model.costs.items()}
    for cost in costs.values():
        if not cost["shared_kv_token_s"]:  # as in logs of engines that share no reads
            del cost["shared_kv_token_s"]
    tiles = {} if model.tile_tokens == 1 else {"tile_tokens": model.tile_tokens}
    copies = {"overlaps_copies": True} if model.overlaps_copies else {}
    return {"kind": kind, "costs": costs, "overlap_kappa": model.overlap_kappa, **tiles, **copies}


def build_cost_model(recipe: Recipe) -> CostModel:
    """The cost model of a recipe.

    Raises:
        ValueError: the kind is unknown, or coefficients are missing.
    """
    try:
        if recipe["kind"] == "constant":
            return ConstantCostModel(recipe["seconds"])
        if recipe["kind"] not in ("roofline", "online"):
            raise ValueError(f"no cost model of kind {recipe['kind']!r}")
        costs = None
        if "costs" in recipe:
            costs = {Regime(name): msgspec.convert(cost, StepCost) for name, cost in recipe["costs"].items()}
        kappa, tile_tokens = recipe.get("overlap_kappa", 1.0), recipe.get("tile_tokens", 1)
        base = RooflineModel(costs, kappa, tile_tokens, recipe.get("overlaps_copies", False))
    except (KeyError, msgspec.ValidationError) as error:
        raise ValueError(f"an incomplete cost model: {error}") from error
    return OnlineCostModel(base) if recipe["kind"] == "online" else base


def check_headroom(kind: str) -> None:
    """Checks the name of a headroom predictor.

    Raises:
        ValueError: the kind is unknown, or the percentage is invalid.
    """
    build_headroom(kind, 0)


def build_headroom(kind: str, num_blocks: int) -> HeadroomPredictor:
    """The headroom predictor of this name.

    Raises:
        ValueError: the kind is unknown, or the percentage is invalid.
    """
    name, separator, percent = kind.partition("@")
    if name == "fixed":
        return FixedHeadroom(num_blocks, _share(kind, percent) if separator else HEADROOM_RATIO)
    if name in COVERING:
        return COVERING[name](num_blocks, _share(kind, percent, is_open=True) if separator else COVERAGE)
    if kind == "mu-sigma":
        return MuSigmaForecast(num_blocks)
    kinds = ", ".join(HEADROOM_KINDS)
    raise ValueError(f"no headroom predictor {kind!r}; there are: {kinds}; all but mu-sigma also as NAME@PERCENT")


def _share(kind: str, percent: str, *, is_open: bool = False) -> float:
    """Parses a percentage. ``is_open`` excludes 0 and 100."""
    try:
        share = float(percent) / 100.0
    except ValueError:
        share = math.nan
    if not 0.0 <= share <= 1.0 or (is_open and share in (0.0, 1.0)):
        ends = "above 0 and below 100" if is_open else "from 0 to 100"
        raise ValueError(f"headroom {kind}: the percentage must be a number {ends}")
    return share
