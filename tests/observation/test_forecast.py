"""Intervals, settings of rivals, and a forecast of a load whose outcome is known."""

from contextlib import nullcontext

import msgspec
import pytest

from neaptide.observation.figures import Means
from neaptide.observation.forecast import (
    ALONE,
    INSIDE,
    INSTEAD,
    Estimate,
    Forecast,
    ForecastQuestion,
    Sample,
    attainment_estimate,
    batch_like,
    batch_of,
    forecast,
    priority_points,
    rate_estimate,
)
from neaptide.observation.page import page
from neaptide.observation.words import Facts, checks, option_name, sentence, warnings
from neaptide.simulation.scenario import Scenario
from tests.observation.scenes import BLOCK_SIZE, STEP_TOKENS, device
from tests.simulation.scenes import online


def test_draws_and_the_chance_of_few_chats_widen_a_share() -> None:
    alone = attainment_estimate([0.9], 100)
    assert (alone.low, alone.high) == pytest.approx((0.8388, 0.9398), abs=1e-3)
    spread = attainment_estimate([0.9, 0.8, 0.95, 0.85], 100)
    assert spread.low < alone.low < 0.9 < alone.high < spread.high
    assert attainment_estimate([1.0], 30).high == 1.0
    assert attainment_estimate([1.0], 30).low == pytest.approx(30 / (30 + 1.645**2), abs=1e-6)


def test_a_rate_is_as_uncertain_as_step_times_and_draws() -> None:
    assert rate_estimate([100.0], 0.0).low == 100.0
    found = rate_estimate([100.0], 0.1)
    assert (found.low, found.high) == pytest.approx((83.55, 116.45))
    assert rate_estimate([100.0, 90.0, 110.0], 0.1).low < found.low


def test_settings_of_priority_begin_with_the_servers_own_and_none_is_tried_twice() -> None:
    points = [(point.seats, point.step_tokens) for point in priority_points(256, 2048)]
    assert points == [(256, 2048), (256, 512), (64, 512), (16, 128)]
    small = [(point.seats, point.step_tokens) for point in priority_points(2, 32)]
    assert small == [(2, 32)]


def test_batch_lines_are_as_long_as_the_chats_and_share_nothing() -> None:
    chats = online((0.0, 20, 3), (1.0, 50, 7))
    found = batch_like(chats, seed=0)
    assert {(row.input_tokens, row.output_tokens) for row in found.requests} == {(20, 3), (50, 7)}
    assert found.sharing().ratio == 0.0
    found.check_refill()


@pytest.fixture(scope="module")
def found() -> Forecast:
    """Chats of 40 tokens and 10 of answer every 2 s, and lines that are alike."""
    chats = online(*((2.0 * k, 40, 10) for k in range(8)))
    base = Scenario(
        profile=device(),
        ttft_slo_s=1.0,
        tpot_slo_s=0.3,
        block_size=BLOCK_SIZE,
        max_num_seqs=16,
        max_num_batched_tokens=STEP_TOKENS,
    )
    question = ForecastQuestion(
        base=base,
        samples=[Sample(chats, device())] * 2,
        batch=batch_of("lines", [(40, 10)] * 64),
        overhead_s=0.05,
        simulate_s=16.0,
    )
    return forecast(question, lambda name: nullcontext())


def test_chats_alone_take_what_their_steps_take(found: Forecast) -> None:
    """A prompt of 40 tokens: 0.12 s and 40 ms. Each further token: 0.12 s, 3 ms and the context."""
    alone = found.option(ALONE)
    assert alone.attainment.value == 1.0
    assert alone.batch_tokens_per_s.value == 0.0
    assert alone.mean_ttft_s == pytest.approx(0.05 + 0.16, rel=1e-6)
    assert alone.mean_gap_s == pytest.approx(0.123 + 2e-5 * (41 + 49) / 2, rel=1e-6)


def test_batch_work_runs_beside_chats_that_stay_in_time(found: Forecast) -> None:
    for name in (INSIDE, INSTEAD):
        option = found.option(name)
        assert option.attainment.value == 1.0
        assert option.batch_tokens_per_s.value > 100.0
        assert option.valid


def test_rivals_are_there_with_their_best_setting(found: Forecast) -> None:
    assert found.option(found.best_priority).name.startswith("priority@")
    assert found.option("fcfs").attainment.value < 0.5


def test_one_replica_is_enough_for_such_chats(found: Forecast) -> None:
    assert (found.replicas.number, found.replicas.attainment) == (1, 1.0)


def test_equal_draws_add_no_spread(found: Forecast) -> None:
    rate = found.option(INSIDE).batch_tokens_per_s
    assert rate.low == pytest.approx(rate.value, rel=0.2)


# ---- words ----


def facts(found: Forecast, **attained: Estimate) -> Facts:
    """The facts of a trace on a profile.

    Args:
        attained: other shares in time; ``priority`` stands for all of its settings.
    """
    options = [
        msgspec.structs.replace(one, attainment=attained.get(one.name.partition("@")[0], one.attainment))
        for one in found.options
    ]
    return Facts(
        source="trace.csv",
        model="m",
        ttft_slo_s=1.0,
        tpot_slo_s=0.3,
        speed=1.0,
        batch="as long as the chats",
        profile="p",
        kv_tokens=16_000,
        kv_source="as the profile says",
        observed=None,
        draws_traffic=False,
        simulated=None,
        times=None,
        forecast=msgspec.structs.replace(found, options=options),
    )


def test_no_setting_is_the_best_if_none_keeps_a_chat(found: Forecast) -> None:
    late = facts(found, priority=Estimate(0.0, 0.0, 0.01))
    assert "With vLLM's priority no chat would meet them at any of" in sentence(late)
    assert not any("best" in option_name(late, option) for option in late.forecast.options)


def test_chats_that_are_late_without_batch_work_are_a_warning(found: Forecast) -> None:
    assert not any("Without any batch work" in each for each in warnings(facts(found)))
    late = facts(found, alone=Estimate(0.8, 0.7, 0.9))
    assert next(warnings(late)).startswith("Without any batch work only 80.0% of the chats are in time.")


def test_a_ttft_that_was_made_equal_is_no_check(found: Forecast) -> None:
    alone_s = found.option(ALONE).mean_ttft_s
    assert alone_s is not None
    for recorded_s, names in ((alone_s, []), (alone_s + 0.01, ["TTFT"])):
        seen = msgspec.structs.replace(facts(found), simulated=Means(recorded_s, None))
        assert [check.name for check in checks(seen)] == names


def test_a_rate_without_an_interval_shows_none(found: Forecast) -> None:
    options = [msgspec.structs.replace(one, batch_tokens_per_s=Estimate(155.0, 155.0, 155.0)) for one in found.options]
    text = page(facts(msgspec.structs.replace(found, options=options)))
    assert "155 (155 to 155)" not in text
    assert "nothing is drawn: tokens/s have no interval" in text
    assert "no difference from 155 shows an error" in text


def test_nothing_is_wrong_with_fewer_than_no_chat(found: Forecast) -> None:
    text = page(facts(found, inside=Estimate(0.0, 0.0, 0.01)))
    assert "More than 1.0% of the chats in time speak against the forecast." in text
    assert "ewer than 0.0%" not in text


def test_every_cell_of_a_narrow_page_names_its_column(found: Forecast) -> None:
    assert page(facts(found)).count("<td data-name='batch tokens/s'>") == len(found.options)


def test_a_forecast_is_plain_json(found: Forecast) -> None:
    assert msgspec.json.decode(msgspec.json.encode(found), type=Forecast) == found
