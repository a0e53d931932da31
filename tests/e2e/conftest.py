from collections.abc import Iterator

import openai
import pytest

from tests.e2e.server import RunningServer

SIM = {"NEAPTIDE_EXECUTOR": "sim", "NEAPTIDE_SIM_STEP_MS": "10", "NEAPTIDE_SEND_TIMEOUT_S": "600"}
"""A reader may hold its stream open for as long as a test wants."""
KEYS = ("key-of-one", "key-of-two")
"""What the embedded server accepts; its own client comes with the first."""


@pytest.fixture(scope="session")
def embedded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """The embedded model behind the real server, shared by the tests that change nothing.

    Its id has a slash, as ids of hubs have. In fp32, also where ``auto`` would be bf16: the tests compare its texts
    with each other and with a reference.
    """
    flags = ["--max-model-len", "2048", "--served-model-name", "neaptide/tiny", "--dtype", "float32"]
    # Else it would measure itself first.
    flags += ["--profile", "cpu-neaptide-tiny"]
    for key in KEYS:
        flags += ["--api-key", key]
    with RunningServer(tmp_path_factory.mktemp("embedded"), *flags) as server:
        server.http.headers["Authorization"] = f"Bearer {KEYS[0]}"
        yield server


@pytest.fixture(scope="session")
def client(embedded: RunningServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=embedded.base_url, api_key=KEYS[0], max_retries=0) as client:
        yield client


@pytest.fixture(scope="session")
def simulated_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    with RunningServer(tmp_path_factory.mktemp("simulated"), "--completion-windows", "24h,5m", env=SIM) as server:
        yield server


@pytest.fixture
def simulated(simulated_server: RunningServer) -> RunningServer:
    """A server with a simulated engine and without keys, on one data directory for all tests. They may kill it: the
    next one that needs it starts it again."""
    simulated_server.be_ready()
    return simulated_server
