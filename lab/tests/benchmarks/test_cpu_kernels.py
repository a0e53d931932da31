"""What the comparison of kernels says of their choice."""

from lab.benchmarks.cpu_kernels import slower


def test_a_wrong_choice_is_named_and_noise_is_not() -> None:
    results = [
        {"step": "wrong", "ratio": 0.61, "ratio_of_medians": 0.62},
        {"step": "one noisy run", "ratio": 0.9, "ratio_of_medians": 1.0},
        {"step": "right", "ratio": 1.2, "ratio_of_medians": 1.2},
    ]
    assert slower(results) == ["wrong"]
