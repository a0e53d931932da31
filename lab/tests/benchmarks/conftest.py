"""What tests of benchmarks share."""

import pytest


@pytest.fixture
def few_resamples(monkeypatch: pytest.MonkeyPatch) -> None:
    """Enough for the bounds of a few pairs, and a twentieth of the time."""
    monkeypatch.setattr("lab.benchmarks.pairs.RESAMPLES", 100)
