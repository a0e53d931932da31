"""``tools.profile_tables``: the table of the profiles that come with the package."""

import msgspec
import pytest

from neaptide.estimator.device_profile import load_profile
from tools.pages import with_part
from tools.profile_tables import BEGIN, END, NAMES, OURS, PAGE, table


def test_the_page_says_what_the_profiles_say() -> None:
    assert table([load_profile(name) for name in NAMES]) in PAGE.read_text(encoding="utf-8")


def test_errors_above_the_bound_and_above_a_rivals_are_told() -> None:
    profile = load_profile(NAMES[0])
    errors = {name: {"prefill": 0.04, "decode": 0.05, "mixed": 0.0701} for name in profile.held_out_mape}
    errors[OURS] = {"prefill": 0.03, "decode": 0.0501, "mixed": 0.07}
    noise = {"prefill": 0.0, "decode": 0.03, "mixed": 0.04}
    lines = table([msgspec.structs.replace(profile, held_out_mape=errors, noise_floor=noise)]).splitlines()
    assert "| ours | 3.0 / 5.0 / 7.0% |" in lines
    assert "| bound | 5.0 / 5.0 / 6.0% |" in lines
    assert "| ours is within the bound | yes / **no** / **no** |" in lines
    assert "| ours is the lowest | yes / **no** / yes |" in lines


def test_only_the_table_is_replaced() -> None:
    page = "# Page\n\n| mean relative error on held-out shapes | `old` |\n|---|---|\n| a | b |\n\nAnd on.\n"
    assert with_part(page, BEGIN, END, "| new |") == "# Page\n\n| new |\n\nAnd on.\n"
    with pytest.raises(ValueError, match="substring not found"):
        with_part("# Page without one\n", BEGIN, END, "| new |")
