"""The experiment of figure 6 of Echo, on made-up results."""

from dataclasses import dataclass, field
from typing import Any

import pytest

from neaptide_lab.experiments.echo import throughput as experiment


@dataclass
class Online:
    attainment: dict[str, float]


@dataclass
class Cache:
    hit_ratio: float | None = 0.9
    saving_ratio_bound: float | None = 0.94


@dataclass
class Result:
    """What the rows read of a simulation's result."""

    online: Online
    offline_tokens_per_s: float
    kv: Cache = field(default_factory=Cache)

    @property
    def attained(self) -> float:
        return self.online.attainment["both"]


def result(tokens_per_s: float, both: float = 1.0) -> Any:
    return Result(Online({"both": both}), tokens_per_s)


def rows(
    ours_tokens_per_s: float,
    ours_both: float,
    planned_tokens_per_s: float = 480.0,
    planned_both: float = 1.0,
    *,
    judged: bool = True,
) -> dict[str, tuple[float, bool | None]]:
    runs = {policy: result(100.0) for policy in experiment.POLICIES}
    runs["echo"] = result(400.0)
    runs[experiment.OURS] = result(ours_tokens_per_s, ours_both)
    runs[experiment.PLANNED] = result(planned_tokens_per_s, planned_both)
    made = experiment._rows("loogle-qa-short", runs, result(0.0, 1.0), judged=judged)
    return {row.case.removeprefix("loogle-qa-short: "): (round(row.ours, 6), row.holds) for row in made}


def test_speed_ups_hits_and_what_attainment_is_lost_are_its_rows() -> None:
    assert rows(450.0, 0.995) == {
        "priority / priority-v0": (1.0, None),
        "bs+e / priority-v0": (1.0, None),
        "bs+e+s / priority-v0": (1.0, None),
        "echo / priority-v0": (4.0, None),
        "neaptide / priority-v0": (4.5, True),
        "neaptide, planned / priority-v0": (4.8, True),
        "neaptide / echo": (1.125, None),
        "neaptide, planned / echo": (1.2, True),
        "prefix hits of echo, bound 94.0%": (90.0, None),
        "prefix hits of neaptide, bound 94.0%": (90.0, None),
        "prefix hits of neaptide, planned, bound 94.0%": (90.0, None),
        "attainment that priority-v0 loses to online alone": (0.0, None),
        "attainment that priority loses to online alone": (0.0, None),
        "attainment that bs+e loses to online alone": (0.0, None),
        "attainment that bs+e+s loses to online alone": (0.0, None),
        "attainment that echo loses to online alone": (0.0, None),
        "attainment that neaptide loses to online alone": (0.5, True),
        "attainment that neaptide, planned loses to online alone": (0.0, True),
    }


@pytest.mark.parametrize(
    ("figures", "row"),
    [
        ((399.0, 1.0), "neaptide / priority-v0"),
        ((400.0, 0.98), "attainment that neaptide loses to online alone"),
        ((450.0, 1.0, 399.0), "neaptide, planned / priority-v0"),
        ((450.0, 1.0, 400.0), "neaptide, planned / echo"),
        ((450.0, 1.0, 480.0, 0.98), "attainment that neaptide, planned loses to online alone"),
    ],
)
def test_a_speed_up_that_is_missed_or_bought_with_attainment_does_not_hold(
    figures: tuple[float, ...], row: str
) -> None:
    assert rows(*figures)[row][1] is False


def test_in_half_a_minute_a_plan_need_not_be_ahead() -> None:
    assert rows(450.0, 1.0, 400.0, judged=False)["neaptide, planned / echo"] == (1.0, None)


@pytest.mark.parametrize(
    ("speeds", "verdict"),
    [
        ((100.0, 120.0, 150.0, 160.0, 170.0), "every rung is faster than the one below"),
        ((100.0, 90.0, 150.0, 160.0, 170.0), "not every rung is faster than the one below"),
        ((100.0, 120.0, 150.0, 160.0, 160.0), "not every rung is faster than the one below"),
    ],
)
def test_the_ladder_is_told_as_measured(speeds: tuple[float, ...], verdict: str) -> None:
    runs = dict(zip(experiment.LADDER, map(result, speeds), strict=True))
    note = experiment._ladder_note("set", runs)
    assert note.endswith(f"; {verdict}.")
    assert note.startswith(
        f"set, offline tokens/s: priority-v0 100 {'<' if speeds[1] > 100 else '>='} bs+e {speeds[1]:.0f}"
    )


def test_under_the_table_stands_what_each_policy_has_paid(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(experiment, "price", lambda one: f"{one.offline_tokens_per_s:g} at a price")
    runs = {"echo": result(3.0), "neaptide": result(4.0)}
    assert experiment._price_notes({"loogle-qa-short": runs}, result(0.0)) == [
        "loogle-qa-short under echo: 3 at a price.",
        "loogle-qa-short under neaptide: 4 at a price.",
        "neaptide, online alone: 0 at a price.",
    ]
