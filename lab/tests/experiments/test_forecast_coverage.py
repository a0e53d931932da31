"""The measure of forecasts: demand of a trace, no view of the future, coverage and reservation."""

import numpy as np
import pytest

from neaptide.estimator.forecast import (
    ConformalForecast,
    MuSigmaForecast,
    QuantileForecast,
    TwoSpeedForecast,
    WindowForecast,
)
from neaptide_lab.experiments.forecast_coverage import (
    CONFORMAL,
    FAMILIES,
    MU_SIGMA,
    QUANTILE,
    Curves,
    Outcome,
    measure,
    one_knob,
    reservations,
    run,
)
from neaptide_lab.experiments.kv_demand import CASES, agent_requests, demand_tokens, requests_of


def test_a_request_holds_its_prompt_then_grows_and_frees_everything() -> None:
    # 1500 tokens prefill in two ticks of 25 ms; the second request only marks the end.
    held = demand_tokens(([0.05, 0.25], [1500, 10], [3, 1]))
    assert held.tolist() == [0, 0, 1500, 1500, 1501, 1502, 1503, 0, 0, 0, 10]


def test_demands_of_requests_add_up() -> None:
    one = demand_tokens(([0.0, 1.0], [700, 1], [20, 1]))
    two = demand_tokens(([0.1, 1.0], [300, 1], [5, 1]))
    both = demand_tokens(([0.0, 0.1, 1.0], [700, 300, 1], [20, 5, 1]))
    assert both[:-1].tolist() == (one + two)[:-1].tolist()


def test_every_trace_has_a_demand_below_the_capacity_of_the_machine() -> None:
    for case in CASES:
        assert 0 < demand_tokens(requests_of(case, quick=True)).max() < 400_000, case.label


@pytest.mark.parametrize("kind", [MuSigmaForecast, QuantileForecast, ConformalForecast, TwoSpeedForecast])
def test_no_forecast_sees_the_future(kind: type[WindowForecast]) -> None:
    rng = np.random.default_rng(0)
    samples = rng.integers(0, 1000, (120, 10))
    arrivals_s = sorted(rng.uniform(0, 40, 300))
    known = reservations(kind(10_000), samples, arrivals_s)
    # The first sample of second 80 is the present, the rest of it the future.
    samples[80:] += 5000
    samples[80, 0] -= 5000
    changed = reservations(kind(10_000), samples, arrivals_s)
    assert known[:81].tolist() == changed[:81].tolist()
    assert known[81:].tolist() != changed[81:].tolist()


def test_steady_demand_is_reserved_for_exactly() -> None:
    # One request a second, each gone when the next comes: 750 tokens that grow to 789.
    seconds = 400
    curves = measure("steady", ([float(s) for s in range(seconds)], [750] * seconds, [39] * seconds))
    assert curves.oracle_tokens == 789
    for q in curves.outcomes[QUANTILE.label]:
        assert (q.coverage, q.momentary_coverage, q.reserved_of_oracle) == (1.0, 1.0, 1.0)
    assert curves.outcomes[MU_SIGMA.label][0].coverage == 0.0
    assert curves.outcomes[MU_SIGMA.label][-1].coverage == 1.0


def test_what_is_held_beyond_the_capacity_is_told_apart() -> None:
    """From second 300 on 401,000 tokens: the horizons of the seconds from 270 on reach into it."""
    seconds = 400
    steady = ([float(s) for s in range(seconds)], [750] * seconds, [39] * seconds)
    arrivals_s, inputs, outputs = (list(column) for column in steady)
    inputs[300:] = [401_000] * 100
    curves = measure("too much", (arrivals_s, inputs, outputs))
    # Judged from second 200, when the forecasts are warm, to 369; the horizons of 200 to 270 end before second 301.
    assert curves.seconds == 71
    assert curves.beyond_capacity == pytest.approx(99 / 170)
    assert all(q.coverage == 1.0 for q in curves.outcomes[QUANTILE.label])
    with pytest.raises(ValueError, match="at all times"):
        measure("far too much", (arrivals_s, [401_000] * seconds, outputs))


