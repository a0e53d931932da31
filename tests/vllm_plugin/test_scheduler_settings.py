"""What an operator may set for the scheduler inside vLLM, and a request for itself."""

import math
from typing import Any

import pytest

from neaptide_vllm.scheduling.online import target_s
from neaptide_vllm.settings import Settings


def test_settings_are_one_part_of_the_additional_config() -> None:
    settings = Settings.of({"neaptide": {"ttft_ms": 150, "tpot_ms": 30.5}, "other": 1})
    assert (settings.ttft_ms, settings.tpot_ms) == (150.0, 30.5)


@pytest.mark.parametrize("nothing", [None, {}, {"other": 1}])
def test_without_settings_targets_are_derived(nothing: Any) -> None:
    assert Settings.of(nothing) == Settings()
    assert Settings().ttft_ms is Settings().tpot_ms is None


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ({"ttft": 1}, "unknown field `ttft`"),
        ({"ttft_ms": "soon"}, "Expected `float | null`"),
        ({"tpot_ms": 0}, "tpot_ms is 0, which must be above 0"),
        ({"tpot_ms": math.nan}, "tpot_ms is nan"),
        ({"offline_max_kv_ratio": 1.5}, "offline_max_kv_ratio must be above 0 and at most 1"),
        ({"delivery_ms": -1}, "delivery_ms must not be negative"),
        ({"profile": "none"}, "profile: no profile 'none'"),
        ({"headroom": "none"}, "no headroom predictor 'none'"),
    ],
)
def test_wrong_settings_say_what_is_wrong(wrong: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=why.replace("|", r"\|")):
        Settings.of({"neaptide": wrong})


@pytest.mark.parametrize("value", [250, 250.0, "250"])
def test_a_request_names_its_target_in_milliseconds(value: Any) -> None:
    assert target_s({"ttft_ms": value}, "ttft_ms", 1.0) == 0.25


@pytest.mark.parametrize("value", [0, -1, "soon", True, None, [250], math.inf, math.nan, 10**400])
def test_a_target_that_cannot_be_leaves_the_default(value: Any) -> None:
    assert target_s({"ttft_ms": value}, "ttft_ms", 1.0) == 1.0


def test_no_target_leaves_the_default() -> None:
    assert target_s(None, "ttft_ms", 1.0) == 1.0
