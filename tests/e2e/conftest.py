from collections.abc import Iterator

import openai
import pytest

from tests.e2e.server import RunningServer


@pytest.fixture(scope="session")
def embedded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """The embedded model behind the real server, shared by the tests that change nothing.

    Its id has a slash, as ids of hubs have. In fp32, also where ``auto`` would be bf16: the tests compare its texts
    with each other and with a reference.
    """
    flags = ("--max-model-len", "2048", "--served-model-name", "neaptide/tiny", "--dtype", "float32")
    with RunningServer(tmp_path_factory.mktemp("embedded"), *flags) as server:
        yield server


@pytest.fixture(scope="session")
def client(embedded: RunningServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=embedded.base_url, api_key="none", max_retries=0) as client:
        yield client
