from collections.abc import Iterator

import pytest

from tests.e2e.server import RunningServer


@pytest.fixture(scope="session")
def embedded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """The embedded model behind the real server, shared by the tests that change nothing."""
    with RunningServer(tmp_path_factory.mktemp("embedded"), "--max-model-len", "2048") as server:
        yield server
