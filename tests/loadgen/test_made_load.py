"""Made-up load: shapes of arrivals, lengths, shared prefixes."""

import numpy as np
import pytest

from neaptide.loadgen.workloads.made_load import SHAPES, Arrivals, Lengths, PrefixSharing, made_load

ONE = Lengths.parse("10")


def drawn(arrivals: Arrivals, seed: int = 0) -> np.ndarray:
    return np.array(arrivals.draw(np.random.default_rng(seed)))


@pytest.mark.parametrize("shape", SHAPES)
def test_every_shape_has_the_rate_and_the_duration(shape: str) -> None:
    times = drawn(Arrivals(4.0, 3000.0, shape, cv=2.0))
    assert len(times) == pytest.approx(12_000, rel=0.05)
    assert (np.diff(times) >= 0).all()
    assert times[0] >= 0
    assert times[-1] < 3000


@pytest.mark.parametrize(("shape", "cv", "expected"), [("poisson", 9.0, 1.0), ("gamma", 0.5, 0.5), ("gamma", 3.0, 3.0)])
def test_the_gaps_scatter_as_asked(shape: str, cv: float, expected: float) -> None:
    gaps = np.diff(drawn(Arrivals(10.0, 3000.0, shape, cv=cv)))
    assert gaps.std() / gaps.mean() == pytest.approx(expected, rel=0.06)


def test_nothing_arrives_while_it_is_off() -> None:
    times = drawn(Arrivals(5.0, 100.0, "on-off", on_s=2.0, off_s=8.0))
    assert (times % 10.0 < 2.0).all()
    assert len(np.unique(times // 10.0)) == 10


def test_a_day_has_its_peak_at_noon() -> None:
    times = drawn(Arrivals(50.0, 240.0, "diurnal"))  # ten seconds are an hour
    at_noon, at_five = (((times >= 10 * h) & (times < 10 * h + 10)).sum() for h in (12, 4))
    assert at_noon / at_five == pytest.approx(4.0, rel=0.15)


def test_the_seed_decides() -> None:
    load = [made_load(Arrivals(2.0, 50.0), Lengths.parse("uniform:5:50"), ONE, seed) for seed in (1, 1, 2)]
    assert load[0] == load[1] != load[2]


def test_another_seed_or_setting_has_other_prompts_and_other_prefixes() -> None:
    """Else the second run on a server would find its prompts in the cache."""

    def contents(rate_rps: float = 3.0, seed: int = 0, tokens: str = "10", prefix_tokens: int = 4) -> set[int]:
        load = made_load(Arrivals(rate_rps, 20.0), Lengths.parse(tokens), ONE, seed, PrefixSharing(2, prefix_tokens))
        return {content for request in load for content, _ in request.segments}

    runs = [contents(), contents(rate_rps=2.0), contents(seed=1), contents(tokens="12"), contents(prefix_tokens=5)]
    assert len(set().union(*runs)) == sum(map(len, runs))
    assert contents() == runs[0]


def test_prompts_begin_with_one_of_the_prefixes() -> None:
    load = made_load(Arrivals(5.0, 40.0), Lengths.parse("100"), ONE, 1, PrefixSharing(3, 64))
    assert {len(request.segments) for request in load} == {2}
    assert len({request.segments[0] for request in load}) == 3
    assert len({request.segments[1] for request in load}) == len(load)
    assert {request.input_tokens for request in load} == {100}


def test_a_prefix_leaves_a_token_of_its_own() -> None:
    load = made_load(Arrivals(5.0, 20.0), Lengths.parse("8"), ONE, 1, PrefixSharing(1, 64))
    assert {tuple(n for _, n in request.segments) for request in load} == {(7, 1)}


@pytest.mark.parametrize(
    ("text", "low", "high", "mean"),
    [("128", 128, 128, 128), ("uniform:64:192", 64, 192, 128), ("lognormal:200:100", 1, 5000, 200)],
)
def test_lengths_are_as_asked(text: str, low: int, high: int, mean: float) -> None:
    lengths = np.array(Lengths.parse(text).draw(np.random.default_rng(1), 500))
    assert lengths.min() >= low
    assert lengths.max() <= high
    assert lengths.mean() == pytest.approx(mean, rel=0.02)


@pytest.mark.parametrize("text", ["0", "-5", "many", "uniform:9:3", "uniform:0:3", "lognormal:5", "gauss:1:2", ""])
def test_lengths_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="lengths are N, uniform:LOW:HIGH or lognormal:MEAN:DEVIATION"):
        Lengths.parse(text)


@pytest.mark.parametrize(
    ("arrivals", "complaint"),
    [
        (Arrivals(0.0, 10.0), "--rate must be positive"),
        (Arrivals(float("nan"), 10.0), "--rate must be positive"),
        (Arrivals(1.0, float("inf")), "--duration must be positive"),
        (Arrivals(1.0, 10.0, cv=0.0), "--cv must be positive"),
        (Arrivals(1.0, 10.0, on_s=0.0), "--on-s must be positive"),
        (Arrivals(1e-9, 1.0), "no request arrives in this time"),
    ],
)
def test_arrivals_that_are_none_are_refused(arrivals: Arrivals, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        made_load(arrivals, ONE, ONE, 0)


def test_a_draw_far_from_the_mean_is_said(caplog: pytest.LogCaptureFixture) -> None:
    assert len(made_load(Arrivals(1.0, 10.0), ONE, ONE, seed=0)) == 17
    (said,) = caplog.messages
    assert said.startswith("this seed gives 17 requests; at this rate 10 are expected: ")
    caplog.clear()
    assert len(made_load(Arrivals(100.0, 100.0), ONE, ONE, seed=0)) == pytest.approx(10_000, rel=0.05)
    assert not caplog.messages
