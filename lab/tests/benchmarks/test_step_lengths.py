"""What ``lab.benchmarks.step_lengths`` makes of its turns."""

from lab.benchmarks.step_lengths import FREE, Turn, summary


def test_medians_answer_both_questions() -> None:
    turns = {
        FREE: [Turn(400.0, 100.0, 1.0, 0.01), Turn(410.0, 110.0, 1.0, 0.02), Turn(420.0, 500.0, 1.0, 0.9)],
        "39 ms": [Turn(38.0, 120.0, 1.0, -0.06)] * 3,
        "350 ms": [Turn(340.0, 90.0, 1.0, 0.05)] * 3,
    }
    found = summary(turns)
    assert found["is_close"] == {FREE: True, "39 ms": False, "350 ms": True}
    assert found["free_over_best"] == 110.0 / 120.0
    assert found["lengths"][FREE] == {"step_ms": 410.0, "tokens_per_s": 110.0, "speed": 1.0, "error": 0.02}
