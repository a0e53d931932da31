"""What the scheduler inside vLLM says of what it gave to whom."""

from neaptide_vllm.series import PREFIX, SERIES, Given

GAUGES = {
    "ttft_s": 0.15,
    "tpot_s": 0.03,
    "waiting_online": 1.0,
    "waiting_offline": 40.0,
    "cost_error": 0.06,
    "active": 1.0,
}


def test_counters_travel_as_increases_and_gauges_as_they_are() -> None:
    given = Given()
    given.add("streams_s", 0.25)
    given.add("steps")
    assert given.take(GAUGES) == {
        PREFIX + "streams_s": 250_000,
        PREFIX + "steps": 1,
        PREFIX + "ttft_s": 150_000,
        PREFIX + "tpot_s": 30_000,
        PREFIX + "waiting_online": 1,
        PREFIX + "waiting_offline": 40,
        PREFIX + "cost_error": 60_000,
        PREFIX + "active": 1,
    }
    assert PREFIX + "steps" not in given.take(GAUGES)


def test_the_gauges_are_those_of_the_series() -> None:
    assert set(GAUGES) == {name for name, series in SERIES.items() if not series.is_counter}


def test_the_log_line_says_what_was_given_to_whom() -> None:
    given = Given()
    for name, value in {
        "streams_s": 12.0,
        "prompts_s": 6.0,
        "offline_s": 42.0,
        "steps": 2000,
        "online_tokens": 9600,
        "offline_tokens": 24000,
        "first_in_time": 58,
        "first_late": 2,
        "answers_in_time": 60,
        "preempted": 3,
        "planning_s": 0.8,
    }.items():
        given.add(name, value)
    assert given.line(60.0, GAUGES) == (
        "neaptide, last 60 s: of the step time 20% to chats' streams, 10% to their prompts, 70% to offline work; 9,600 "
        "online and 24,000 offline tokens; 58 of 60 first tokens and 60 of 60 answers in time (TTFT 150 ms, TPOT 30 ms "
        "unless asked otherwise); 3 offline requests preempted for chats; waiting: 1 online, 40 offline; step times 6% "
        "off; planning 0.40 ms a step"
    )


def test_the_next_line_begins_anew() -> None:
    given = Given()
    given.add("offline_tokens", 100)
    given.line(60.0, GAUGES)
    assert "0 online and 0 offline tokens" in given.line(60.0, GAUGES)
