from collections.abc import Iterator

import pytest

from tests.clients.conversation import SCRIPT
from tests.e2e.scripted import make_model
from tests.e2e.server import RunningServer


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """The embedded model behind the real server, in float32 so that its numbers compare with a reference."""
    data_dir = tmp_path_factory.mktemp("clients")
    with RunningServer(data_dir, "--max-model-len", "2048", env={"NEAPTIDE_DTYPE": "float32"}) as server:
        yield server


@pytest.fixture(scope="module")
def scripted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """A model that has the conversation of ``conversation.py``. It has the other server's name."""
    directory = tmp_path_factory.mktemp("scripted")
    model = make_model(directory / "neaptide-tiny", SCRIPT)
    with RunningServer(directory, str(model), "--executor", "sim", "--sim-step-ms", "0") as server:
        yield server