def test_coverage_between_knobs_is_interpolated_and_ends_with_the_curve() -> None:
    outcomes = [Outcome(1.0, 0.5, 0.9, 1.0, 2.0), Outcome(2.0, 0.7, 0.95, 1.4, 2.8)]
    curves = Curves("made up", 100, 1.0, 2.0, {MU_SIGMA.label: outcomes})
    assert curves.coverage_at(MU_SIGMA, 1.1) == pytest.approx(0.55)
    assert curves.coverage_at(MU_SIGMA, 3.0) == 0.7
    assert curves.nominal(MU_SIGMA) is outcomes[1]


def test_one_knob_reserves_as_much_as_conformal_on_average() -> None:
    def curves(case: str, slope: float) -> Curves:
        # conformal reserves 1.0 of the oracle on one trace, 2.0 on the other
        conformal = Outcome(CONFORMAL.nominal, 0.95, 1.0, slope, slope)
        mu_sigma = [Outcome(k, 0.1 * k / slope, 1.0, k * slope, k * slope) for k in (0.0, 2.0)]
        return Curves(case, 100, 1.0, 1.0, {CONFORMAL.label: [conformal], MU_SIGMA.label: mu_sigma})

    # k = 1 reserves 1.0 and 2.0, like conformal, and covers 0.1 and 0.05
    mean, worst = one_knob([curves("a", 1.0), curves("b", 2.0)], MU_SIGMA)
    assert (mean, worst) == (pytest.approx(0.075), pytest.approx(0.05))


def test_starts_of_agents_depend_on_the_seed_only() -> None:
    arrivals_s, inputs, outputs = agent_requests(300.0, seed=1)
    assert (arrivals_s, inputs, outputs) == agent_requests(300.0, seed=1)
    assert arrivals_s != agent_requests(300.0, seed=2)[0]
    assert list(arrivals_s) == sorted(arrivals_s)
    assert arrivals_s[-1] < 300.0


def test_agents_call_again_after_the_answer_only() -> None:
    # With this seed the first session has 30 s for itself.
    arrivals_s, inputs, outputs = agent_requests(30.0, seed=53)
    answers_s = [a + i / 30_000 + o * 0.025 for a, i, o in zip(arrivals_s, inputs, outputs, strict=True)]
    assert len(arrivals_s) > 5
    assert all(next_s >= answer_s for answer_s, next_s in zip(answers_s, arrivals_s[1:], strict=False))


def test_more_reserved_covers_more_on_a_real_trace() -> None:
    azure_code = measure("azure_code", requests_of(CASES[1], quick=True))
    for family in (MU_SIGMA, QUANTILE):
        outcomes = azure_code.outcomes[family.label]
        assert [o.coverage for o in outcomes] == sorted(o.coverage for o in outcomes)
        assert [o.reserved_of_oracle for o in outcomes] == sorted(o.reserved_of_oracle for o in outcomes)
    for family in FAMILIES:
        assert all(o.momentary_coverage >= o.coverage for o in azure_code.outcomes[family.label])
    assert azure_code.nominal(MU_SIGMA).coverage < 0.8


@pytest.mark.full
def test_conformal_covers_what_it_promises_and_mu_plus_two_sigma_does_not() -> None:
    result = run(quick=False)
    traces = {trace["case"]: trace["outcomes"] for trace in result.data["traces"]}
    assert set(traces) == {case.label for case in CASES}
    for case, outcomes in traces.items():
        conformal = next(o for o in outcomes[CONFORMAL.label] if o["knob"] == CONFORMAL.nominal)
        published = next(o for o in outcomes[MU_SIGMA.label] if o["knob"] == MU_SIGMA.nominal)
        assert conformal["coverage"] == pytest.approx(0.95, abs=0.03), case
        assert published["coverage"] < 0.9, case


@pytest.mark.full
def test_the_plot_has_a_panel_for_each_trace() -> None:
    figure = pytest.importorskip("matplotlib.figure").Figure()
    result = run(quick=True)
    assert result.plot is not None
    result.plot(figure)
    assert [axes.get_title() for axes in figure.axes] == [case.label for case in CASES]
