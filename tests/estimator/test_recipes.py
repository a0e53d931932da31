"""Cost models as plain data: what is made of a recipe predicts as what it was made of."""

import msgspec
import pytest

from neaptide.estimator.cost.online_fit import OnlineCostModel
from neaptide.estimator.cost.roofline import RooflineModel
from neaptide.estimator.device_profile import load_profile
from neaptide.estimator.recipes import build_cost_model, recipe_as_it_is, recipe_of, roofline_recipe
from tests.estimator.machines import prefills


@pytest.mark.parametrize("tile_tokens", [1, 128])
def test_a_recipe_keeps_the_tiles_of_a_profile(tile_tokens: int) -> None:
    profile = msgspec.structs.replace(load_profile("h100-80g-llama-3.1-8b"), tile_tokens=tile_tokens)
    model = RooflineModel.from_profile(profile, 0.5)
    online = OnlineCostModel(model)
    for recipe in (roofline_recipe(profile, 0.5), roofline_recipe(profile, 0.5, learns=False), recipe_of(online)):
        assert build_cost_model(recipe).predict(prefills(1, 130)).seconds == model.predict(prefills(1, 130)).seconds
    as_it_is = build_cost_model(recipe_as_it_is(online))
    assert as_it_is.predict(prefills(1, 130)).seconds == model.predict(prefills(1, 130)).seconds
    assert ("tile_tokens" in roofline_recipe(profile, 0.5)) is (tile_tokens > 1)
