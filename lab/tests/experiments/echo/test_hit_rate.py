"""The experiment of figure 9 of Echo, on made-up steps."""

import numpy as np

from neaptide_lab.experiments.echo import hit_rate as experiment


def columns(*steps: tuple[float, float, float, float]) -> dict[str, experiment.Column]:
    names = ("end_s", "admitted_tokens", "cached_tokens", "online_admitted_tokens")
    return dict(zip(names, np.array(steps, np.float64).reshape(-1, 4).T, strict=True))


STEPS = columns(
    (100.0, 100, 90, 10),
    (104.0, 100, 70, 0),
    (106.0, 50, 45, 5),
    (112.0, 0, 0, 90),
    (116.0, 40, 10, 80),
    (123.0, 10, 9, 1),
)


def test_hits_are_counted_by_parts_of_the_run_in_which_something_was_admitted() -> None:
    series = experiment._series(STEPS, part_s=5.0)
    assert series.start_s.tolist() == [0.0, 5.0, 15.0, 20.0]
    assert series.hits.tolist() == [0.8, 0.9, 0.25, 0.9]
    assert series.online_tokens.tolist() == [10.0, 5.0, 80.0, 1.0]


def test_the_peak_is_where_most_online_tokens_were_admitted() -> None:
    series = experiment._series(STEPS, part_s=5.0)
    assert series.is_peak.tolist() == [False, False, True, False]
    assert round(series.lost_at_peak, 9) == round((160 + 45 + 9) / 260 - 0.25, 9)


def test_a_run_without_steps_has_no_series() -> None:
    series = experiment._series(columns(), part_s=5.0)
    assert (len(series.hits), series.lost_at_peak) == (0, 0.0)


def test_hits_of_the_run_and_what_the_peak_costs_are_its_rows() -> None:
    series = dict.fromkeys(experiment.POLICIES, experiment._series(STEPS, part_s=5.0))
    made = experiment._rows({"bs+e+s": 0.6, "echo": 0.75, "neaptide": 0.9}, 0.94, series)
    assert [(row.case, round(row.ours, 6), row.paper) for row in made] == [
        ("bs+e+s: prefix hits, bound 94.0%", 60.0, None),
        ("echo: prefix hits, bound 94.0%", 75.0, 78.6),
        ("neaptide: prefix hits, bound 94.0%", 90.0, None),
        ("bs+e+s: hits lost at the peak", 57.307692, None),
        ("echo: hits lost at the peak", 57.307692, None),
        ("neaptide: hits lost at the peak", 57.307692, None),
        ("hits of echo above those of bs+e+s", 15.0, None),
    ]
