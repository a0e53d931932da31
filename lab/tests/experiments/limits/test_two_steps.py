"""The experiment on two steps together, on two of its states."""

from neaptide_lab.experiments.limits.two_steps import CASES, Size, drawn, run_states


def test_steps_together_are_compared_with_one_at_a_time_and_with_policies() -> None:
    names = ("long prompt among short", "prompt behind a flood")
    result = run_states({name: CASES[name] for name in names}, Size(512, 1024, 0), ("neaptide", "priority"))
    for steps in ("2 steps", "3 steps"):
        found = result.data["horizons"][steps]
        assert set(found["states"]) == set(names)
        for one in found["states"].values():
            assert one["together"]["late"] <= min(one["one_by_one"]["late"], one["first_of_two"]["late"])
        assert [len(plans) for plans in found["policies"].values()] == [2, 2]
    two = result.data["horizons"]["2 steps"]
    assert two["policies"]["priority"][0]["late"] == 3
    assert two["states"]["long prompt among short"]["together"]["late"] == 0
    total = {row.case: (row.ours, row.paper) for row in result.rows}
    assert total["2 steps, 2 states: late by priority"] == (4, 0)


def test_a_drawn_state_is_the_same_each_time_and_has_work() -> None:
    states = [drawn(seed) for seed in range(24)]
    assert states == [drawn(seed) for seed in range(24)]
    assert all(state.streams or state.prompts or state.rows for state in states)
