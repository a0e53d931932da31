from types import SimpleNamespace
from typing import cast

from lab.benchmarks.engine_overhead import summary
from neaptide.engine.messages import StepStats


def stats(model_s: float, other_s: float) -> StepStats:
    each = other_s / 4
    found = SimpleNamespace(schedule_s=each, prepare_s=each, model_s=model_s, sample_s=each, commit_s=each)
    return cast(StepStats, found)


def test_the_share_is_the_median_of_the_steps_shares() -> None:
    """A stalled step counts once, however long it was."""
    found = summary([stats(0.096, 0.004), stats(0.198, 0.002), stats(0.1, 9.9)])
    assert (found["share"], found["steps"]) == (0.04, 3)
    assert (found["model_ms"], found["commit_ms"]) == (100.0, 1.0)
