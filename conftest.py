"""What all tests share."""

import gc
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# How long an example takes, or its making, says how busy the machine is; the limit per test is in pyproject.toml.
settings.register_profile("neaptide", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("neaptide")

# Threads of torch that wait for each other sleep, as the server's engines have it: where two workers share two cores,
# those that spin take the time of those that they wait for. Before anything imports torch, which reads it once.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

pytest_plugins = ["tests.acceptance", "tests.postgres", "tests.s3"]

FULL_TIMEOUT_S = 1800
"""Of a test in ``make test-full``; all others have the limit in pyproject.toml."""


LONG_FILES = ("tests/benchmarks", "tests/cluster/e2e", "tests/deploy", "tests/e2e", "tests/kept")
"""Where a file may take a minute: servers, command lines, environments."""


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """No garbage is collected while tests are. Later collections leave out what was made by then: nine thousand tests
    and all modules, which would take most of a second each time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Long files come first, in random order as all others: a worker that began with one last would end alone."""
    root = Path(__file__).parent
    long = tuple(str(root / name) for name in LONG_FILES)
    items.sort(key=lambda item: not str(item.path).startswith(long))
    for item in items:
        if item.get_closest_marker("full") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(FULL_TIMEOUT_S))


@pytest.fixture
def two_threads() -> Iterator[None]:
    """Of torch, which is imported only where they are asked for."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)
